"""Rounds: the next one is packed while Kafka has the one before, and nothing is sent that should no longer be; what was
acknowledged is deleted slot by slot."""

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from aiokafka.errors import KafkaError
from aiokafka.partitioner import murmur2
from sidings.executor import now
from sidings.kafka import partition_for
from sidings.kafka.outbox import OutboxSettings, packing, rounds, senders, shunned
from sidings.kafka.outbox.backlog import Backlog, Lane, Row, Slot, id_of, slot_of
from sidings.kafka.outbox.failures import Failed
from sidings.kafka.outbox.lane_senders import LaneSenders
from sidings.kafka.outbox.lanes import LaneWorker
from sidings.kafka.outbox.ledger import Ledger
from sidings.kafka.outbox.metrics import OutboxMetrics
from sidings.kafka.outbox.recorder import Recorder
from sidings.schema import load_sql

from .outbox_support import a_relay, assert_complete, emptied, firsts, numbered, publish, publishing, records, relaying
from .support import connected, eventually, fetch, value


class Watch:
    """Looks at what is packed, and handed to Kafka, by the real things. partitions: of the only topic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, partitions: int) -> None:
        self.sizes: list[int] = []  # of the batches, as they were handed over
        self.most: Counter[tuple[str, int]] = Counter()  # batches under way at once
        self.packed_ahead = 0  # batches, while Kafka had one of each partition
        self.packed = 0  # messages
        self._under_way: defaultdict[tuple[str, int], set[asyncio.Future[object]]] = defaultdict(set)
        send, pack = senders.Sender.send, packing.Packer.pack

        async def watched_send(sender: Any, batch: Any, topic: str, partition: int) -> asyncio.Future[object]:
            self.sizes.append(batch.record_count())
            future = await send(sender, batch, topic, partition)
            pending = self._under_way[topic, partition]
            pending.add(future)
            future.add_done_callback(pending.discard)
            self.most[topic, partition] = max(self.most[topic, partition], sum(not f.done() for f in pending))
            return future

        def watched_pack(packer: Any, batch: Any, rows: Any, **options: Any) -> packing.Packed:
            busy = [any(not future.done() for future in some) for some in self._under_way.values()]
            self.packed_ahead += sum(busy) == partitions
            packed = pack(packer, batch, rows, **options)
            self.packed += len(packed.rows)
            return packed

        monkeypatch.setattr(senders.Sender, "send", watched_send)
        monkeypatch.setattr(packing.Packer, "pack", watched_pack)


Prepare = Callable[[], Awaitable[None]]


def around_packing_ahead(
    monkeypatch: pytest.MonkeyPatch, around: Callable[[rounds.Rounds, Prepare], Awaitable[None]]
) -> None:
    """Wherever the next round would be packed ahead, `around` is called with what does it."""
    prepare = rounds.Rounds._prepare

    async def wrapped(of_lane: rounds.Rounds, *args: Any) -> None:
        await around(of_lane, partial(prepare, of_lane, *args))

    monkeypatch.setattr(rounds.Rounds, "_prepare", wrapped)


async def test_the_next_round_is_packed_while_kafka_has_one_and_a_partition_has_one_batch_at_a_time(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch, partitions=3)
    etas = await topic("etas", partitions=3)
    await publish(database, etas, numbered(0, 12_000))
    async with relaying(database, sidings_kafka):
        await emptied(database)
    assert watch.packed_ahead
    assert set(watch.most.values()) == {1}, "one of them could fail, and the other overtake it"
    assert max(watch.sizes) <= 1_000
    assert watch.packed == 12_000
    found = await records(sidings_kafka, etas)
    assert len(found) == 12_000
    assert_complete(found, 12_000)


async def test_what_comes_after_a_round_was_packed_ahead_waits_for_the_next_and_no_message_is_packed_twice(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch, partitions=3)
    etas = await topic("etas", partitions=3)
    ahead: list[int] = []

    async def prepare_and_get_more(of_lane: rounds.Rounds, prepare: Prepare) -> None:
        if not ahead:
            await eventually(lambda: len(of_lane.lane.queue) >= 600)
        await prepare()
        if not ahead:
            assert of_lane._prepared is not None
            ahead.append(len(of_lane._prepared.rows))
            await publish(database, etas, numbered(1_700, 1_000))
            await eventually(lambda: len(of_lane.lane.queue) > ahead[0])

    around_packing_ahead(monkeypatch, prepare_and_get_more)
    await publish(database, etas, numbered(0, 1_700))
    async with relaying(database, sidings_kafka, window=4_000):  # a round of 1,000
        await emptied(database)
    assert 600 <= ahead[0] < 1_000
    assert watch.packed == 2_700
    found = await records(sidings_kafka, etas)
    assert len(found) == 2_700
    assert_complete(found, 2_700)


async def test_a_round_that_was_packed_ahead_is_sent_without_the_messages_of_a_slot_that_was_lost_since(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch, partitions=3)
    etas = await topic("etas", partitions=3)
    lost: list[int] = []

    async def prepare_and_lose(of_lane: rounds.Rounds, prepare: Prepare) -> None:
        await prepare()
        if (prepared := of_lane._prepared) is not None and not lost:
            slot = slot_of(prepared.rows[0])
            lost.extend((len(watch.sizes), len(prepared.rows), sum(slot_of(row) is slot for row in prepared.rows)))
            lost.append(len(prepared.batches))
            del of_lane._backlog.slots[slot.number]  # nobody else has noticed yet

    around_packing_ahead(monkeypatch, prepare_and_lose)
    await publish(database, etas, [(f"k{n % 500}", b"x") for n in range(12_000)])
    async with relaying(database, sidings_kafka, window=4_000):  # a round of 1,000: each partition's share fits a batch
        await eventually(lambda: bool(lost) and len(watch.sizes) >= lost[0] + lost[3])
    before, rows, of_the_slot, batches = lost
    assert of_the_slot
    assert sum(watch.sizes[before : before + batches]) == rows - of_the_slot


def test_what_was_acknowledged_refused_or_lost_is_not_given_back_when_the_rest_of_its_round_fails() -> None:
    ours, lost = Slot(0, "outbox/0", 1), Slot(1, "outbox/1", 1)
    backlog, lane, recorder = Backlog(10), Lane("etas"), Mock(spec=Recorder)
    backlog.add_slot(ours)
    lane.queue.extend((n, lost if n == 6 else ours, None, None, None, None, None, 0) for n in range(1, 8))
    rows = lane.take(7)
    ledger = Ledger(lane, rows, backlog, recorder)
    assert ledger.still_ours(rows) == [row for row in rows if id_of(row) != 6]
    ledger.accept(rows[3:5])
    ledger.refuse(rows[0], "too large")
    assert [id_of(row) for row in ledger.outstanding()] == [2, 3, 7]
    assert ledger.accepted == 2
    recorder.acknowledged.assert_called_once_with(lane, rows[3:5])
    recorder.refused.assert_called_once_with(lane, rows[0], "too large")
    assert lane.unaccounted == 6  # the lost one: the recorder accounts for the others


def test_two_messages_of_one_id_in_two_slots_are_two() -> None:
    """As where a sequence was behind for a while. One was settled, and the other was neither sent nor given back: its
    topic waited for it for ever."""
    first, second = Slot(0, "outbox/0", 1), Slot(1, "outbox/1", 1)
    backlog, lane = Backlog(10), Lane("etas")
    backlog.add_slot(first)
    backlog.add_slot(second)
    values = [b"1", b"2", b"large" * 4, b"3"]
    slots = [(7, first), (7, second), (8, first), (8, second)]
    rows = [(*row, b"k", None, value, None, None, 0) for row, value in zip(slots, values, strict=True)]
    lane.queue.extend(rows)
    ledger = Ledger(lane, lane.take(4), backlog, Mock(spec=Recorder))
    packed = packing.Packer("test", {}, max_bytes=10).pack(Mock(), ledger.rows)
    assert packed.rows == [rows[0], rows[1], rows[3]]
    ledger.accept(rows[:1])
    ledger.refuse(*packed.bad[0])
    assert ledger.outstanding() == [rows[1], rows[3]]


async def test_what_has_failed_is_read_again_only_after_what_was_acknowledged_has_been_deleted() -> None:
    """A refill before that would bring what is about to be deleted, and it would be sent twice."""
    slot, lane = Slot(0, "outbox/0", 1), Lane("etas")
    lane.queue.extend((n, slot, None, None, None, None, None, 0) for n in range(1, 5))
    rows = lane.take(4)
    of_lane = Mock(spec=rounds.Rounds, lane=lane)
    of_lane.forget.return_value = rows[:1]
    ignore: Any = lambda *_: None  # noqa: E731
    recorder = Mock(spec=Recorder, **{"locked_of.return_value": 0})
    worker = LaneWorker(of_lane, recorder, Mock(spec=OutboxMetrics), OutboxSettings(), ignore, ignore, ignore)
    failing = asyncio.create_task(worker._fail(Failed(KafkaError("the broker is gone"), cut=True)))
    for deleted in (rows[1:3], rows[3:]):
        for _ in range(5):
            await asyncio.sleep(0)
        assert not lane.behind
        lane.account(deleted)
    await failing
    assert lane.behind == {slot: 0}
    assert lane.unaccounted == slot.under_way == 0


@pytest.mark.parametrize("under_way", [0, 1])
async def test_a_slot_that_is_lost_with_messages_under_way_takes_the_producers_along(under_way: int) -> None:
    """Its new owner sends them. What aiokafka repeats might come behind what that one sends then."""
    relay = a_relay("postgresql://nowhere", "x:1")
    slot, relay._senders = Slot(0, "outbox/0", 7), Mock(spec=senders.Senders)
    slot.under_way = under_way
    relay.backlog.add_slot(slot)
    relay._lease_lost({"outbox/0": 6})
    assert relay.held == {"outbox/0": 7}
    relay._lease_lost({"outbox/0": 7})
    assert relay.held == {}
    assert relay._senders.kill_all.call_count == under_way


@pytest.mark.parametrize("under_way", [0, 1])
async def test_slots_of_a_server_that_was_replaced_take_the_producers_along(under_way: int) -> None:
    """These had up to half of `delivery_seconds` to come behind what the slots' new owner sent."""
    relay = a_relay("postgresql://nowhere", "x:1")
    slots, relay._senders = [Slot(n, f"outbox/{n}", 7) for n in (0, 1)], Mock(spec=senders.Senders)
    slots[0].under_way = under_way
    for slot in slots:
        relay.backlog.add_slot(slot)
    relay._new_server()
    assert relay.held == {}
    assert relay._senders.kill_all.call_count == under_way


