"""Whole relays over a Postgres, a Kafka and a clock that are simulated: each relay in an event loop of its own, that is
stepped, so that it can be paused while the others go on; every answer takes its time, and may be lost or come late.

`World.run` lets some minutes pass in a second, with faults that overlap. `World.settle` ends all but one of them, and
checks what the outbox promises: nothing is lost, first occurrences are in order by key, nothing waits for ever, nobody
is busy for nothing.
"""

import asyncio
import heapq
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf
from typing import Any, Self
from uuid import UUID

import asyncpg
import pytest
from aiokafka.errors import (
    MessageSizeTooLargeError,
    NotEnoughReplicasError,
    OutOfOrderSequenceNumber,
    ProducerClosed,
    UnknownTopicOrPartitionError,
)
from prometheus_client import CollectorRegistry
from sidings import executor
from sidings.errors import KafkaUnavailable, PostgresUnavailable
from sidings.executor import PostgresSettings
from sidings.kafka import KafkaSettings
from sidings.kafka.outbox import (
    OutboxSettings,
    Relay,
    lane_senders,
    lanes,
    ledger,
    reader,
    recorder,
    relay,
    rounds,
    senders,
    shunned,
    slots,
)
from sidings.kafka.outbox.backlog import Slot
from sidings.kafka.outbox.packing import Packer
from sidings.schema import load_sql

LEASE, MARGIN = 5.0, 0.5
PARTITIONS = 4
FAULTS = (
    *("pause", "stop", "kill", "crowd", "burst"),  # of relays and writers
    *("away", "restart", "slow", "faults"),  # of Postgres
    *("no kafka", "hang", "fail", "missing", "late", "stuck"),  # of Kafka, for one relay, one topic, or all
)
NAMES = [f"outbox/{number}" for number in range(16)]
_OUTBOX = (
    *("read", "record", "attend", "acquire", "leave", "inherited"),
    *("topic_fails", "topic_works", "park_topic", "waiting", "waits", "doubt", "locked"),
)


class Header(tuple[Any, ...]):
    """The first row of an answer, which is read by name as well."""

    fields: dict[str, Any]

    def __new__(cls, **fields: Any) -> Self:
        made = super().__new__(
            cls,
            (0, 0, fields["id"], fields["topic"], None, None, None, fields["headers"], fields["timestamp_ms"], None),
        )
        made.fields = {"ref": 0, **fields}
        return made

    def __getitem__(self, key: Any) -> Any:
        return self.fields[key] if isinstance(key, str) else super().__getitem__(key)


@dataclass
class Stored:
    id: int
    xid: int
    slot: int
    topic: str
    key: bytes | None = b""
    value: bytes = b""


class Database:
    """The outbox as read.sql sees it."""

    def __init__(self) -> None:
        self.server = "server timeline 1"
        self.rows: dict[int, Stored] = {}
        self.next_id = 1
        self.next_xid = 100
        self.open: set[int] = set()
        self.aborted: set[int] = set()

    def begin(self) -> int:
        self.open.add(self.next_xid)
        self.next_xid += 1
        return self.next_xid - 1

    def insert(self, xid: int, slot: int, topic: str, key: bytes | None = b"", value: bytes = b"") -> Stored:
        row = self.rows[self.next_id] = Stored(self.next_id, xid, slot, topic, key, value)
        self.next_id += 1
        return row

    def snapshot(self) -> str:
        xmin = min(self.open, default=self.next_xid)
        return f"{xmin}:{self.next_xid}:{','.join(map(str, sorted(self.open)))}"

    @staticmethod
    def visible(xid: int, snapshot: str) -> bool:
        _, xmax, running = snapshot.split(":")
        return xid < int(xmax) and str(xid) not in running.split(",")

    def committed(self) -> list[Stored]:
        """What every new statement sees."""
        return [r for r in self.rows.values() if r.xid not in self.open and r.xid not in self.aborted]

    def meanwhile(self) -> None:
        """What others do after the snapshot of a read, before it looks how far ids have been drawn."""

    def read(self, arguments: tuple[Any, ...]) -> list[Any]:
        slots, highs, pages, before, open_ids, open_marks, unseen, left_out, *refills = arguments
        g_slots, g_topics, after, upto, page, most_late, largest, late_bytes, most_looked = refills
        now = self.snapshot()
        seen = sorted(self.committed(), key=lambda r: r.id)
        of_slot: dict[int, list[Stored]] = defaultdict(list)
        for row in seen:
            of_slot[row.slot].append(row)
        header = {"id": self.next_xid, "topic": now, "headers": self.server}
        self.meanwhile()
        answer: list[Any] = [Header(**header, timestamp_ms=self.next_id - 1)]

        def line(part: int, ref: int, row: Stored, too_large: bool = False) -> tuple[Any, ...]:
            if too_large or (part != 1 and len(row.value) > largest):
                return (part + 4, ref, row.id, row.topic, row.key, None, None, None, len(row.value), 0)
            return (part, ref, row.id, row.topic, row.key, None, row.value, None, 0, 0)

        marks = [mark for xid, mark in zip(open_ids, open_marks, strict=True) if self.visible(xid, now)]
        if before is not None and int(now.split(":")[1]) > int(before.split(":")[1]):
            marks.append(unseen)
        if marks:
            size = 0
            for ref, (slot, high) in enumerate(zip(slots, highs, strict=True), 1):
                late = [
                    r for r in of_slot[slot] if min(marks) < r.id <= high and not self.visible(r.xid, before or now)
                ]
                for row in late[:most_late]:
                    size += len(row.value)
                    answer.append(line(1, ref, row, too_large=size > late_bytes))
        for ref, share in enumerate(zip(g_slots, g_topics, after, upto, strict=True), 1):
            slot, topic, low, high = share
            looked = [r for r in of_slot[slot] if low < r.id <= high][:most_looked]
            found = [r for r in looked if r.topic == topic]
            answer += [line(2, ref, r) for r in found[:page]]
            if len(looked) == most_looked and len(found) < page:
                answer.append((8, ref, looked[-1].id, None, None, None, None, None, None, None))
        for ref, (slot, high, size) in enumerate(zip(slots, highs, pages, strict=True), 1):
            looked = [r for r in of_slot[slot] if r.id > high][: max(size, most_looked)]
            answer += [line(3, ref, r) for r in [r for r in looked if r.topic not in left_out][:size]]
            if left_out:
                top = looked[-1].id if looked else None
                answer.append((4, ref, top, None, None, None, None, None, len(looked), None))
        return answer


