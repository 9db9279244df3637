"""A service of three processes between a Postgres and a Kafka of its own, and what can happen to all of them.

The processes run this module: consumers whose handlers write, enqueue and publish; a topic that is read by the service
that writes it; directories. Whatever is published or enqueued is told before, in the same transaction, in the table
`told`, whose ids grow by place and key in the order of commits; what was rolled back is known by its id.

`World.run` lets the faults of a plan happen, `World.settle` waits until nothing is left to do, and `what_is_wrong`
compares what was told with what arrived.
"""

import asyncio
import json
import logging
import os
import random
import signal
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
from aiokafka import TopicPartition
from aiokafka.errors import InvalidPartitionsError, KafkaError
from pydantic import BaseModel
from sidings import (
    ExecutorSettings,
    Job,
    KafkaSettings,
    Message,
    OutboxSettings,
    PostgresSettings,
    Retry,
    Service,
    Snooze,
    SQLite,
    Transaction,
    migrate,
)
from sidings.devstack.topics import create_topic
from tenacity import stop_after_attempt, wait_fixed

from .consumer_support import add_partitions, stored_offsets
from .directory_support import COMPACTED
from .faulty_proxy import FaultyProxy, Moment
from .stress_support import Flow, committed_log
from .support import connected, fetch

SIZE = 3  # processes
STILL = 60.0  # seconds without any progress
IN = {"in-one": 3, "in-lists": 2, "in-isolated": 2, "in-grows": 2}
OUT = {"out-one": 3, "out-grows": 2, "loop": 2}
GROWN = {"in-grows": 4, "out-grows": 4}
READ = {*IN, "loop"}
BY_ID = {"in-lists", "loop"}  # of each id one message has effects
TPS = [TopicPartition(t, p) for t, count in (IN | OUT | GROWN).items() for p in range(count)]
NAMES = [f"n{n}" for n in range(8)]
COMPACTS = COMPACTED | {"segment.ms": "1000", "min.cleanable.dirty.ratio": "0.001", "delete.retention.ms": "3000"}
TABLES = """
    CREATE TABLE entity (place text, key text, PRIMARY KEY (place, key));
    CREATE TABLE told (id bigserial PRIMARY KEY, place text NOT NULL, key text NOT NULL);
    CREATE TABLE effect (id bigserial, topic text, partition int, "offset" bigint, key text);
    CREATE TABLE done (id bigserial, place text, key text, number bigint);
    CREATE TABLE person (
        id bigserial PRIMARY KEY, name text NOT NULL, version int NOT NULL, is_active boolean NOT NULL DEFAULT true
    );
    CREATE UNIQUE INDEX ON person (name) WHERE is_active;
    CREATE FUNCTION tell(text, text) RETURNS bigint LANGUAGE sql AS $$
        INSERT INTO entity VALUES ($1, $2) ON CONFLICT (place, key) DO UPDATE SET key = excluded.key;
        INSERT INTO told (place, key) VALUES ($1, $2) RETURNING id
    $$;
    SELECT sidings.directory_table('person', topic => 'person', key => '{name}', active => 'is_active');
"""
CHANGES = (
    "UPDATE person SET version = version + 1 WHERE name = $1 AND is_active",
    "UPDATE person SET is_active = false WHERE name = $1 AND is_active",
    """INSERT INTO person (name, version) VALUES ($1, 1)
    ON CONFLICT (name) WHERE is_active DO UPDATE SET version = person.version + 1""",
)
EFFECT = 'INSERT INTO effect (topic, partition, "offset", key) VALUES ($1, $2, $3, $4)'
TELL_MANY = "SELECT tell($1, $2) FROM generate_series(1, $3)"
SOME_SESSIONS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND datname IS NOT NULL AND random() < 0.4
"""
SOME_MESSAGES = "SELECT id FROM sidings.outbox ORDER BY random() LIMIT 5 FOR UPDATE SKIP LOCKED"
LEFT = """
    SELECT 'a job', type, origin, "group", id FROM sidings.job
    UNION ALL SELECT 'unsent', topic, slot::text, count(*)::text, min(id) FROM sidings.outbox GROUP BY 2, 3
    ORDER BY 1, 5 LIMIT 8