async def test_a_repeat_waits_until_the_producer_is_dead_whose_batch_had_no_answer() -> None:
    """It might send the batch after all, behind what has been sent since."""
    dead, shared = asyncio.Event(), Mock(spec=senders.Senders)
    of_lane = LaneSenders(shared)

    async def kill(*_: object) -> None:
        await dead.wait()

    shared.kill.side_effect = kill
    of_lane.failure(Mock(spec=senders.Sender, closed=False), TimeoutError(), unreachable=True)
    choosing = asyncio.create_task(of_lane.choose(failing=False))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not choosing.done()
    dead.set()
    assert await choosing is shared.main.return_value


async def test_messages_that_are_refused_in_one_round_of_many_are_parked_and_no_other_is_held_up_or_overtaken(
    database: str, sidings_kafka: str, topic
) -> None:
    small = await topic("small", partitions=2, config={"max.message.bytes": "40000"})
    giants = {100, 101, 2_500, 5_999}
    sizes = [50_000 if n in giants else 20 for n in range(6_000)]
    await publish(database, small, [(f"k{n % 10}", b"%d " % n + b"x" * size) for n, size in enumerate(sizes)])
    async with relaying(database, sidings_kafka, window=4_000) as relay, publishing(database) as (outbox, _):
        await emptied(database)
        assert {int(p.value.split()[0]) for p in await outbox.parked(small) if p.value} == giants
        await eventually(lambda: not relay._senders._retired, "the producer that was refused something is closed")
    for key, values in firsts(await records(sidings_kafka, small)).items():
        assert [int(v.split()[0]) for v in values] == [n for n in range(int(key[1:]), 6_000, 10) if n not in giants]


