"""The statements that read jobs and messages, by themselves: what their parts bring, compared with what was stored."""

import json
import random
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any
from uuid import uuid4

import asyncpg
from sidings.schema import load_sql

from .support import connected

FOREIGN = 1 << 50  # a transaction id that is yet to come, as of a row that was brought from another server
LONG, TEXT = "x" * 20_000, "y" * 90  # the first is compressed
USUAL = [1, 0, 0, 0, 0]
ROOM = 1_000  # bytes, between the two


@dataclass(frozen=True)
class Stored:
    """A row that was stored, and when its transaction has committed: before or after the former read, or not at all."""

    place: int  # position or id
    where: Any  # origin or slot
    which: Any  # group or topic
    when: str  # "before", "after", "open"; "then", as "after"; "later": one that began after the former read; "foreign"
    long: bool
    numbers: list[int]  # of a job: attempt, failures, losses, priority and policy


@dataclass(frozen=True)
class Snapshot:
    """What a transaction sees, of its text."""

    xmin: int
    xmax: int
    under_way: frozenset[int]

    @classmethod
    def of(cls, text: str) -> "Snapshot":
        xmin, xmax, under_way = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(map(int, filter(None, under_way.split(",")))))

    def sees(self, xid: int) -> bool:
        return xid < self.xmin or (xid < self.xmax and xid not in self.under_way)


@dataclass(frozen=True)
class Between:
    """Two reads, and what has ended between them."""

    reader: asyncpg.Connection
    stored: list[Stored]
    snapshot: str  # of the former read
    xids: dict[str, int]  # by when

    def late(self, now: Snapshot, marks: dict[int, int], unseen: int) -> Iterator[Stored]:
        """What can be late, above the mark from which it can stand."""
        former = Snapshot.of(self.snapshot)
        ended = [mark for xid, mark in marks.items() if now.sees(xid)] + ([unseen] if now.xmax > former.xmax else [])
        for row in self.committed():
            xid = self.xids[row.when]
            if ended and row.place > min(ended) and xid < now.xmax and not former.sees(xid):
                yield row

    def committed(self) -> Iterator[Stored]:
        return (row for row in self.stored if row.when != "open")

    def of(self, where: Any, above: int, upto: int | None = None) -> list[Stored]:
        return [
            r for r in self.committed() if r.where == where and r.place > above and (upto is None or r.place <= upto)
        ]


@asynccontextmanager
async def two_reads(dsn: str, rows: list[Stored], insert: str) -> AsyncIterator[Between]:
    """The rows are stored as their `when` says."""
    xids = {"foreign": FOREIGN}
    async with AsyncExitStack() as stack:
        reader, *others = [await stack.enter_async_context(connected(dsn)) for _ in range(5)]
        shares = dict(zip(("before", "after", "then", "open"), others, strict=True))
        for when, connection in shares.items():
            await connection.execute("BEGIN")
            xids[when] = int(await connection.fetchval("SELECT pg_current_xact_id()::text"))
        other = shares["foreign"] = shares["before"]
        for when, connection in shares.items():
            await store(connection, insert, (r for r in rows if r.when == when), xids[when])
        await other.execute("COMMIT")
        snapshot = await reader.fetchval("SELECT pg_current_snapshot()::text")
        async with other.transaction():
            xids["later"] = int(await other.fetchval("SELECT pg_current_xact_id()::text"))
            await store(other, insert, (r for r in rows if r.when == "later"), xids["later"])
        for when in ("after", "then"):
            await shares[when].execute("COMMIT")
        yield Between(reader, sorted(rows, key=lambda r: r.place), snapshot, xids)


async def store(connection: asyncpg.Connection, insert: str, rows: Iterable[Stored], xid: int) -> None:
    for row in rows:
        text = LONG if row.long else TEXT
        await connection.execute(insert, row.place, row.where, row.which, str(xid), text, row.numbers)


def some_rows(chance: random.Random, places: Iterable[Any], names: list[Any]) -> list[Stored]:
    whens = ["before"] * 4 + ["after"] * 3 + ["then", "later", "open", "foreign"]
    where = list(places)
    numbers = [USUAL, USUAL, [2, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, -1, 0], [1, 0, 0, 0, 2]]
    return [
        Stored(
            n,
            chance.choice(where),
            chance.choice(names),
            chance.choice(whens),
            chance.random() < 0.1,
            chance.choice(numbers),
        )
        for n in range(1, 121)
    ]


