"""A decoder that says "not now", as while its schema registry is away: nothing is put aside, and nothing is handled out
of its key's order."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from pydantic import BaseModel, field_validator
from sidings import DirectoryNotReady, Message, Snooze, SQLite, Transaction
from sidings.kafka.partition import Partition

from .consumer_support import Number, a_service, numbers, offset_reaches, produce, record, sample
from .directory_support import COMPACTED, Acquirer, a_directory, put, row
from .support import SECONDS, eventually, value
from .test_stateless import a_service as a_stateless_service
from .test_stateless import committed, everything

_TRIES = 3  # in vain, of a message


class Away:
    """What a decoder asks: away for the first tries of each number, or for as long as it is told to be."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.for_good = False
        self.asked = Counter[object]()
        self.seconds = seconds

    def ask(self, what: object) -> None:
        self.asked[what] += 1
        if self.for_good or self.asked[what] <= _TRIES:
            raise Snooze(self.seconds, "the registry is away")


@pytest.mark.parametrize("what", ["decoder", "model", "dedup"])
async def test_a_message_that_is_put_off_is_handled_in_its_place(effects, topic, sidings_kafka, what):
    name = await topic(partitions=2)
    service, away = a_service(effects, sidings_kafka), Away()

    class Known(Number):
        @field_validator("n")
        @classmethod
        def known(cls, n: int) -> int:
            if what == "model" and n == 1:
                away.ask(n)
            return n

    def decode(message: Message[bytes]) -> Number:
        number = Number.model_validate_json(message.value)
        if what == "decoder" and number.n == 1:
            away.ask(number.n)
        return number

    def id_of(message: Message[Number]) -> str:
        if what == "dedup" and message.value.n == 1:
            away.ask(message.value.n)
        return str(message.value.n)

    declared: dict[str, Any] = {"model": Known} if what == "model" else {"decoder": decode}

    @service.consumer(name, dedup=id_of, **declared)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)

    await produce(sidings_kafka, name, range(4))
    await produce(sidings_kafka, name, range(4, 6), partition=1)
    async with service:
        await eventually(lambda: sample(service, "sidings_consumer_messages_total") == 6)
        assert sample(service, "sidings_consumer_messages_total", result="handled") == 6
    assert away.asked[1] > _TRIES
    assert await numbers(effects, "partition = 0") == [0, 1, 2, 3]
    assert await numbers(effects, "partition = 1") == [4, 5]


async def test_a_stateless_message_that_is_put_off_is_handled_in_its_place(topic, sidings_kafka):
    name, dead = await topic("positions"), await topic("dead")
    service, away, handled = a_stateless_service(sidings_kafka), Away(), list[int]()

    def decode(message: Message[bytes]) -> Number:
        number = Number.model_validate_json(message.value)
        if number.n == 1:
            away.ask(number.n)
        return number

    @service.consumer(name, stateless=True, decoder=decode, concurrency=4, dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        handled.append(message.value.n)

    await produce(sidings_kafka, name, range(4))
    async with service:
        await eventually(lambda: len(handled) == 4)
    assert handled == [0, 1, 2, 3]
    assert away.asked[1] > _TRIES
    assert await committed(sidings_kafka, name) == 4
    assert await everything(sidings_kafka, dead) == []


async def test_health_tells_of_a_message_that_is_put_off_for_long_and_no_other_partition_waits_for_it(
    effects, topic, sidings_kafka, monkeypatch, caplog
):
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.3)
    name, other = await topic("unknown", partitions=2), await topic("known")
    service, away = a_service(effects, sidings_kafka), Away()
    away.for_good = True

    def decode(message: Message[bytes]) -> Number:
        number = Number.model_validate_json(message.value)
        if number.n == 1:
            away.ask(number.n)
        return number

    @service.consumer(name, decoder=decode)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)

    service.consumer(other, model=Number)(record)
    await produce(sidings_kafka, name, range(2))
    told = f"{name}/0 offset 1: the registry is away"
    async with service:
        await eventually(lambda: any(told in problem for problem in service.problems()), service.problems)
        await produce(sidings_kafka, name, [2], partition=1)
        await eventually(offset_reaches(effects, name, 1, partition=1))
        await produce(sidings_kafka, other, [3])
        await eventually(offset_reaches(effects, other, 1))
        assert await value(effects, "SELECT count(*) FROM sidings.job") == 0
        assert await numbers(effects) == [0, 2, 3]
        away.for_good = False
        await eventually(offset_reaches(effects, name, 2))
        assert not any(told in problem for problem in service.problems())
    lines = [line for line in caplog.messages if "could not be decoded yet" in line]
    assert told in lines[0]
    assert "and works again" in lines[-1]
    assert len(lines) - 1 < away.asked[1], "a line for each try"