async def test_a_read_tells_the_first_transaction_id_that_has_not_been_handed_out(database: str) -> None:
    """And not xmax, which is the last *completed* one + 1: a transaction at work may have that id, and a message."""
    query = load_sql("sidings.kafka.outbox", "read")
    nothing = ([], [], [], None, [], [], 0, [], [], [], [], [], 4, 1, 1, 1, 1)
    async with connected(database) as reader, connected(database) as one, connected(database) as other:
        await one.execute("BEGIN; SELECT pg_current_xact_id()")
        await other.execute("BEGIN")
        hidden = int(await other.fetchval("SELECT pg_current_xact_id()::text"))
        await one.execute("COMMIT")
        [header] = await reader.fetch(query, *nothing)
        assert header["id"] > hidden


async def test_a_deletion_takes_only_its_own_ids_from_slots_that_are_still_ours(database: str) -> None:
    """Three slots in one statement, the one in the middle taken over by another relay."""
    await publish(database, "etas", numbered(0, 400))
    stored = await fetch(database, "SELECT slot, array_agg(id ORDER BY id) ids FROM sidings.outbox GROUP BY slot")
    shares: dict[int, list[int]] = {row["slot"]: row["ids"] for row in stored}
    first, taken_over, last = sorted(shares, key=lambda slot: -len(shares[slot]))[:3]
    mine = uuid4()
    async with connected(database) as connection:
        for slot in (first, taken_over, last):
            await connection.execute(
                "INSERT INTO sidings.origin (origin, owner, epoch) VALUES ($1, $2, 1) ON CONFLICT (origin) DO UPDATE "
                "SET owner = excluded.owner, epoch = excluded.epoch",
                f"outbox/{slot}",
                uuid4() if slot == taken_over else mine,
            )
        numbers = (first, taken_over, last)
        acknowledged = {slot: shares[slot][::2] for slot in numbers}
        ends = [sum(len(acknowledged[slot]) for slot in numbers[: index + 1]) for index in range(3)]
        starts = [1, *(end + 1 for end in ends[:-1])]
        ids = ",".join(str(id) for slot in numbers for id in acknowledged[slot])
        origins = [f"outbox/{slot}" for slot in numbers]
        answer = await connection.fetch(
            load_sql("sidings.kafka.outbox", "record", "sidings"),
            *(mine, numbers, origins, [1, 1, 1], starts, ends, f"{{{ids}}}", [], [], []),
            await connection.fetchval("SELECT sidings.timeline()"),
        )
    assert {row["slot"] for row in answer} == {first, last}
    left = await fetch(database, "SELECT slot, array_agg(id ORDER BY id) ids FROM sidings.outbox GROUP BY slot")
    expected = shares | {slot: shares[slot][1::2] for slot in (first, last)}
    assert {row["slot"]: row["ids"] for row in left} == expected