async def test_a_read_of_jobs_brings_what_is_late_what_was_asked_for_and_what_comes_next(database: str) -> None:
    chance = random.Random(7)
    origins, groups = ["t/0", "t/1", "t/10"], ["g", "h", None]
    query = load_sql("sidings.executor", "read")
    insert = """
        INSERT INTO sidings.job (type, position, origin, "group", txid, payload,
                                 attempt, failures, losses, priority, policy)
        SELECT 'a', $1, $2, $3, $4::text::xid8, to_json($5::text), n[1], n[2], n[3], n[4], n[5]
        FROM (SELECT $6::int[]) x (n)"""
    rows = some_rows(chance, origins, groups)
    async with two_reads(database, rows, insert) as between:
        ids = {r["position"]: r["id"] for r in await between.reader.fetch("SELECT id, position FROM sidings.job")}
        for _ in range(60):
            highs, pages = [chance.randrange(125) for _ in origins], [chance.choice([0, 5, 200]) for _ in origins]
            reports, unseen = [chance.random() < 0.5 for _ in origins], chance.randrange(125)
            marks = {
                between.xids[when]: chance.randrange(125)
                for when in chance.choice([["then", "open", "after"], ["open"], []])
            }
            lanes = [
                (chance.choice(origins), chance.choice("gh"), chance.randrange(60), chance.randrange(60, 125))
                for _ in "123"
            ]
            refill, most_late, late_room = (
                chance.choice([2, 100]),
                chance.choice([3, 100]),
                chance.choice([350, 1 << 30]),
            )
            left_out = chance.choice([None, [("t/0", "g"), ("t/1", "h")]])
            found = await between.reader.fetch(
                query,
                *(origins, highs, pages, reports, between.snapshot, list(marks), list(marks.values()), unseen),
                *([lane[n] for lane in lanes] for n in range(4)),
                *(refill, None if left_out is None else ["\x1f".join(lane) for lane in left_out], uuid4()),
                *(most_late, ROOM, late_room, None),
            )
            header, *parts = found
            now = Snapshot.of(json.loads(header["payload"]))
            expected: list[tuple[Any, ...]] = []
            late = [
                (ref, r)
                for ref, (origin, high) in enumerate(zip(origins, highs, strict=True), start=1)
                for r in islice(
                    (r for r in between.late(now, marks, unseen) if r.where == origin and r.place <= high), most_late
                )
            ]
            sizes = accumulate(20_002 if r.long else 92 for _, r in late)
            for (ref, r), size in zip(late, sizes, strict=True):
                expected.append((1 if size <= late_room else 5, ref, r))
            for ref, (origin, group, after, upto) in enumerate(lanes, start=1):
                behind = [r for r in between.of(origin, after, upto) if r.which == group]
                expected += [(6 if r.long else 2, ref, r) for r in behind[:refill]]
            for ref, (origin, high, page) in enumerate(zip(origins, highs, pages, strict=True), start=1):
                behind = [
                    r
                    for r in between.of(origin, high)
                    if r.numbers[-1] == 2 or (origin, r.which) not in (left_out or [])
                ]
                expected += [(7 if r.long else 3, ref, r) for r in behind[:page]]
            last = [
                (4, ref, max((r.place for r in between.of(origin, high)), default=None))
                for ref, (origin, high, report) in enumerate(zip(origins, highs, reports, strict=True), start=1)
                if report
            ]
            assert [(p["part"], p["ref"], p["position"]) for p in parts if p["part"] == 4] == last
            brought = [p for p in parts if p["part"] != 4]
            assert [(p["part"], p["ref"], p["position"]) for p in brought] == [
                (part, ref, r.place) for part, ref, r in expected
            ]
            for p, (part, _, r) in zip(brought, expected, strict=True):
                assert (p["id"], p["group"]) == (ids[r.place], r.which)
                assert p["numbers"] == (None if r.numbers == USUAL else r.numbers)
                size = 20_002 if part in (6, 7) else None
                payload = None if p["payload"] is None else json.loads(p["payload"])
                if size is None:
                    assert payload == (None if part == 5 else LONG if r.long else TEXT)
                else:
                    assert ROOM < payload <= size or payload < size  # as it is stored, or unpacked


