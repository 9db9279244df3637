"""`concurrency=`: no more handlers of a type run at once in an instance than it allows; others go on beside them."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sidings.errors import ConfigurationError
from sidings.jobs import Job, Registry

from .support import Ride, drained, enqueue, eventually, running

OTHER = "transports/1"
COUNT = 40


class Carrier:
    """Handlers of which no more than `most` were at work at once; they wait until it answers."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.most = self.now = self.calls = 0
        self.sizes: list[int] = []
        self._lock = threading.Lock()

    def begin(self, size: int = 1) -> None:
        with self._lock:
            self.now += 1
            self.calls += 1
            self.most = max(self.most, self.now)
            self.sizes.append(size)

    def end(self) -> None:
        with self._lock:
            self.now -= 1

    async def call(self, size: int = 1) -> None:
        self.begin(size)
        while not self.answers.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        self.end()


def plain(registry: Registry, carrier: Carrier) -> Any:
    @registry.job(group="transport", concurrency=3)
    async def call(job: Job[Ride]) -> None:
        await carrier.call()

    return call


def in_threads(registry: Registry, carrier: Carrier) -> Any:
    @registry.job(concurrency=3)
    def call(job: Job[Ride]) -> None:
        carrier.begin()
        carrier.answers.wait()
        carrier.end()

    return call


def transactional(registry: Registry, carrier: Carrier) -> Any:
    @registry.job(transactional=True, concurrency=3)
    async def call(job: Job[Ride]) -> None:
        await carrier.call()

    return call


def in_lists(registry: Registry, carrier: Carrier) -> Any:
    @registry.job(batch=5, concurrency=3)
    async def call(jobs: list[Job[Ride]]) -> None:
        await carrier.call(len(jobs))

    return call


def failing(registry: Registry, carrier: Carrier) -> Any:
    @registry.job(group="transport", concurrency=3)
    async def call(job: Job[Ride]) -> None:
        try:
            await carrier.call()
        finally:
            if job.attempt == 1:
                raise ConnectionError("the carrier has hung up")

    return call


@pytest.mark.parametrize("declare", [plain, in_threads, transactional, in_lists, failing])
async def test_no_more_handlers_of_a_type_run_at_once_than_it_allows(
    database: str, declare: Callable[[Registry, Carrier], Any]
):
    registry, carrier, ran = Registry(), Carrier(), list[int]()
    call = declare(registry, carrier)

    @registry.job()
    async def store(job: Job[Ride]) -> None:
        ran.append(job.id)

    async with running(database, registry, ("transports/0", OTHER), concurrency=20) as executor:
        for origin in ("transports/0", OTHER):
            await enqueue(database, call, [Ride(transport=f"{n}") for n in range(COUNT)], origin=origin)
        executor.wake()
        await eventually(lambda: carrier.now == 3, "as many as it allows are at work")
        await enqueue(database, store, [Ride()] * COUNT, origin=OTHER)
        executor.wake()
        await eventually(lambda: len(ran) == COUNT, "others go on beside them")
        assert carrier.now == 3
        carrier.answers.set()
        await drained(database)
    assert carrier.most == 3
    if declare is in_lists:
        assert max(carrier.sizes) == 5
        assert sum(carrier.sizes) == 2 * COUNT
    else:
        assert carrier.calls == 2 * COUNT * (2 if declare is failing else 1)


@pytest.mark.parametrize("given", [0, -1, True, 2.0, "3"])
def test_what_is_no_number_of_handlers_is_refused(given: Any):
    with pytest.raises(ConfigurationError, match=rf"call: concurrency={given!r}: give a whole number, 1 or more"):

        @Registry().job(concurrency=given)
        async def call(job: Job[Ride]) -> None: ...