async def test_a_deletion_finds_its_rows_by_the_index_and_each_slots_in_one_scan(database: str) -> None:
    await publish(database, "etas", numbered(0, 4_000))
    async with connected(database) as connection:
        await connection.execute("ANALYZE sidings.outbox")
        for setting in ("enable_seqscan = off", "enable_bitmapscan = off", "plan_cache_mode = force_generic_plan"):
            await connection.execute(f"SET {setting}")  # as the relay's own connections have it
        ids = ",".join(str(n) for n in range(1, 4_001))
        rows = await connection.fetch(
            "EXPLAIN " + load_sql("sidings.kafka.outbox", "record", "sidings"),
            *(uuid4(), [1], ["outbox/1"], [1], [1], [4_000], f"{{{ids}}}", [], [], []),
            "0",
        )
    plan = "\n".join(row[0] for row in rows)
    assert "Index Cond: ((slot = s.slot) AND (id = ANY (s.ids)))" in plan, plan
    assert "Seq Scan" not in plan
    assert await value(database, "SELECT count(*) FROM sidings.outbox") == 4_000


async def test_a_slot_whose_messages_were_passed_over_is_lost_also_where_its_lease_is_renewed_after_all() -> None:
    """The answer to the renewal came between the last look before sending and the next look at all leases: the messages
    that had been passed over were never sent, and the slot's later ones were."""
    relay = a_relay("postgresql://nowhere", "x:1")
    slot, relay._senders = Slot(0, "outbox/0", 1), Mock(spec=senders.Senders)
    relay.backlog.add_slot(slot)
    lane = relay.backlog.lane("etas")
    lane.queue.append((1, slot, None, None, None, None, None, 0))
    rows = lane.take(1)
    slot.deadline = now()
    assert not Ledger(lane, rows, relay.backlog, Mock(spec=Recorder)).still_ours(rows)
    slot.deadline = now() + 60.0
    watching = asyncio.create_task(relay._watch_leases())
    await eventually(lambda: not relay.held)
    watching.cancel()


