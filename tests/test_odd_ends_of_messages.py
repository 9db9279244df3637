"""Whatever a handler of messages raises, or a function of its author's that decodes them, ends no consumer, and with it
the service: each start of it would end with the same message."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sidings import Message, Snooze, Transaction

from .consumer_support import TWICE_AND_PARK, Number, a_service, numbers, offset_reaches, produce, record, sample
from .support import eventually
from .test_stateless import TWICE, committed, everything
from .test_stateless import a_service as a_stateless_service


class Panic(BaseException):
    """What an extension written in Rust raises where it panics (PyO3), as pydantic and polars are: no `Exception`."""


class Unsaid(Snooze):
    """A subclass that does not call the constructor of its base."""

    def __init__(self, reason: str) -> None:
        Exception.__init__(self, reason)


class Until(Snooze):
    """A subclass with a time of its own."""

    def __init__(self, seconds: Any) -> None:
        super().__init__(1)
        self.seconds = seconds


def deep(error: Exception) -> Exception:
    """Deeper than Python's recursion may go."""
    for _ in range(2_000):
        error = ExceptionGroup("of a task group", [error])
    return error


ODD_ENDS: dict[str, Callable[[], BaseException]] = {
    "a panic": lambda: Panic("index out of bounds"),
    "GeneratorExit": GeneratorExit,
    "a group of a panic": lambda: BaseExceptionGroup("of a task group", [Panic("index out of bounds")]),
    "a Snooze without seconds": lambda: Unsaid("x"),
    "a Snooze for NaN": lambda: Until(float("nan")),
    "a Snooze for a text": lambda: Until("soon"),
    "a Snooze for ever": lambda: Until(float("inf")),
    "groups in groups": lambda: deep(ValueError("v")),
    "a group of a Snooze without seconds": lambda: ExceptionGroup("of a task group", [Unsaid("x"), Unsaid("y")]),
}


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("case", ODD_ENDS)
async def test_whatever_a_handler_raises_its_message_has_failed_and_others_go_on(effects, topic, sidings_kafka, case):
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 1:
            _raise(ODD_ENDS[case]())
        await record(message, tx)

    await produce(sidings_kafka, name, range(3), key=None)
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") == 1)
    assert await numbers(effects) == [0, 2]


@pytest.mark.parametrize("case", ODD_ENDS)
async def test_whatever_a_stateless_handler_raises_its_message_has_failed(topic, sidings_kafka, case):
    name, dead = await topic("positions"), await topic("dead")
    handled: list[int] = []
    service = a_stateless_service(sidings_kafka)

    @service.consumer(name, stateless=True, retry=TWICE, dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        if message.value.n == 1:
            _raise(ODD_ENDS[case]())
        handled.append(message.value.n)

    await produce(sidings_kafka, name, range(3))
    async with service:
        await eventually(lambda: handled == [0, 2])
        assert sample(service, "sidings_consumer_messages_total", result="dead_letter") == 1
    assert await committed(sidings_kafka, name) == 3
    assert len(await everything(sidings_kafka, dead)) == 1


@pytest.mark.parametrize("error", [Panic, GeneratorExit, SystemExit, asyncio.CancelledError])
@pytest.mark.parametrize("what", ["decoder", "dedup"])
async def test_whatever_a_decoder_raises_its_message_is_held(effects, topic, sidings_kafka, what, error):
    name = await topic()
    service = a_service(effects, sidings_kafka)

    def decode(message: Message[bytes]) -> Number:
        number = Number.model_validate_json(message.value)
        if what == "decoder" and number.n == 1:
            raise error("odd")
        return number

    def id_of(message: Message[Number]) -> str:
        if what == "dedup" and message.value.n == 1:
            raise error("odd")
        return str(message.value.n)

    @service.consumer(name, decoder=decode, dedup=id_of)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)

    await produce(sidings_kafka, name, range(3))
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="held") == 1)
    assert await numbers(effects) == [0, 2]