@dataclass
class Lease:
    owner: UUID | None = None
    epoch: int = 0
    until: float = -inf


class Postgres(Database):
    """One server: the outbox, and the statements of relays, each of them at once."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self.world = world
        self.started = -inf
        self.leases = {name: Lease() for name in NAMES}
        self.relays: dict[UUID, float] = {}
        self.failing: dict[tuple[str, UUID], float] = {}
        self.parked: dict[int, Stored] = {}
        self.locks: dict[int, float] = {}  # of messages, until when somebody has them

    @property
    def timeline(self) -> str:
        return self.server.rpartition(" ")[2]

    def meanwhile(self) -> None:
        if self.world.busy and self.world.primary is self and self.world.choose.random() < 0.1:
            self.world.write()

    def copy(self, world: "World") -> "Postgres":
        """A standby that has replayed all until now. What was open there is rolled back."""
        self.world = None  # type: ignore[assignment]
        other = deepcopy(self)
        self.world = other.world = world
        return other

    def execute(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        return getattr(self, f"_{name}")(*args)

    def _read(self, *args: Any) -> list[Any]:
        return self.read(args)

    def _ours(self, me: UUID, names: Iterable[str], epochs: Iterable[int]) -> list[str]:
        pairs = zip(names, epochs, strict=True)
        return [n for n, e in pairs if self.leases[n].owner == me and self.leases[n].epoch == e]

    def _record(self, me: UUID, slots, names, epochs, firsts, lasts, text, p_slots, p_ids, errors, timeline):
        if timeline != self.timeline:
            return []
        ours = set(self._ours(me, names, epochs))
        ids = [int(i) for i in text[1:-1].split(",") if i.strip()]
        self._want([*ids, *p_ids])
        shares = zip(slots, names, firsts, lasts, strict=True)
        mine = [(slot, ids[first - 1 : last]) for slot, name, first, last in shares if name in ours]
        for slot, some in mine:
            for id in some:
                if id in self.rows and self.rows[id].slot == slot:
                    del self.rows[id]
        held = {slot for slot, _ in mine}
        for slot, id in zip(p_slots, p_ids, strict=True):
            if slot in held and id in self.rows:
                self.parked[id] = self.rows.pop(id)
        return [{"slot": slot} for slot in held]

    def _want(self, ids: Iterable[int]) -> None:
        if any(id in self.rows and self.locks.get(id, 0.0) > self.world.time for id in ids):
            raise asyncpg.LockNotAvailableError("canceling statement due to lock timeout")

    def _locked(self, slots: list[int], ids: list[int]):
        found = [(slot, id) for slot, id in zip(slots, ids, strict=True) if id in self.rows]
        return [{"slot": slot, "id": id} for slot, id in found if self.locks.get(id, 0.0) > self.world.time]

    def _attend(self, me: UUID, seconds: float, host: str, pid: int, names: list[str], clear: bool):
        time = self.world.time
        self.relays[me] = time + seconds
        for gone in [id for id, until in self.relays.items() if clear and until < time - 60.0 and id != me]:
            self._leave(gone)
        alive = [id for id, until in self.relays.items() if until > time and id != me]
        return [
            {
                "timeline": self.timeline,
                "others": len(alive),
                "place": sum(id < me for id in alive),
                "free": [n for n in names if self.leases[n].owner is None or self.leases[n].until < time],
                "due": sorted(t for (t, r), at in self.failing.items() if r == me and at <= time),
                "directories": list(self.world.directories),
                "doubtful": [],
            }
        ]

    def _acquire(self, me: UUID, names: list[str], lease: Any):
        time, out = self.world.time, []
        for name in names:
            it = self.leases[name]
            expired = it.until < time and self.started + LEASE < time
            if it.owner in (None, me) or expired:
                it.owner, it.epoch, it.until = me, it.epoch + 1, time + lease.total_seconds()
                out.append({"acquired": name, "acquired_epoch": it.epoch, "timeline": self.timeline})
        return out

    def _release(self, me: UUID, names: list[str], epochs: list[int]):
        for name in self._ours(me, names, epochs):
            self.leases[name] = Lease(None, self.leases[name].epoch + 1)
        return []

    def renew(self, me: UUID, names: list[str], epochs: list[int]) -> set[str]:
        ours = self._ours(me, names, epochs)
        for name in ours:
            self.leases[name].until = self.world.time + LEASE
        return set(ours)

    def _leave(self, me: UUID):
        self.relays.pop(me, None)
        for pair in [pair for pair in self.failing if pair[1] == me]:
            del self.failing[pair]
        return []

    def _inherited(self, numbers: list[int]):
        return []

    def _topic_fails(self, topic: str, me: UUID, retries: int, pause: float, error: str):
        if me in self.relays:
            self.failing[topic, me] = self.world.time + pause
        return []

    def _topic_works(self, topic: str, me: UUID):
        self.failing.pop((topic, me), None)
        return []

    def _park_topic(
        self, me: UUID, slots, names, epochs, topic: str, error: str, most: int, sent: list[int], after, looked: int
    ):
        ours, rows = set(self._ours(me, names, epochs)), self.committed()
        answer: list[dict[str, Any]] = []
        before = len(self.parked)
        for slot, name, mark in zip(slots, names, after, strict=True):
            if name not in ours:
                continue
            page = sorted((row for row in rows if row.slot == slot and row.id > mark), key=lambda row: row.id)[:looked]
            for row in page:
                if row.topic == topic and row.id not in sent and self.locks.get(row.id, 0.0) <= self.world.time:
                    self.parked[row.id] = self.rows.pop(row.id)
            answer.append({"slot": slot, "upto": page[-1].id if len(page) == looked else None})
        return [row | {"parked": len(self.parked) - before} for row in answer]

    def _waiting(self, slots: list[int], in_turn: bool):
        return []

    def _waits(self, slots: list[int], topics: list[str] | None):
        found = (row for row in self.committed() if row.slot in slots)
        return [{"waits": any(topics is None or row.topic in topics for row in found)}]

    def _doubt(self, topic: str, keys: list[bytes]):
        if topic in self.world.directories:
            raise asyncpg.ProgramLimitExceededError("index row size exceeds the maximum")
        return []


class SimLink:
    """A `Link`, with its latency and its faults. It stays with its server until it is dropped."""

    def __init__(self, world: "World", node: "Node") -> None:
        self.patience, self.long_seconds = 1, 3.0
        self.world, self.node = world, node
        self.server: Postgres | None = None
        self.outdated = False
        self.turn = asyncio.Lock()
        node.links.append(self)

    async def fetch(self, query: str, *args: Any) -> list[Any]:
        async with self.turn:
            return await self._fetch(query, *args)

    async def _fetch(self, query: str, *args: Any) -> list[Any]:
        if self.outdated:
            self.drop()
        world, choose, name = self.world, self.world.choose, self.world.names[query]
        world.statements[self.node.number, name] += 1
        if self.server is None:
            await asyncio.sleep(choose.uniform(0.001, 0.01))
            if world.postgres_away:
                raise PostgresUnavailable("away")
            self.server = world.primary
        server = self.server
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Any]] = loop.create_future()
        fault = choose.random() if choose.random() < world.postgres_faults else 1.0

        def execute() -> None:
            if server.world is None or (server is world.primary and world.postgres_away) or server in world.dead:
                result: Any = PostgresUnavailable("it died")
            elif name in world.refused or fault < 0.3:
                result = PostgresUnavailable("cut before")
            else:
                try:
                    result = server.execute(name, args)
                except asyncpg.PostgresError as error:
                    result = error
                if fault < 0.6:
                    result = PostgresUnavailable("cut after")

            def deliver() -> None:
                if not answer.done():
                    if isinstance(result, Exception):
                        answer.set_exception(result)
                    else:
                        answer.set_result(result)

            world.later(choose.uniform(0.0, world.slowness), lambda: loop.call_soon(deliver))

        if 0.6 <= fault < 0.8:  # the client gives it up, and the server has it later

            def orphan() -> None:
                if server not in world.dead:
                    with suppress(asyncpg.PostgresError):
                        server.execute(name, args)

            world.later(choose.uniform(0.1, 3.0), orphan)
            await asyncio.sleep(choose.uniform(0.0, 0.2))
            self.drop()
            raise PostgresUnavailable("cut, and executed late")
        world.later(choose.uniform(0.0, world.slowness), execute)
        try:
            async with asyncio.timeout(3.0):
                return await answer
        except (PostgresUnavailable, TimeoutError) as error:
            self.drop()
            raise PostgresUnavailable(str(error)) from error

    async def fetchrow(self, query: str, *args: Any) -> Any:
        rows = await self.fetch(query, *args)
        return rows[0] if rows else None

    async def fetch_long(self, query: str, *args: Any, tells: object = None) -> Any:
        return await self.fetch(query, *args)

    async def be_patient(self) -> None:
        self.patience = min(2 * self.patience, 8)

    def lived_on(self, pid: int) -> bool:
        return False  # nobody resets statistics

    def renew(self) -> None:
        self.outdated = True

    def drop(self) -> None:
        self.server, self.outdated = None, False

    async def close(self) -> None:
        self.drop()


class SimLeases:
    """The lease thread: it runs beside the loop of its relay, unless the whole process is paused."""

    def __init__(self, world: "World", node: "Node", events: Any) -> None:
        self.world, self.node, self.events = world, node, events
        self.executor_id: UUID | None = None
        self.suspended = False
        self.link = SimLink(world, node)
        self._held: dict[str, Slot] = {}
        self._stopped = False

    def start(self) -> None:
        self.world.later(LEASE / 3, self._turn)

    async def stop(self) -> None:
        self._stopped = True

    def hold(self, slots: Iterable[Slot]) -> None:
        self._held.update((slot.name, slot) for slot in slots)

    def drop(self, name: str) -> None:
        self._held.pop(name, None)

    def _turn(self) -> None:
        world, choose = self.world, self.world.choose
        if self._stopped:
            return
        if self.node.paused:
            world.later(0.05, self._turn)
            return
        held = dict(self._held)
        if self.link.outdated:
            self.link.drop()
        server = self.link.server or (None if world.postgres_away else world.primary)
        failed = server is None or server in world.dead or choose.random() < world.postgres_faults
        if self.suspended or not held or failed:
            self.link.server = None if failed else server
            world.later(LEASE / (15 if failed else 3), self._turn)
            return
        self.link.server = server
        sent, epochs = world.time, [slot.epoch for slot in held.values()]
        assert self.executor_id is not None
        renewed = server.renew(self.executor_id, list(held), epochs)
        timeline = server.timeline

        def answered() -> None:
            if self.node.paused:
                world.later(0.05, answered)
                return
            elsewhere = [slot.timeline for slot in held.values() if slot.timeline not in (None, timeline)]
            if elsewhere:
                self.link.drop()
                if timeline > max(elsewhere):
                    self.node.loop.call_soon(self.events.replaced)
                return
            for name, slot in held.items():
                if name in renewed:
                    slot.deadline = sent + LEASE - MARGIN
                else:
                    self.node.loop.call_soon(self.events.lost, {name: slot.epoch})
                    self.link.drop()

        world.later(choose.uniform(0.0, world.slowness), answered)
        world.later(LEASE / 3, self._turn)


_BATCH = 20  # records


class SimBatch:
    """A record counts as a byte."""

    def __init__(self, most: int) -> None:
        self.records: list[tuple[bytes | None, bytes | None]] = []
        self._builder = self
        self._relative_offset = 0
        self._most = max(1, most)

    def append(self, offset: int, timestamp: int, key: bytes | None, value: bytes | None, headers: object) -> object:
        if len(self.records) >= self._most:
            return None
        self.records.append((key, value))
        return object()


class SimSender:
    """A producer. What was on its way when it is killed may yet arrive, then or much later."""

    def __init__(self, kafka: KafkaSettings, settings: OutboxSettings, *, idempotent: bool) -> None:
        self.world = World.current
        self.node = self.world.nodes[int(kafka.bootstrap.partition(":")[0])]
        self.idempotent = idempotent
        self.batch_bytes = _BATCH
        self.users = 0
        self.closed = False
        self.retired = False
        self._broken = False
        self._known: set[str] = set()
        self._pending: set[asyncio.Future[object]] = set()

    async def start(self) -> None:
        await asyncio.sleep(self.world.choose.uniform(0.0, 0.05))
        if self.node.no_kafka:
            await asyncio.sleep(self.world.choose.uniform(0.0, 1.0))
            raise KafkaUnavailable("away")

    async def partitions(self, topic: str, timeout: float) -> list[int]:
        if topic not in self._known and (topic in self.world.missing or self.node.no_kafka):
            await asyncio.sleep(timeout)
            raise UnknownTopicOrPartitionError(topic)
        self._known.add(topic)
        return list(range(self.world.partitions))

    def batch(self) -> SimBatch:
        return SimBatch(self.batch_bytes)

    def stuck(self, topic: str, partitions: Sequence[int]) -> frozenset[int]:
        """Of some that do not answer, Kafka's metadata tell that nobody leads them; sooner or later."""
        silent = {partition for partition in partitions if partition % 2 and (topic, partition) in self.world.stuck}
        return frozenset(silent if self.world.choose.random() < 0.5 else ())

    def late(self, _topic: str, _partitions: object) -> TimeoutError:
        return TimeoutError("Kafka did not acknowledge in time")

    def sent_again(self, _topic: str, _partition: int) -> bool:
        return False

    async def send(self, batch: SimBatch, topic: str, partition: int) -> "asyncio.Future[object]":
        world, choose = self.world, self.world.choose
        if self.closed:
            raise ProducerClosed
        await asyncio.sleep(choose.uniform(0.0, 0.002))
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        tries = 0

        def answer(result: object) -> None:
            if not future.done():
                if isinstance(result, BaseException):
                    self._broken = True
                    future.set_exception(result)
                    future.exception()
                else:
                    future.set_result(result)

        def tell(result: object) -> None:
            if not self.node.no_kafka:
                world.later(choose.uniform(0.0, 0.05), lambda: self.node.loop.call_soon(answer, result))

        def arrive() -> None:
            nonlocal tries
            tries += 1
            if future.done() and choose.random() < 0.5:
                return  # killed before it left
            stuck = (topic, partition) in world.stuck
            if topic in world.hanging or self.node.no_kafka or (stuck and partition % 2):
                if tries < 200:
                    world.later(choose.uniform(0.05, 0.5), arrive)
            elif self._broken and self.idempotent:
                tell(OutOfOrderSequenceNumber())
            elif topic in world.failing or topic in world.missing or stuck:
                if choose.random() < 0.2:
                    world.append(topic, partition, batch.records)  # it is there, and nobody knows
                tell(NotEnoughReplicasError())
            elif len(batch.records) > world.takes or any(
                v is not None and v.startswith(b"large") for _, v in batch.records
            ):
                tell(MessageSizeTooLargeError())
            else:
                world.append(topic, partition, batch.records)
                tell(None)

        world.later(choose.uniform(0.0, world.kafka_slowness), arrive)
        return future

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._pending:
            await asyncio.wait(self._pending, timeout=2.0)
        self._end()

    async def kill(self) -> None:
        self.closed = True
        self._end()
        await asyncio.sleep(self.world.choose.uniform(0.0, 0.5))

    def _end(self) -> None:
        for future in list(self._pending):
            if not future.done():
                future.set_exception(ProducerClosed())
                future.exception()