async def test_health_and_lag_tell_of_a_message_that_is_put_off_between_two_tries_too(
    effects, topic, sidings_kafka, monkeypatch
):
    """Where a decoder was away for two minutes at a time, `/health` complained in every other one, too short for an
    alert, and the lag stayed where it was at the first try."""
    vitals = "sidings.kafka.vitals"
    for name, seconds in (("_UNREACHABLE_SECONDS", 0.1), ("_STUCK_SECONDS", 0.5), ("_ENDS_SECONDS", 0.1)):
        monkeypatch.setattr(f"{vitals}.{name}", seconds)
    name, silences = await topic(), list[int]()
    service, away = a_service(effects, sidings_kafka), Away(2.0)
    away.for_good = True

    def decode(message: Message[bytes]) -> Number:
        number = Number.model_validate_json(message.value)
        if number.n == 1:
            away.ask(number.n)
        return number

    @service.consumer(name, decoder=decode)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)

    def tells() -> bool:
        return any("the registry is away" in problem for problem in service.problems())

    def tried_again() -> bool:
        silences.extend([] if tells() else [away.asked[1]])
        return away.asked[1] >= _TRIES

    await produce(sidings_kafka, name, range(2))
    async with service:
        await eventually(tells, service.problems)
        await eventually(tried_again)
        assert silences == []
        asked, away.seconds = away.asked[1], 3_600.0
        await eventually(lambda: away.asked[1] > asked)
        await eventually(offset_reaches(effects, name, 1))
        await produce(sidings_kafka, name, range(2, 7))
        await eventually(lambda: sample(service, "sidings_consumer_lag", topic=name) == 6)


def test_a_message_that_was_put_off_is_due_once_its_partition_is_placed_anew_and_not_decoded_yet():
    """After a rebalance the log said that decoding worked again, as soon as any other partition had a message."""
    former = Partition(TopicPartition("positions", 0))
    former.place(5)
    former.put_off = time.monotonic() + 3_600
    partition = Partition(former.tp)
    partition.inherit(former)
    partition.place(5)
    assert 0 < partition.put_off <= time.monotonic()
    partition.place(6)
    assert partition.put_off == 0, "it was passed over"


@pytest.mark.parametrize("stateless", [False, True])
async def test_a_consumer_whose_message_is_put_off_for_long_stops_at_once(effects, topic, sidings_kafka, stateless):
    name = await topic()
    service = a_stateless_service(sidings_kafka) if stateless else a_service(effects, sidings_kafka)
    away, handled = Away(3_600.0), list[int]()

    def decode(message: Message[bytes]) -> Number:
        number = Number.model_validate_json(message.value)
        if number.n:
            away.ask(number.n)
        return number

    if stateless:

        @service.consumer(name, decoder=decode, stateless=True, dead_letter=f"{name}.dlq")
        async def _(message: Message[Number]) -> None:
            handled.append(message.value.n)
    else:

        @service.consumer(name, decoder=decode)
        async def _(message: Message[Number], tx: Transaction) -> None:
            handled.append(message.value.n)

    await produce(sidings_kafka, name, range(2))
    async with asyncio.timeout(SECONDS), service:
        await eventually(lambda: away.asked and handled)
    assert handled == [0]


async def test_a_stored_message_that_is_put_off_keeps_its_place_too(effects, topic, sidings_kafka):
    """With `isolate=True` it is decoded a second time, by the job that it has become."""
    name = await topic()
    service, calls = a_service(effects, sidings_kafka), Counter[int]()

    def decode(message: Message[bytes]) -> Number:
        number = Number.model_validate_json(message.value)
        calls[number.n] += 1
        if number.n == 0 and 1 < calls[0] < 4:
            raise Snooze(0, "the registry is away")
        return number

    @service.consumer(name, decoder=decode, isolate=True)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)

    await produce(sidings_kafka, name, range(2))
    async with service:

        async def done() -> bool:
            return len(await numbers(effects)) == 2

        await eventually(done)
    assert await numbers(effects) == [0, 1]
    assert calls[0] >= 4


# -- directories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["decoder", "model"])
async def test_a_directory_is_not_ready_before_what_was_put_off_is_there(topic, sidings_kafka, what):
    name, away = await topic(config=COMPACTED), Away()
    await put(sidings_kafka, name, {"T1": row("T1"), "T2": row("T2")})
    await put(sidings_kafka, name, {"T1": row("T1", "b")})

    class Known(Acquirer):
        @field_validator("terminal_id")
        @classmethod
        def known(cls, id: str) -> str:
            if id == "T2":
                away.ask(id)
            return id

    def decode(message: Message[bytes]) -> BaseModel:
        return Known.model_validate_json(message.value)

    declared: dict[str, Any] = {"model": Known} if what == "model" else {"decoder": decode}
    async with a_directory(name, sidings_kafka, **declared) as terminals:
        assert {key: found.acquirer_id for key, found in terminals.items()} == {"T1": "b", "T2": "a"}
        assert terminals.errors() == []
    assert away.asked["T2"] > _TRIES