def test_a_message_whose_slot_was_lost_is_given_up_once_however_often_its_batch_is_halved() -> None:
    ours, lost = Slot(0, "outbox/0", 1), Slot(1, "outbox/1", 1)
    backlog, lane = Backlog(10), Lane("etas")
    backlog.add_slot(ours)
    lane.queue.extend((n, lost if n == 1 else ours, None, None, None, None, None, 0) for n in range(1, 4))
    rows = lane.take(3)
    ledger = Ledger(lane, rows, backlog, Mock(spec=Recorder))
    assert ledger.still_ours(rows) == rows[1:]
    assert ledger.still_ours(rows[:1]) == []
    assert (lane.unaccounted, lost.under_way) == (2, 0)


def test_hashes_are_remembered_of_short_keys_and_of_the_last_long_one() -> None:
    packer, short, long = packing.Packer("test", {}), b"transport-1" * 10, b"transport-1" * 100
    before = sys.getrefcount(short), sys.getrefcount(long)
    chosen = [packer.partition_of("etas", key, range(64)) for key in (short, long)]
    packer.partition_of("etas", b"another" * 100, range(64))
    assert (sys.getrefcount(short), sys.getrefcount(long)) == (before[0] + 1, before[1])
    assert chosen == [packer.partition_of("etas", key, range(64)) for key in (short, long)]


@pytest.mark.parametrize("key", [b"", b"a", b"transport-1" * 100])
def test_the_first_message_goes_where_any_other_of_its_key_does(key: bytes) -> None:
    assert packing.Packer("test", {}).partition_of("etas", key, range(64)) == (murmur2(key) & 0x7FFFFFFF) % 64


def test_messages_without_a_key_go_to_one_partition_or_to_all_that_take_something() -> None:
    packer, slot = packing.Packer("test", {}), Slot(0, "outbox/0", 1)
    rows: list[Row] = [(n, slot, None, None, b"x", None, None, 0) for n in range(20)]

    def groups(*avoided: int, spread: bool) -> dict[int, list[Row]]:
        return packer.by_partition("etas", rows, range(5), avoided, spread=spread)

    for avoided in ((), (0, 3), (0, 1, 2, 4)):
        for _ in range(30):
            assert len(chosen := groups(*avoided, spread=False)) == 1
            assert chosen.keys().isdisjoint(avoided)
        assert groups(*avoided, spread=True).keys() == set(range(5)) - set(avoided)
    assert groups(0, 1, 2, 3, 4, spread=True).keys() == set(range(5))
    assert sorted(row for some in groups(2, spread=True).values() for row in some) == rows