async def test_a_read_of_messages_brings_what_is_late_what_was_asked_for_and_what_comes_next(database: str) -> None:
    chance = random.Random(8)
    slots, topics = [0, 1, 15], ["a", "b", "c"]
    query = load_sql("sidings.kafka.outbox", "read")
    insert = """
        INSERT INTO sidings.outbox (id, slot, topic, txid, key, value, partition_key, headers, stamped_at)
        SELECT $1::bigint, $2, $3, $4::text::xid8, '1',
               convert_to(CASE WHEN $1 % 3 = 0 THEN $5::text ELSE '' END, 'UTF8'),
               CASE WHEN $1 % 3 = 1 THEN convert_to($5, 'UTF8') END,
               CASE WHEN $1 % 3 = 2 THEN json_build_array(json_build_array('h', $5)) END,
               CASE WHEN ($6::int[])[2] = 1 THEN 'infinity'::timestamptz END"""
    rows = some_rows(chance, slots, topics)
    async with two_reads(database, rows, insert) as between:
        for _ in range(60):
            highs, pages = [chance.randrange(125) for _ in slots], [chance.choice([0, 5, 200]) for _ in slots]
            marks = {
                between.xids[when]: chance.randrange(125)
                for when in chance.choice([["then", "open", "after"], ["open"], []])
            }
            unseen, left_out = chance.randrange(125), chance.choice([[], ["a"], ["a", "b", "c"]])
            shares = [
                (chance.choice(slots), chance.choice(topics), chance.randrange(60), chance.randrange(60, 125))
                for _ in "123"
            ]
            refill, most_late, late_room = (
                chance.choice([2, 5, 100]),
                chance.choice([3, 100]),
                chance.choice([350, 1 << 30]),
            )
            looked_at = chance.choice([1, 10, 1_000])
            header, *parts = await between.reader.fetch(
                query,
                *(slots, highs, pages, between.snapshot, list(marks), list(marks.values()), unseen, left_out),
                *([share[n] for share in shares] for n in range(4)),
                *(refill, most_late, ROOM, late_room, looked_at),
            )
            now = Snapshot.of(header["topic"])
            expected: list[tuple[Any, ...]] = []
            late = [
                (ref, r)
                for ref, (slot, high) in enumerate(zip(slots, highs, strict=True), start=1)
                for r in islice(
                    (r for r in between.late(now, marks, unseen) if r.where == slot and r.place <= high), most_late
                )
            ]
            sizes = accumulate(20_001 if r.long else 91 for _, r in late)
            for (ref, r), size in zip(late, sizes, strict=True):
                expected.append((1 if size <= late_room else 5, ref, r.place, r))
            few = []
            for ref, (slot, topic, after, upto) in enumerate(shares, start=1):
                looked = between.of(slot, after, upto)[:looked_at]
                behind = [r for r in looked if r.which == topic]
                expected += [(6 if r.long else 2, ref, r.place, r) for r in behind[:refill]]
                if len(behind) < refill and len(looked) == looked_at:
                    few.append((8, ref, looked[-1].place, None))
            ends = []
            for ref, (slot, high, page) in enumerate(zip(slots, highs, pages, strict=True), start=1):
                looked = between.of(slot, high)[: max(page, looked_at)]
                behind = [r for r in looked if r.which not in left_out]
                expected += [(7 if r.long else 3, ref, r.place, r) for r in behind[:page]]
                if left_out and page:
                    ends.append((4, ref, looked[-1].place if looked else None, len(looked)))
            expected += ends + few
            assert [(p["part"], p["ref"], p["id"]) for p in parts] == [row[:3] for row in expected]
            for p, (part, _, _, r) in zip(parts, expected, strict=True):
                if part == 4:
                    assert p["timestamp_ms"] == r  # their number
                elif part in (5, 6, 7):
                    assert [p[name] for name in ("key", "value", "partition_key", "headers")] == [None] * 4
                    assert 0 <= p["timestamp_ms"] - (20_001 if r.long else 91) < 20
                elif part != 8:
                    text = LONG if r.long else TEXT
                    told = p["value"].decode() + (p["partition_key"] or b"").decode() + (p["headers"] or "")
                    assert (p["topic"], p["key"], told) == (
                        r.which,
                        b"1",
                        text if r.place % 3 != 2 else f'[["h", "{text}"]]',
                    )
                    assert p["timestamp_ms"] == ((1 << 63) - 1 if r.numbers[1] else None)