"""
HELD = """
    SELECT 'an owner', origin FROM sidings.origin WHERE owner IS NOT NULL
    UNION ALL SELECT 'parked', topic FROM sidings.outbox_parked
    UNION ALL SELECT 'a relay', id::text FROM sidings.outbox_relay WHERE alive_until > now()
"""
AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


class RolledBack(Exception):
    """On purpose."""


# -- the service ------------------------------------------------------------------------------------------------------


class Work(BaseModel):
    key: str
    number: int


class Person(BaseModel):
    name: str
    version: int


class Setting(BaseModel):
    number: int


class Instance:
    """What one process runs. folder: where it shows what it has, and is told to be calm."""

    def __init__(self, dsn: str, bootstrap: str, folder: Path, number: int, seed: str) -> None:
        self.random = random.Random(seed)
        self.folder, self.number = folder, number
        choice = self.random.choice
        outbox = {"window": choice([8, 40, 10_000]), "batch_size": choice([1, 3, 1_000]), "max_backoff_seconds": 1}
        kafka = {"session_seconds": 4, "rebalance_seconds": 5, "request_seconds": 6, "fetch_seconds": 0.05}
        executor = {"concurrency": choice([3, 20]), "drain_seconds": 0.5, "shutdown_seconds": 3, "audit_seconds": 5}
        self.service = service = Service(
            "test",
            postgres=PostgresSettings(dsn=dsn, call_seconds=3.0, connect_seconds=3.0),
            kafka=KafkaSettings(bootstrap=bootstrap, metadata_seconds=1, max_records=choice([10, 1_000]), **kafka),
            executor=ExecutorSettings(lease_seconds=4, **executor),
            outbox=OutboxSettings(lease_seconds=4, delivery_seconds=2, metadata_seconds=1, **outbox),
            http="127.0.0.1:0",
        )
        retry, park = Retry(wait=wait_fixed(0.1)), Retry(wait=wait_fixed(0.05), stop=stop_after_attempt(2))
        self.work = service.job(group="key", transactional=True, retry=retry, timeout=5)(self.on_work)
        service.consumer("in-one", model=bytes, retry=park, timeout=5)(self.on_message)
        service.consumer("in-lists", model=bytes, batch=8, dedup=True, retry=park, timeout=5)(self.on_messages)
        service.consumer("in-isolated", model=bytes, isolate=True, max_waiting=20, retry=retry, timeout=5)(
            self.on_message
        )
        service.consumer("in-grows", model=bytes, retry=park, timeout=5)(self.on_message)
        service.consumer("loop", model=bytes, dedup=True, retry=park, timeout=5)(self.on_message)
        self.people = service.directory("person", model=Person, key="name", storage=SQLite(folder / f"{number}.db"))
        self.settings = service.directory("setting", model=Setting)

    @property
    def calm(self) -> bool:
        """It is to come to its end: nothing fails, and nothing new comes from what waits."""
        return (self.folder / "calm").exists()

    async def on_messages(self, messages: list[Message[bytes]], tx: Transaction) -> None:
        for message in messages:
            await self.on_message(message, tx)

    async def on_message(self, message: Message[bytes], tx: Transaction) -> None:
        key = message.key_text or ""
        await tx.execute(EFFECT, message.topic, message.partition, message.offset, key)
        await self.behave(key)
        if message.topic != "loop":
            await self.publish_some(tx, key)
        if self.random.random() < 0.3 and not self.calm:
            number = await tx.fetchval("SELECT tell($1, $2)", f"jobs of {message.origin}", key)
            store = self.random.choice([self.work.enqueue, self.work.add])
            await store(tx, Work(key=key, number=number))
        await self.behave(key)

    async def on_work(self, job: Job[Work]) -> None:
        place, key, number = f"jobs of {job.origin}", job.payload.key, job.payload.number
        await job.tx.execute("INSERT INTO done (place, key, number) VALUES ($1, $2, $3)", place, key, number)
        await self.publish_some(job.tx, key)
        await self.behave(key)

    async def publish_some(self, tx: Transaction, key: str) -> None:
        rng = self.random
        for topic in [] if self.calm else sorted(rng.sample(list(OUT), rng.choice([0, 1, 2]))):
            with suppress(RolledBack):
                async with tx.savepoint():
                    told = await tx.fetch(TELL_MANY, topic, key, rng.randint(1, 4))
                    padding = b" " * rng.choice([0] * 20 + [5_000, 40_000])
                    values = [(key, b'{"number": %d}' % number + padding) for (number,) in told]
                    if rng.random() < 0.5:
                        await self.service.outbox.publish_many(tx, topic, values)
                    else:
                        for its_key, value in values:
                            await self.service.outbox.add(tx, topic, key=its_key, value=value)
                    if rng.random() < 0.1:
                        raise RolledBack

    async def behave(self, key: str) -> None:
        """Badly, now and then: fail, or take long. Some keys fail for some seconds."""
        if self.calm:
            return
        mood = self.random.random()
        if mood < 0.03 or random.Random(f"{key} {time.time() // 3}").random() < 0.05:
            raise ConnectionError("at random")
        if mood < 0.04:
            raise Snooze(0.3)
        if mood < 0.15:
            await asyncio.sleep(60 if mood < 0.045 else self.random.choice([0.05, 0.2, 1]))

    async def run(self) -> None:
        showing = asyncio.create_task(self.show())
        await self.service.run()
        showing.cancel()

    async def show(self) -> None:
        """What it has."""
        path = self.folder / f"{self.number}.json"
        while True:
            found: dict[str, Any] = {"pid": os.getpid(), "http": self.service.http_address}
            if self.people.ready and self.settings.ready:
                found["people"] = {name: person.version for name, person in self.people.items()}
                found["settings"] = {key: setting.number for key, setting in self.settings.items()}
            path.with_suffix(".new").write_text(json.dumps(found))
            path.with_suffix(".new").replace(path)
            await asyncio.sleep(0.3)


# -- what happens to it -----------------------------------------------------------------------------------------------


class Network:
    """The way to a broker that is reached on no other."""

    def __init__(self) -> None:
        self.port = self.broker = 0
        self.refusing = False
        self.unanswered = 0  # so many requests to write reach the broker, and the connection is cut before its answer
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def serve(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        ends, ways = [target], list[asyncio.Task[None]]()
        with suppress(OSError, asyncio.CancelledError):  # the broker is away; cancelled at the end only
            if not self.refusing:
                answers, server = await asyncio.open_connection("127.0.0.1", self.broker)
                ends.append(server)
                self._writers.update(ends)
                ways = [asyncio.create_task(c) for c in (self._down(answers, target), self._up(source, server))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for writer in ends:
            writer.transport.abort()
        self._writers.difference_update(ends)
        await asyncio.gather(*ways, return_exceptions=True)

    async def _down(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while piece := await source.read(65_536):
            target.write(piece)
            await target.drain()

    async def _up(self, source: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while True:
            head = await source.readexactly(4)
            request = await source.readexactly(struct.unpack(">i", head)[0])
            server.write(head + request)
            await server.drain()
            if self.unanswered > 0 and request[:2] == b"\0\0":  # of the kind Produce
                self.unanswered -= 1
                return


@asynccontextmanager
async def network_to(own_kafka: Any) -> AsyncIterator[tuple[Any, Network]]:
    """A Kafka of one broker, and the way to it."""
    network = Network()
    listener = await asyncio.start_server(network.serve, "127.0.0.1", 0)
    network.port = listener.sockets[0].getsockname()[1]
    settings = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{network.port}", "log.cleaner.backoff.ms": "500"}
    kafka = await asyncio.to_thread(lambda: own_kafka(settings=settings))
    network.broker = int(kafka.bootstrap.rpartition(":")[2])
    try:
        yield kafka, network
    finally:
        listener.close()
        network.cut()


# How often each comes in 30 s, and how long it may last.
FAULTS: dict[str, tuple[int, list[float]]] = {
    "kill": (4, [0]),
    "stop": (3, [0]),
    "pause": (3, [1, 3, 7]),
    "kill postgres": (2, [0, 2]),
    "restart postgres": (1, [0]),
    "pause postgres": (1, [1, 4]),
    "end sessions": (2, [0]),
    "cut postgres": (2, [0, 3]),
    "silence postgres": (1, [1, 5]),
    "lose commits": (6, [0]),
    "lock messages": (4, [1, 3, 6]),
    "kill kafka": (1, [0]),
    "restart kafka": (1, [0]),
    "pause kafka": (3, [3, 5]),
    "cut kafka": (2, [0, 3]),
    "lose answers": (4, [0]),
    "add partitions": (1, [0]),
}


@dataclass(frozen=True)
class Fault:
    """at, seconds: when it begins, and how long it lasts. who: the process, where it is one's. moment, times: how, and
    how often, where it is armed."""

    at: float
    what: str
    who: int
    seconds: float
    moment: Moment
    times: int

    def __str__(self) -> str:
        return f"{self.what} (process {self.who}, {self.seconds} s, {self.moment.name} {self.times} times)"


def plan(seed: int, seconds: float) -> list[Fault]:
    """All that will happen."""
    rng = random.Random(seed)
    kinds = [what for what, (often, _) in FAULTS.items() for _ in range(max(1, round(often * seconds / 30)))]
    rng.shuffle(kinds)
    moments = [Moment.BEFORE, Moment.AFTER, Moment.LATE, Moment.SILENT_AFTER]
    return [
        Fault(at, what, rng.randrange(SIZE), rng.choice(FAULTS[what][1]), rng.choice(moments), rng.randint(1, 4))
        for at, what in zip(sorted(rng.uniform(0, seconds) for _ in kinds), kinds, strict=True)
    ]


class Member:
    """A process of the service."""

    def __init__(self, number: int, life: int, arguments: Iterable[str], folder: Path) -> None:
        self.number, self.name = number, f"process {number}, life {life}"
        self.log = folder / f"member-{number}-{life}.log"
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "tests.message_world", *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[1])

    async def ended(self) -> int | None:
        """How it ended; None where it does not."""
        with suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self.process.wait, STILL)
        return None


class World:
    """The servers and the processes. wrong: what was seen that must not be."""

    def __init__(self, seed: int, folder: Path, postgres: Any, kafka: Any, network: Network) -> None:
        self.seed, self.folder, self.postgres, self.network = seed, folder, postgres, network
        self.servers = {"postgres": postgres, "kafka": kafka}
        self.bootstrap = f"127.0.0.1:{network.port}"
        self.proxies: list[FaultyProxy] = []
        self.members: list[Member] = []
        self.log: list[str] = []
        self.wrong: list[str] = []
        self._began = time.monotonic()
        self._lives = self._sent = 0
        self._random = random.Random(f"{seed} messages")
        self._busy = {server: asyncio.Lock() for server in (postgres, kafka)}  # a pause must not meet a kill
        self._reviving: asyncio.Task[None] | None = None
        self._enough = False

    # -- its life

    async def start(self) -> None:
        await migrate(self.postgres.dsn, service="test")
        for topic, partitions in (IN | OUT).items():
            await create_topic(self.bootstrap, topic, partitions=partitions)
        for topic in ("person", "setting"):
            await create_topic(self.bootstrap, topic, partitions=2, config=COMPACTS)
        async with connected(self.postgres.dsn) as connection:
            await connection.execute(TABLES)
        for number in range(SIZE):
            self.proxies.append(FaultyProxy(self.postgres.dsn))
            await self.proxies[-1].start()
            self.members.append(self.spawn(number))
        self._reviving = asyncio.create_task(self.restart_the_dead())

    async def run(self, faults: list[Fault]) -> None:
        """Let all of them happen, and end."""
        flow = Flow(self.bootstrap, self.seed, self.message, pauses=(0.2, 0.4, 0.6))
        writers = [asyncio.create_task(self.write(number)) for number in range(2)]
        happening: list[asyncio.Task[None]] = []
        try:
            assert not (missing := await self.remaining(self.not_begun)), missing
            start = time.monotonic()
            for fault in faults:
                await asyncio.sleep(start + fault.at - time.monotonic())
                self.say(str(fault))
                happening.append(asyncio.create_task(self.happen(fault)))
            await asyncio.gather(*happening)
        finally:
            self._enough = True
            for task in happening:
                task.cancel()
            await asyncio.gather(*happening, return_exceptions=True)
            await asyncio.gather(flow.stop(), *writers)
        (self.folder / "calm").touch()
        self.network.unanswered = 0
        for proxy in self.proxies:
            proxy.faults.clear()
            proxy.heal()
        self.say("nothing happens any more")

    async def settle(self) -> None:
        """All is done in the end, all directories are as they should be, and all is well; then all stop in order."""
        self.wrong += await self.remaining(self.left)
        self.wrong += await self.remaining(self.not_well)
        self.say("all that waited is done")
        self._reviving.cancel()
        for member in self.members:
            member.process.terminate()
        self.wrong += [f"{member.name} has not ended well" for member in self.members if await member.ended() != 0]
        self.wrong += [f"held at the end: {tuple(row)}" for row in await fetch(self.postgres.dsn, HELD)]
        logs = [path.read_text(errors="replace") for path in self.folder.glob("member-*.log")]
        self.wrong += ["the audit found jobs" for log in logs if "the audit found jobs" in log]
        found = [await fetch(self.postgres.dsn, f"SELECT * FROM {t} ORDER BY id") for t in ("effect", "told", "done")]
        log = await committed_log(self.bootstrap, TPS)
        self.wrong += what_is_wrong(log, *found)
        self.say(f"{len(log)} records; effects, told, jobs: {list(map(len, found))}; {self._lives} processes")

    async def end(self) -> None:
        """Whatever has happened."""
        if self._reviving:
            self._reviving.cancel()
        for member in self.members:
            member.process.kill()
            await member.ended()
        for proxy in self.proxies:
            await proxy.stop()

    # -- what goes on in it

    def say(self, what: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:.1f} {what}")

    def spawn(self, number: int) -> Member:
        self._lives += 1
        arguments = [self.proxies[number].dsn, self.bootstrap, str(self.folder), str(number)]
        return Member(number, self._lives, [*arguments, f"{self.seed} {number} {self._lives}"], self.folder)

    async def restart_the_dead(self) -> None:
        while True:
            for number, member in enumerate(self.members):
                if member.process.poll() is not None:
                    self.say(f"{member.name} has ended with {member.process.returncode}")
                    self.members[number] = self.spawn(number)
            await asyncio.sleep(0.1)

    def message(self, _: bool) -> tuple[str, dict[str, Any]]:
        """The next one for the service; of some ids there are several."""
        rng = self._random
        self._sent += 1
        id = self._sent if rng.random() < 0.8 else max(1, self._sent - rng.randrange(40))
        topic, headers = rng.choice(list(IN)), [("sidings-id", b"%d" % id)]
        return topic, {"key": f"{topic} {rng.randrange(8)}".encode(), "value": b"", "headers": headers}

    async def write(self, number: int) -> None:
        """As persons and other programs do: many messages of one key, each in a transaction; then changes of the
        directory table, in a transaction that may last, and may be rolled back."""
        rng = random.Random(f"{self.seed} writer {number}")
        while not self._enough:
            await asyncio.sleep(rng.uniform(0.1, 0.6))
            with suppress(*AWAY, RolledBack):
                async with connected(self.postgres.dsn) as c:
                    topic, name = rng.choice(["out-one", "out-grows", "setting"]), rng.choice(NAMES)
                    for _ in range(rng.choice([0, 5, 30])):
                        async with c.transaction():
                            await publish(c, topic, name)
                    async with c.transaction():
                        for name in sorted(rng.choices(NAMES, k=rng.choice([1, 1, 3]))):
                            await c.execute(rng.choice(CHANGES), name)
                            await publish(c, topic, name)
                            await asyncio.sleep(rng.choice([0, 0, 0, 1.5]))
                        if rng.random() < 0.2:
                            raise RolledBack

    async def happen(self, fault: Fault) -> None:
        member, proxy, seconds = self.members[fault.who], self.proxies[fault.who], fault.seconds
        match fault.what.split():
            case ["kill"]:
                member.process.kill()
            case ["stop"]:
                member.process.terminate()
                if await member.ended() is None:
                    self.wrong.append(f"{member.name} does not stop")
            case ["pause"]:
                member.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                member.process.send_signal(signal.SIGCONT)
            case ["kill", name]:
                server = self.servers[name]
                await self.without(server, server.kill, seconds, server.start)
            case ["restart", name]:
                server = self.servers[name]
                await self.without(server, server.stop, seconds, server.start)
            case ["pause", name]:
                server = self.servers[name]
                await self.without(server, server.pause, seconds, server.resume)
            case ["end", "sessions"]:
                with suppress(*AWAY):
                    await fetch(self.postgres.dsn, SOME_SESSIONS)
            case ["cut" | "silence" as how, "postgres"]:
                (proxy.cut if how == "cut" else proxy.silence)()
                await asyncio.sleep(seconds)
                proxy.heal()
            case ["lose", "commits"]:
                proxy.arm("cycle" if fault.times == 1 else "commit", fault.moment, fault.times)
            case ["lock", "messages"]:
                with suppress(*AWAY):
                    await self.lock_messages(seconds)
            case ["cut", "kafka"]:
                self.network.refusing = seconds > 0
                self.network.cut()
                await asyncio.sleep(seconds)
                self.network.refusing = False
            case ["lose", "answers"]:
                self.network.unanswered += fault.times
            case ["add", "partitions"]:
                for topic, count in GROWN.items():
                    await self.add_partitions(topic, count)
            case _:
                raise AssertionError(fault.what)

    async def without(self, server: Any, away: Callable[[], None], seconds: float, back: Callable[[], None]) -> None:
        async with self._busy[server]:
            await asyncio.to_thread(away)
            await asyncio.sleep(seconds)
            await asyncio.to_thread(back)

    async def lock_messages(self, seconds: float) -> None:
        """Somebody's transaction holds some of those that wait to be sent."""
        async with connected(self.postgres.dsn) as c, c.transaction():
            for _ in range(40):
                if await c.fetch(SOME_MESSAGES):
                    break
                await asyncio.sleep(0.05)
            await asyncio.sleep(seconds)

    async def add_partitions(self, topic: str, count: int) -> None:
        while True:
            try:
                return await add_partitions(self.bootstrap, topic, count)
            except InvalidPartitionsError:  # it has them, and the answer was lost
                return None
            except (*AWAY, KafkaError, AttributeError):  # the last is aiokafka's own, of no broker
                await asyncio.sleep(0.5)

    # -- what is left to do

    async def remaining(self, look: Callable[[], Awaitable[list[str]]]) -> list[str]:
        """Wait until it finds nothing, or the same for too long: this is returned."""
        last, since = [""], time.monotonic()
        while last and time.monotonic() - since < STILL:
            try:
                found = await look()
            except AWAY as error:
                found = [repr(error)]
            if found != last:
                last, since = found, time.monotonic()
            await asyncio.sleep(0.3)
        return last

    async def not_begun(self) -> list[str]:
        rows = await fetch(self.postgres.dsn, "SELECT DISTINCT topic FROM effect")
        return sorted(READ - {row["topic"] for row in rows})

    async def left(self) -> list[str]:
        if found := [str(tuple(row)) for row in await fetch(self.postgres.dsn, LEFT)]:
            return found
        stored = await stored_offsets(self.postgres.dsn)
        log = await committed_log(self.bootstrap, [tp for tp in TPS if tp.topic in READ])
        ends = {(record.topic, record.partition): record.offset for record in log}
        return [f"{tp} has {end}, read to {stored.get(tp)}" for tp, end in ends.items() if stored.get(tp, -1) <= end]

    async def not_well(self) -> list[str]:
        """What the processes show that should not be."""
        rows = await fetch(self.postgres.dsn, "SELECT name, version FROM person WHERE is_active")
        people = {row["name"]: row["version"] for row in rows}
        rows = await fetch(self.postgres.dsn, "SELECT key, max(id) FROM told WHERE place = 'setting' GROUP BY 1")
        settings = {row["key"]: row["max"] for row in rows if row["max"] % 5}
        found: list[str] = []
        for member in self.members:
            path = self.folder / f"{member.number}.json"
            shown = json.loads(path.read_text()) if path.exists() else {}
            if shown.get("pid") != member.process.pid or "people" not in shown:
                found.append(f"{member.name} has not started")
                continue
            for what, wanted in (("people", people), ("settings", settings)):
                if shown[what] != wanted:
                    found.append(f"{member.name} has the {what} {shown[what]} instead of {wanted}")
            found += await asyncio.to_thread(complaints, *shown["http"])
        return found


