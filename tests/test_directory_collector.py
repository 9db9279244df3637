"""Python's collector rests while directories load, for all of the process, and goes on afterwards."""

import asyncio
import gc
from collections.abc import Generator
from typing import Any

import pytest
from pydantic import model_validator
from sidings import collector
from sidings.collector import CollectorRest

from .consumer_support import producing
from .directory_support import COMPACTED, Acquirer, a_directory, row
from .support import eventually


@pytest.fixture(autouse=True)
def _collecting() -> Generator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_goes_on_when_the_last_of_several_loads_has_ended():
    first, second = CollectorRest(), CollectorRest()
    first.rest()
    second.rest()
    second.rest()
    first.resume()
    first.resume()
    assert not gc.isenabled(), "the second still loads"
    second.resume()
    assert gc.isenabled()


def test_switched_off_by_somebody_else_it_stays_off():
    gc.disable()
    load = CollectorRest()
    load.rest()
    load.resume()
    assert not gc.isenabled()


def test_a_load_that_pauses_for_a_moment_goes_on_resting_and_one_that_waits_does_not(monkeypatch):
    load = CollectorRest()
    load.rest()
    load.resume(if_idle=True)
    assert not gc.isenabled()
    monkeypatch.setattr(collector, "_IDLE_SECONDS", 0.0)
    load.resume(if_idle=True)
    assert gc.isenabled()


async def test_nothing_is_collected_during_a_load(topic, sidings_kafka):
    rounds: list[int] = []  # of the collector, when each row was read

    class Watching(Acquirer):
        @model_validator(mode="before")
        @classmethod
        def look(cls, data: Any) -> Any:
            rounds.append(sum(generation["collections"] for generation in gc.get_stats()))
            return data

    name = await topic("terminals", partitions=2, config=COMPACTED)
    async with producing(sidings_kafka) as producer:
        sent = [await producer.send(name, row(f"T-{n}"), key=b"T-%d" % n, partition=n % 2) for n in range(10_000)]
        await producer.flush()
        assert all([await one for one in sent])
    async with a_directory(name, sidings_kafka, model=Watching) as terminals:
        assert len(terminals) == len(rounds) == 10_000
    assert len(set(rounds)) == 1
    assert gc.isenabled()


async def test_many_rows_are_looked_through_once_before_the_directory_is_ready(topic, sidings_kafka, monkeypatch):
    """It was done thrice in the minutes after, and stopped the service for that: some 0.7 s each for a million rows."""
    monkeypatch.setattr(collector, "_MANY", 10_000)
    name = await topic("terminals", config=COMPACTED)
    async with producing(sidings_kafka) as producer:
        sent = [await producer.send(name, row(f"T-{n}"), key=b"T-%d" % n) for n in range(10_000)]
        await producer.flush()
        assert all([await one for one in sent])
    terminals = a_directory(name, sidings_kafka)
    when_ready: list[tuple[int, int, int]] = []
    monkeypatch.setattr(terminals._follower, "_on_loaded", lambda: when_ready.append(gc.get_count()))
    running = asyncio.create_task(terminals.run())
    try:
        await eventually(lambda: when_ready)
    finally:
        terminals.stop()
        await running
    new, young, _ = when_ready[0]
    assert new + young < 1_000, "what was loaded is old by now"