class SimLoop(asyncio.SelectorEventLoop):
    def __init__(self, world: "World") -> None:
        super().__init__()
        self.world = world

    def time(self) -> float:
        return self.world.time if hasattr(self, "world") else 0.0

    def step(self) -> None:
        """What is ready, and the timers that are due."""
        self.call_soon(self.stop)
        self.run_forever()


class Node:
    """One process: a relay in a loop of its own."""

    def __init__(self, world: "World", number: int) -> None:
        self.world, self.number = world, number
        self.loop = SimLoop(world)
        self.loop.set_exception_handler(lambda _, context: world.problems.append(str(context)))
        self.links: list[SimLink] = []
        self.paused = self.no_kafka = False
        self.relay: Relay | None = None
        self.tasks: list[asyncio.Task[Any]] = []

    def make(self) -> None:
        """The relay; the world has put its own parts in the place of links, lease thread, producers and clock."""
        settings = OutboxSettings(
            window=self.world.choose.choice([40, 200]),
            batch_size=10,
            lease_seconds=LEASE,
            delivery_seconds=3.0,
            metadata_seconds=0.5,
            max_backoff_seconds=3.0,
            topic_patience_seconds=None,
            shutdown_seconds=3.0,
        )
        kafka = KafkaSettings(bootstrap=f"{self.number}:1")
        self.relay = Relay(
            "test", PostgresSettings(dsn="postgresql://x"), kafka, settings, prometheus=CollectorRegistry()
        )
        self.tasks.append(self.loop.create_task(self.relay.start()))

    def stop(self) -> None:
        """In good order."""
        assert self.relay is not None
        relay, self.relay = self.relay, None
        self.tasks.append(self.loop.create_task(relay.stop()))

    def kill(self) -> None:
        """All that it did in its loop ends now."""
        self.relay = None
        self.links.clear()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        for task in self.tasks:
            task.add_done_callback(lambda t: t.cancelled() or t.exception())
        self.tasks.clear()