async def publish(connection: asyncpg.Connection, topic: str, key: str) -> None:
    """The next message of a key; some settings are deleted."""
    told = await connection.fetchval("SELECT tell($1, $2)", topic, key)
    value = None if topic == "setting" and told % 5 == 0 else json.dumps({"number": told})
    await connection.execute("SELECT sidings.publish($1, $2, $3)", topic, key, value)


def complaints(host: str, port: int) -> list[str]:
    """What ``/health`` says."""
    try:
        urllib.request.urlopen(f"http://{host}:{port}/health", timeout=10).close()
    except urllib.error.HTTPError as error:
        return [error.read().decode()]
    return []


# -- the proof --------------------------------------------------------------------------------------------------------


def what_is_wrong(log: list[Any], effects: list[Any], told: list[Any], done: list[Any]) -> list[str]:
    """log: what is committed in all topics. effects: of messages. done: jobs. All but the first in the order of ids."""
    return [*_of_messages(log, effects), *_of_topics(log, told), *_of_jobs(told, done)]


def _of_messages(log: list[Any], effects: list[Any]) -> list[str]:
    """Each has its effects once, and they are in order."""
    found = Counter((row["topic"], row["partition"], row["offset"]) for row in effects)
    records = {(r.topic, r.partition, r.offset): dict(r.headers) for r in log if r.topic in READ}
    ids: Counter[tuple[str, bytes]] = Counter()
    wrong = [f"an effect of what is not in the log: {place}" for place in found.keys() - records.keys()]
    for place, headers in records.items():
        if place[0] in BY_ID:
            ids[place[0], headers["sidings-id"]] += found[place]
        elif found[place] != 1:
            wrong.append(f"{found[place]} effects of {place}")
    wrong += [f"{count} effects of {id}" for id, count in ids.items() if count != 1]
    lanes: dict[object, list[int]] = defaultdict(list)
    for row in effects:
        lanes[row["topic"], row["partition"], row["key"]].append(row["offset"])
    return wrong + [f"effects of {lane} not in order: {bad}" for lane, of in lanes.items() if (bad := _falls(of))]