def test_a_partition_is_shunned_until_it_takes_something_and_longer_the_more_often_it_was_tried_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time, seen = 0.0, shunned.Shunned(60.0)
    monkeypatch.setattr(shunned, "now", lambda: time)

    def avoided(*others: int) -> frozenset[int]:
        return seen.avoided("etas", range(3), frozenset(others))

    seen.failed("etas", [1])
    seen.failed("etas", [1])  # what was sent there before
    assert (avoided(), avoided(2), seen.avoided("positions", range(3), frozenset())) == ({1}, {1, 2}, frozenset())
    for seconds in (60.0, 120.0, 240.0):
        time += seconds - 1.0
        assert avoided() == {1}
        time += 1.0
        assert avoided() == frozenset()
        seen.failed("etas", [1])
    seen.took("etas", [1])
    assert avoided() == frozenset()
    seen.failed("etas", [0, 1])
    assert avoided(2) == {2}, "Kafka is away, and not some partitions"
    assert avoided() == frozenset()


def test_each_topics_keys_are_hashed_by_its_own_partitioner_wherever_they_are_asked_for() -> None:
    packer, partitions = packing.Packer("test", {"etas": "crc32"}), range(7)
    keys = [b"", b"transport-1" * 100, *(b"k%d" % n for n in range(50))]
    rows: list[Row] = [(n, Slot(0, "outbox/0", 1), key, None, b"x", None, None, 0) for n, key in enumerate(keys)]
    for topic, partitioner in (("etas", "crc32"), ("positions", "murmur2")) * 2:
        expected = {key: partition_for(key, 7, partitioner) for key in keys}
        groups = packer.by_partition(topic, rows, partitions)
        assert {row[2]: partition for partition, group in groups.items() for row in group} == expected
        assert {key: packer.partition_of(topic, key, partitions) for key in keys} == expected
        goes = packer.goes_to(topic, {1, 2}, partitions)
        assert {row[2] for row in rows if goes(row)} == {key for key in keys if expected[key] in (1, 2)}


async def test_a_topic_that_takes_smaller_batches_than_the_relay_makes_soon_gets_no_others(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each full batch was refused and halved, down to what the topic takes: 280 requests, where 133 will do."""
    small = await topic("small", config={"max.message.bytes": "20000"})
    watch = Watch(monkeypatch, 1)
    await publish(database, small, [(f"k{n % 10}", b"%d " % n + b"x" * 500) for n in range(4_000)])
    async with relaying(database, sidings_kafka), publishing(database) as (outbox, _):
        await emptied(database)
        assert await outbox.parked(small) == []
    assert len(watch.sizes) < 200
    for key, values in firsts(await records(sidings_kafka, small)).items():
        assert [int(v.split()[0]) for v in values] == list(range(int(key[1:]), 4_000, 10))


async def test_one_message_that_is_too_large_makes_no_batch_smaller(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused together with others; a batch has room for 500 of these, and half of one has not."""
    small = await topic("small", config={"max.message.bytes": "50000"})
    watch = Watch(monkeypatch, 1)
    rows = [(f"k{n % 50}", b"%d " % n + b"x" * (60_000 if n == 100 else 20)) for n in range(4_000)]
    few = {"batch_size": 500, "batch_bytes": 70_000}
    async with relaying(database, sidings_kafka, **few), publishing(database) as (outbox, _):
        await publish(database, small, rows[:200])
        await emptied(database)
        assert [p.value for p in await outbox.parked(small)] == [rows[100][1]]
        assert 1 in watch.sizes, "the others were taken apart from it"
        watch.sizes.clear()
        await publish(database, small, rows[200:])
        await emptied(database)
    assert max(watch.sizes) == 500