class World:
    """seed: of all that happens. Each world has some faults of its own that come again and again: where all kinds come,
    few of them coincide."""

    current: "World"

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, relays: int = 2) -> None:
        World.current = self
        self.choose = random.Random(seed)
        random.seed(seed)
        self.time = 1_000.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()
        self.problems: list[str] = []
        self.log: list[str] = []
        self.statements: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.names = {load_sql("sidings.kafka.outbox", name): name for name in _OUTBOX}
        self.names |= {load_sql(executor.__name__, "release"): "release"}
        self.dead: list[Postgres] = []
        self.postgres_away = False
        self.postgres_faults = 0.0
        self.refused: set[str] = set()  # statements
        self.directories: set[str] = set()
        self.faults = self.choose.sample(FAULTS, self.choose.randint(2, 5))
        self.slowness = self.choose.choice([0.02, 0.1])
        self.kafka_slowness = self.choose.choice([0.03, 0.3])
        self.zeal = self.choose.choice([0.05, 0.2])  # of the writers
        self.busy = False  # writers are at work
        self.wide = 0.0
        self.usual: dict[str, object] = {}
        self.primary = Postgres(self)
        self.missing: set[str] = set()
        self.hanging: set[str] = set()
        self.failing: set[str] = set()
        self.stuck: set[tuple[str, int]] = set()  # partitions
        self.partitions = PARTITIONS
        self.takes = _BATCH  # records of a batch, that Kafka takes
        self.topics = ["a", "b", "c"]
        self.kafka: defaultdict[tuple[str, int], list[tuple[bytes | None, bytes | None]]] = defaultdict(list)
        self.tokens = count()
        self.locked: set[tuple[str, bytes | None]] = set()
        self.journal: defaultdict[tuple[str, bytes | None], list[bytes]] = defaultdict(list)
        self.writing: dict[int, tuple[Postgres, list[tuple[str, bytes | None, bytes]]]] = {}
        self._ids = count(1)
        self._patch(monkeypatch)
        self.nodes = [Node(self, number) for number in range(relays)]
        self._monkeypatch = monkeypatch
        for node in self.nodes:
            self.make(node)

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (lane_senders, lanes, ledger, reader, recorder, relay, rounds, shunned, slots):
            monkeypatch.setattr(module, "now", lambda: self.time)
        monkeypatch.setattr(reader, "_STEPPING_READ", -1.0)
        monkeypatch.setattr(senders, "Sender", SimSender)
        monkeypatch.setattr(relay, "uuid4", lambda: UUID(int=next(self._ids)))

        async def fits(*_: object) -> None:
            pass

        monkeypatch.setattr(relay, "check_schema", fits)

    def vary(self) -> None:
        """Messages are locked now and then; refills look at few, and some messages are large for a read. Kafka may take
        smaller batches than are made."""
        self.faults.append("lock")
        self._monkeypatch.setattr(reader, "_LOOKED_AT", self.choose.choice([20, 100, 5_000]))
        if self.choose.random() < 0.3:
            for name, size in (("_BYTES", 64_000), ("_MOST_BYTES", 128_000), ("_HELD_BYTES", 256_000)):
                self._monkeypatch.setattr(reader, name, size)
            self.wide = 0.02
        self.takes = self.choose.choice([_BATCH, _BATCH, 6])
        self._monkeypatch.setattr(lanes, "_FORGET_SECONDS", self.choose.choice([0.0, 0.05, 1.0, 3_600.0]))

    def make(self, node: Node) -> None:
        """A relay in this process."""
        self._monkeypatch.setattr(relay, "Link", lambda *_: SimLink(self, node))
        self._monkeypatch.setattr(relay, "LeaseThread", lambda _p, _s, events, *_: SimLeases(self, node, events))
        node.make()

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.time + seconds, next(self._numbers), what))

    def append(self, topic: str, partition: int, records: Sequence[tuple[bytes | None, bytes | None]]) -> None:
        self.kafka[topic, partition].extend(records)

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self, seconds: float) -> None:
        self.time += seconds
        while self._events and self._events[0][0] <= self.time:
            heapq.heappop(self._events)[2]()
        for node in self.choose.sample(self.nodes, len(self.nodes)):
            if not node.paused:
                for _ in range(self.choose.randint(1, 4)):
                    node.loop.step()
            for task in node.tasks:
                if task.done() and not task.cancelled() and task.exception():
                    raise AssertionError(f"a relay ended: {task.exception()!r}") from task.exception()
            main = node.relay._main if node.relay else None
            if main is not None and main.done():
                main.result()
                raise AssertionError("a relay has ended")

    def pass_time(self, seconds: float, *, write: bool = True) -> None:
        until = self.time + seconds
        self.busy = write
        while self.time < until:
            if write and self.choose.random() < self.zeal:
                self.write()
            if self.choose.random() < 0.2:
                self.end_one()
            self.tick(self.choose.choice([0.001, 0.003, 0.01, 0.02]))

    # -- writers ----------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """A transaction that writes some messages, each under the lock of its key, if it has one, and stays open."""
        server, choose = self.primary, self.choose
        if self.postgres_away:
            return
        xid, messages = server.begin(), list[tuple[str, bytes | None, bytes]]()
        for _ in range(choose.choice([1, 2, 5, 30])):
            topic, number = choose.choice(self.topics), choose.randrange(60)
            key = None if choose.random() < 0.1 else b"k%d" % number
            if (topic, key) in self.locked and not any(m[:2] == (topic, key) for m in messages):
                continue
            if key is not None:
                self.locked.add((topic, key))
            value = b"%s%d" % (b"large" if choose.random() < 0.005 else b"", next(self.tokens))
            if self.wide and choose.random() < self.wide:
                value += b" " * 2_500
            server.insert(xid, ((number if key else 0) * 7 + ord(topic)) % 16, topic, key, value)
            messages.append((topic, key, value))
        self.writing[xid] = server, messages
        if choose.random() < 0.8:
            self.end(xid)

    def end_one(self) -> None:
        if self.writing:
            self.end(self.choose.choice(list(self.writing)))

    def end(self, xid: int) -> None:
        server, messages = self.writing.pop(xid)
        server.open.discard(xid)
        if self.choose.random() < 0.1 or server is not self.primary or server in self.dead:
            server.aborted.add(xid)
            for id in [id for id, row in server.rows.items() if row.xid == xid]:
                del server.rows[id]
        else:
            for topic, key, value in messages:
                self.journal[topic, key].append(value)
        self.locked -= {m[:2] for m in messages}

    # -- faults -----------------------------------------------------------------------------------------------------

    def restart_postgres(self) -> None:
        """It dies with what was open, and comes back."""
        for xid in list(self.writing):
            server, messages = self.writing.pop(xid)
            server.open.discard(xid)
            server.aborted.add(xid)
            for id in [id for id, row in server.rows.items() if row.xid == xid]:
                del server.rows[id]
            self.locked -= {m[:2] for m in messages}
        self.cut()
        self.primary.started = self.time
        self.primary.server = f"server {self.time} timeline {self.primary.timeline}"

    def fail_over(self, lose: float, alive: bool) -> None:
        """A standby that lacks the last `lose` seconds takes over. alive: the former primary answers on."""
        former = self.primary
        standby, journal = former.copy(self), deepcopy(self.journal)
        self.pass_time(lose)
        self.journal = journal
        self.writing.clear()
        self.locked.clear()
        for xid in list(standby.open):
            standby.aborted.add(xid)
            for id in [id for id, row in standby.rows.items() if row.xid == xid]:
                del standby.rows[id]
        standby.open.clear()
        standby.server = f"server {self.time} timeline {int(standby.timeline) + 1}"
        standby.started = -inf if self.choose.random() < 0.5 else self.time
        self.primary = standby
        if not alive:
            self.dead.append(former)
            self.cut()

    def fault(self) -> None:
        """One thing goes wrong for a while; others may, before it is over."""
        choose = self.choose
        node, topic = choose.choice(self.nodes), choose.choice(self.topics)
        seconds = choose.choice([choose.uniform(0.1, 2.0), choose.uniform(2.0, 12.0), LEASE - MARGIN])
        kind = choose.choice(self.faults)
        self.log.append(f"{self.time:.2f} {kind}: relay {node.number}, topic {topic}, {seconds:.2f} s")
        match kind:
            case "pause":
                node.paused = True
                self.later(seconds, lambda: setattr(node, "paused", False))
            case "stop" | "kill" if node.relay is not None and not node.paused:
                if kind == "stop":
                    node.stop()
                else:
                    node.kill()
                self.later(seconds, lambda: self.make(node))
            case "crowd":  # another relay is seen, which takes nothing
                self.primary.relays[UUID(int=choose.choice([0, 2**100]))] = self.time + choose.choice([0.5, seconds])
            case "burst":
                for _ in range(choose.choice([20, 60])):
                    self.write()
            case "faults":
                self.for_a_while("postgres_faults", choose.choice([0.05, 0.3]), seconds)
            case "slow":
                self.for_a_while("slowness", choose.choice([0.2, 1.0]), seconds)
            case "late":
                self.for_a_while("kafka_slowness", choose.choice([0.3, 1.5, 4.0]), seconds)
            case "restart":
                self.restart_postgres()
            case "lock":
                some = self.primary.committed()
                keys = {(row.topic, row.key) for row in choose.sample(some, min(len(some), choose.choice([1, 5])))}
                every = choose.random() < 0.1
                for row in some:
                    if every or (row.topic, row.key) in keys or choose.random() < 0.1:
                        self.primary.locks[row.id] = self.time + seconds * choose.choice([0.3, 1.0, 1.0])
            case "away":
                self.for_a_while("postgres_away", True, seconds)
                self.cut()
            case "no kafka":
                node.no_kafka = True
                self.later(seconds, lambda: setattr(node, "no_kafka", False))
            case "stuck":
                some = {(topic, choose.randrange(PARTITIONS)) for _ in range(choose.choice([1, 1, 2, 3]))}
                self.stuck |= some
                self.later(seconds, lambda: self.stuck.difference_update(some))
            case "hang" | "fail" | "missing":
                some = {"hang": self.hanging, "fail": self.failing, "missing": self.missing}[kind]
                some.add(topic)
                self.later(seconds, lambda: some.discard(topic))
            case _:
                pass
        self.pass_time(choose.choice([0.0, 0.3, 3.0]) * choose.random())

    def for_a_while(self, name: str, value: object, seconds: float) -> None:
        usual = self.usual.setdefault(name, getattr(self, name))
        setattr(self, name, value)
        self.later(seconds, lambda: setattr(self, name, usual))

    def cut(self) -> None:
        """All connections to Postgres."""
        for node in self.nodes:
            for link in node.links:
                link.drop()

    # -- the end ----------------------------------------------------------------------------------------------------

    def run(self, faults: int) -> None:
        for _ in range(faults):
            self.fault()
        self.pass_time(12.5)  # the last is over

    def settle(self) -> None:
        """All is well but for one thing, which may be no reason for anything else to wait. Then all is well."""
        spared = set(self.topics)
        kind = self.choose.choice(["nothing", "no kafka", "pause", "hang", "fail", "missing", "stuck"])
        self.log.append(f"{self.time:.2f} in the end: {kind}")
        match kind:
            case "no kafka":
                self.nodes[0].no_kafka = True
            case "pause":
                self.nodes[0].paused = True
            case "hang" | "fail" | "missing":
                {"hang": self.hanging, "fail": self.failing, "missing": self.missing}[kind].add("a")
                spared.discard("a")
            case "stuck":
                self.stuck = {("a", self.choose.randrange(PARTITIONS))}
            case _:
                pass
        self.wait_for(lambda: not self.waiting(spared), 120.0, f"{sorted(spared)} leave with {kind}")
        self.nodes[0].no_kafka = self.nodes[0].paused = False
        for some in (self.hanging, self.failing, self.missing, self.stuck):
            some.clear()
        while self.writing:
            self.end_one()
        self.wait_for(lambda: not self.waiting(set(self.topics)), 120.0, "all leave")
        self.check()

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        until = self.time + seconds
        self.busy = False
        while not condition():
            if self.time >= until:
                raise AssertionError(f"{what}: not within {seconds} s")
            self.tick(self.choose.choice([0.003, 0.01, 0.02]))

    def waiting(self, topics: set[str]) -> list[Stored]:
        stuck = {partition for topic, partition in self.stuck if topic == "a"}
        place = partial(Packer("test", {}).partition_of, "a")
        return [
            row
            for row in self.primary.committed()
            if row.topic in topics
            and not (row.topic == "a" and row.key is not None and place(row.key, range(PARTITIONS)) in stuck)
        ]

    def check(self) -> None:
        assert not self.problems, self.problems
        parked = {row.value for row in self.primary.parked.values()}
        assert all(value.startswith(b"large") for value in parked), "a message was parked for nothing"
        for (topic, key), values in self.journal.items():
            found: dict[bytes, None] = {}
            for partition in range(PARTITIONS):
                found |= {v: None for k, v in self.kafka[topic, partition] if k == key and v is not None}
            expected = [value for value in values if value not in parked]
            mine = set(expected)
            arrived = [value for value in found if value in mine]
            if key is None:  # in any order
                arrived, expected = sorted(arrived), sorted(expected)
            assert arrived == expected, f"{topic} {key!r}: out of order, or lost"
        for _ in range(100):
            self.write()
        while self.writing:
            self.end_one()
        # Not within a time of its own: where answers are slow and there is little room, it takes a while.
        self.wait_for(lambda: not self.waiting(set(self.topics)), 120.0, "the last ones leave")
        self.pass_time(12.0, write=False)  # all slots are shared out again, and nobody is busy
        before = dict(self.statements)
        self.pass_time(5.0, write=False)
        held: list[str] = []
        for node in self.nodes:
            assert node.relay is not None
            held += node.relay.held
            reads = self.statements[node.number, "read"] - before.get((node.number, "read"), 0)
            assert reads < 100, f"{reads} reads in 5 s of an idle relay"
            failing = [topic for topic, id in self.primary.failing if id == node.relay.id]
            assert not failing, f"{failing} count as failing"
            assert not node.relay.backlog.parts
            for lane in node.relay.backlog.lanes.values():
                state = (lane.unaccounted, len(lane.queue), lane.behind, lane.paused)
                assert state == (0, 0, {}, False), f"{lane.topic}: {state}"
            assert all(slot.under_way == 0 for slot in node.relay.backlog.slots.values())
        assert sorted(held) == sorted(NAMES)

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
            while asyncio.all_tasks(node.loop):
                self.time += 0.1
                node.loop.step()
            node.loop.close()