def _of_topics(log: list[Any], told: list[Any]) -> list[str]:
    """What was committed is there, in order but for repeats, and nothing else. Order is by partition: a key moves when
    some are added. What is repeated then stands where its key is now, behind newer ones that were sent there before."""
    wanted: set[Any] = {(row["place"], row["key"], row["id"]) for row in told if row["place"] in OUT}
    sent: set[Any] = set()
    before: set[Any] = set()  # that stand in a partition of those that were there from the beginning
    places: dict[int, list[tuple[int, int]]] = defaultdict(list)
    lanes: dict[object, list[int]] = defaultdict(list)
    for record in sorted(log, key=lambda record: (record.partition, record.offset)):
        if record.topic in OUT:
            key, number = record.key.decode(), json.loads(record.value)["number"]
            sent.add((record.topic, key, number))
            places[number].append((record.partition, record.offset))
            if record.partition < OUT[record.topic]:
                before.add((record.topic, key, number))
            elif (record.topic, key, number) in before:
                continue
            lanes[record.topic, record.partition, key].append(number)
    wrong = [f"committed, and in no topic: {missing}" for missing in sorted(wanted - sent)]
    wrong += [f"in a topic, and not committed: {more}" for more in sorted(sent - wanted)]
    for lane, numbers in lanes.items():
        if bad := _falls(list(dict.fromkeys(numbers))):
            where = {number: places[number] for pair in bad for number in pair}
            wrong.append(f"messages of {lane} not in order: {bad}, which stand in {where}")
    return wrong


def _of_jobs(told: list[Any], done: list[Any]) -> list[str]:
    """Each has its effects once, in the order of its group."""
    lanes: dict[object, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for row in told:
        if row["place"].startswith("jobs of "):
            lanes[row["place"], row["key"]][0].append(row["id"])
    for row in done:
        lanes[row["place"], row["key"]][1].append(row["number"])
    return [f"{lane}: {found} instead of {wanted}" for lane, (wanted, found) in lanes.items() if found != wanted]


def _falls(numbers: list[int]) -> list[tuple[int, int]]:
    """Some neighbours of which the second is the smaller one."""
    return [(a, b) for a, b in pairwise(numbers) if b < a][:4]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    dsn, bootstrap, folder, number, seed = sys.argv[1:]
    asyncio.run(Instance(dsn, bootstrap, Path(folder), int(number), seed).run())
