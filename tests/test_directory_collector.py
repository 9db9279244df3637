"""Python's collector rests while directories load, for all of the process, and goes on afterwards."""

import gc
from collections.abc import Generator
from typing import Any

import pytest
from pydantic import model_validator
from sidings.kafka.directory import collector
from sidings.kafka.directory.collector import Collector

from .consumer_support import producing
from .directory_support import COMPACTED, Acquirer, a_directory, row


@pytest.fixture(autouse=True)
def _collecting() -> Generator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_goes_on_when_the_last_of_several_loads_has_ended():
    first, second = Collector(), Collector()
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
    load = Collector()
    load.rest()
    load.resume()
    assert not gc.isenabled()


def test_a_load_that_pauses_for_a_moment_goes_on_resting_and_one_that_waits_does_not(monkeypatch):
    load = Collector()
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
