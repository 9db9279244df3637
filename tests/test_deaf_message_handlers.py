"""A handler of messages that goes on after its timeout is told of, as one of jobs is."""

import asyncio
import contextlib

import pytest
from sidings import Message, Retry, Transaction
from tenacity import stop_never, wait_none

from .consumer_support import Number, a_service, produce
from .support import SECONDS, eventually


@pytest.mark.parametrize("way", ["stateless", "aside"])
async def test_health_tells_of_a_handler_that_goes_on_after_its_timeout(
    effects, topic, sidings_kafka, monkeypatch, way
):
    """Its partition stood still without a word."""
    monkeypatch.setattr("sidings.kafka.vitals._STUCK_SECONDS", 2.0)
    for module in ("patience", "stateless_handling"):
        monkeypatch.setattr(f"sidings.kafka.{module}.DEAF_SECONDS", 1.0, raising=False)
    name = await topic()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "group": name})
    calls, over = [], asyncio.Event()

    async def deaf() -> None:
        calls.append(None)
        if way == "aside" and len(calls) == 1:
            raise ValueError("the first time")
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    if way == "stateless":

        @service.consumer(name, stateless=True, dead_letter="dead", timeout=0.2)
        async def handle(message: Message[Number]) -> None:
            await deaf()
    else:

        @service.consumer(name, timeout=0.2, retry=Retry(wait=wait_none(), stop=stop_never))
        async def handle_too(message: Message[Number], tx: Transaction) -> None:
            await deaf()

    await produce(sidings_kafka, name, [1])
    async with service:
        try:
            await eventually(lambda: calls)
            await eventually(lambda: f"{name}/0" in str(service.problems()), service.problems, seconds=10)
        finally:
            over.set()
        await eventually(lambda: not service.problems(), service.problems)


@pytest.mark.parametrize("stateless", [False, True])
async def test_a_metric_tells_how_long_a_handler_without_a_timeout_has_been_under_way(
    effects, topic, sidings_kafka, stateless
):
    """Of a stateless one nothing told: its loop goes on beside it."""
    name = await topic()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "group": name})
    over = asyncio.Event()

    if stateless:

        @service.consumer(name, stateless=True, dead_letter="dead", timeout=None)
        async def handle(message: Message[Number]) -> None:
            await over.wait()
    else:

        @service.consumer(name, timeout=None)
        async def handle_too(message: Message[Number], tx: Transaction) -> None:
            await over.wait()

    def seconds() -> float | None:
        labels = {"service": "test", "topic": name}
        return service.samples.get_sample_value("sidings_consumer_oldest_call_seconds", labels)

    async with service:
        try:
            assert seconds() == 0
            await produce(sidings_kafka, name, [1])
            first = await eventually(seconds)
            await eventually(lambda: (seconds() or 0) > first + 0.1)
        finally:
            over.set()
        await eventually(lambda: seconds() == 0)


@pytest.mark.parametrize("stateless", [False, True])
async def test_a_stop_ends_without_a_handler_that_takes_no_notice_of_it(
    effects, topic, sidings_kafka, monkeypatch, caplog, stateless
):
    """It never ended, and the log said nothing."""
    for limit in ("life._DRAIN_SECONDS", "life._LEAVE_SECONDS", "life._END_SECONDS"):
        monkeypatch.setattr(f"sidings.service.{limit}", 0.1)
    monkeypatch.setattr("sidings.supervision._END_SECONDS", 0.1)
    name = await topic()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "group": name})
    begun, over, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def deaf(number: int) -> None:
        if number == 0:
            return
        begun.set()
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()
        left.set()

    if stateless:

        @service.consumer(name, stateless=True, dead_letter="dead")
        async def handle(message: Message[Number]) -> None:
            await deaf(message.value.n)
    else:

        @service.consumer(name)
        async def handle_too(message: Message[Number], tx: Transaction) -> None:
            await deaf(message.value.n)

    await produce(sidings_kafka, name, [0, 1])
    await service.__aenter__()
    consuming = next(task for task in asyncio.all_tasks() if task.get_name() == "sidings: the consumer")
    try:
        await asyncio.wait_for(begun.wait(), SECONDS)
        await asyncio.wait_for(service.__aexit__(None, None, None), SECONDS)
        assert not consuming.done()
        assert f"take no notice of their cancellation: {name}/0 offset 1;" in caplog.text
        assert "the consumer has not ended: the service stops without it" in caplog.text
        assert "rolled back" not in caplog.text
    finally:
        over.set()
    await asyncio.wait_for(left.wait(), SECONDS)
    await asyncio.wait([consuming], timeout=SECONDS)
    assert consuming.done()
