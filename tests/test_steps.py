"""What each message and each job costs, in calls: what is done for each of them has to be noticed when it grows. A look
at what handlers return, for mistakes, once took more than all the rest of a message's way, and nothing failed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sidings import Call, Job, Message, Next, Registry, Transaction

from .consumer_support import Number, a_service, offset_reaches, produce
from .support import ORIGIN, Ride, connected, drained, eventually, running

COUNT = 4_000


class Calls:
    """Calls of functions in this thread, those written in C among them."""

    def __init__(self) -> None:
        self.total = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        def step(_frame: object, event: str, _what: object) -> None:
            self.total += event in ("call", "c_call")

        sys.setprofile(step)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def each(self) -> float:
        return self.total / COUNT


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.mark.parametrize(("returned", "middleware", "most"), [(None, 0, 120), ("UPDATE 1", 0, 120), (None, 1, 130)])
async def test_a_message_takes_few_calls(effects, topic, sidings_kafka, calls, returned, middleware, most):
    name = await topic()
    await produce(sidings_kafka, name, range(COUNT))
    service = a_service(effects, sidings_kafka)

    @service.consumer(name)
    async def on_number(message: Message[Number], tx: Transaction) -> Any:
        return returned

    if middleware:

        @service.middleware
        async def around(call: Call, call_next: Next) -> Any:
            return await call_next()

    with calls.counted():
        async with service:
            await eventually(offset_reaches(effects, name, COUNT))
    assert calls.each < most


@pytest.mark.parametrize("returned", [None, "UPDATE 1"])
async def test_a_job_takes_few_calls(database, calls, returned):
    registry = Registry()

    @registry.job(name="ride", group="transport")
    async def ride(job: Job[Ride]) -> Any:
        return returned

    rides = [Ride(transport=str(n % 100), number=n) for n in range(COUNT)]
    async with connected(database) as connection, connection.transaction():
        with calls.counted():
            await ride.enqueue_many(connection, rides, origin=ORIGIN)
    assert calls.each < 9
    calls.total = 0
    with calls.counted():
        async with running(database, registry):
            await drained(database)
    assert calls.each < 75