async def test_a_directory_whose_decoder_can_decode_nothing_says_so(topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.directory.directory._UNREACHABLE_SECONDS", 0.3)
    name, away = await topic(config=COMPACTED), Away()
    away.for_good = True
    await put(sidings_kafka, name, {"T1": row("T1")})

    def decode(message: Message[bytes]) -> Acquirer:
        away.ask(message.key)
        return Acquirer.model_validate_json(message.value)

    with pytest.raises(DirectoryNotReady):
        await asyncio.wait_for(a_directory(name, sidings_kafka, decoder=decode, load_seconds=0.5).run(), SECONDS)
    terminals = a_directory(name, sidings_kafka, decoder=decode)
    running = asyncio.create_task(terminals.run())
    told = "a record cannot be decoded yet: the registry is away"
    await eventually(lambda: any(told in problem for problem in terminals.problems()), terminals.problems)
    assert not terminals.ready
    away.for_good = False
    await terminals.wait_ready(SECONDS)
    assert "T1" in terminals
    terminals.stop()
    await asyncio.wait_for(running, SECONDS)


async def test_a_directory_that_waits_for_its_decoder_stops_at_once(topic, sidings_kafka):
    name, away = await topic(config=COMPACTED), Away(3_600.0)
    await put(sidings_kafka, name, {"T1": row("T1")})
    terminals = a_directory(name, sidings_kafka, decoder=lambda message: away.ask(message.key))
    running = asyncio.create_task(terminals.run())
    await eventually(lambda: "the registry is away" in "".join(terminals.not_ready()), terminals.not_ready)
    terminals.stop()
    await asyncio.wait_for(running, SECONDS)
    assert not terminals.ready


async def test_who_reads_a_row_of_a_file_that_cannot_be_decoded_now_is_told(topic, sidings_kafka, tmp_path: Path):
    """A file keeps the messages: a restart may have a registry away, though all of them were decoded once."""
    name, path, away = await topic(config=COMPACTED), tmp_path / "terminals.db", Away()
    away.asked["read"] = _TRIES
    await put(sidings_kafka, name, {"T1": row("T1")})

    def decode(message: Message[bytes]) -> Acquirer:
        away.ask("read")
        return Acquirer.model_validate_json(message.value)

    async with a_directory(name, sidings_kafka, decoder=decode, storage=SQLite(path)):
        pass
    away.for_good = True
    async with a_directory(name, sidings_kafka, decoder=decode, storage=SQLite(path)) as terminals:
        with pytest.raises(Snooze):
            terminals.get("T1")
        away.for_good = False
        assert terminals["T1"].acquirer_id == "a"


async def test_the_load_is_told_once_though_a_row_of_the_file_could_not_be_decoded(
    topic, sidings_kafka, tmp_path: Path
):
    name, path, told = await topic(config=COMPACTED), tmp_path / "terminals.db", list[Any]()
    away = Away()
    await put(sidings_kafka, name, {f"T{n}": row(f"T{n}") for n in range(3)})

    def decode(message: Message[bytes]) -> Acquirer:
        if message.key == b"T2":
            away.ask("read")
        return Acquirer.model_validate_json(message.value)

    away.asked["read"] = _TRIES
    async with a_directory(name, sidings_kafka, decoder=decode, storage=SQLite(path)):
        pass
    away.asked["read"] = 0
    terminals = a_directory(name, sidings_kafka, decoder=decode, storage=SQLite(path))
    terminals.on_change(lambda change: told.append((change.key, change.old)), load=True)
    async with terminals:
        assert sorted(told) == [("T0", None), ("T1", None), ("T2", None)]
    assert away.asked["read"] > _TRIES, "nothing was told as long as one could not be decoded"


async def test_a_change_is_told_though_its_value_could_not_be_decoded_when_it_was_in_the_file(
    topic, sidings_kafka, tmp_path: Path
):
    """What it had been before was not known any more, when it was read again."""
    name, path, asked, told = await topic(config=COMPACTED), tmp_path / "terminals.db", Counter[str](), list[Any]()
    await put(sidings_kafka, name, {"T1": row("T1"), "T2": row("T2")})

    def decode(message: Message[bytes]) -> Acquirer:
        found = Acquirer.model_validate_json(message.value)
        asked[found.acquirer_id] += 1
        if found.acquirer_id == "b" and asked["b"] == 2:  # for the first time from the file
            raise Snooze(0.0, "the registry is away")
        return found

    async with a_directory(name, sidings_kafka, decoder=decode, storage=SQLite(path)) as terminals:
        terminals.on_change(lambda change: told.append((change.key, change.old, change.new)))
        await put(sidings_kafka, name, {"T1": row("T1", "b")})
        await eventually(lambda: told, lambda: (asked, told))
        await put(sidings_kafka, name, {"T2": row("T2", "c")})
        await eventually(lambda: len(told) == 2, lambda: told)
    assert [(key, old.acquirer_id, new.acquirer_id) for key, old, new in told] == [("T1", "a", "b"), ("T2", "a", "c")]
