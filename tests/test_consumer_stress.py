"""Consumers of every kind at once (lists, types, isolated, told by ids, with back-pressure, of a topic that grows, of
one that is reset) while processes and servers die, pause and come back, and persons pause topics: effects are those of
the log, once each."""

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from sidings import Admin, KafkaSettings, Service, migrate
from sidings.devstack.topics import create_topic
from sidings.errors import SidingsError

from .consumer_support import add_partitions
from .stress_support import CHAOS_SECONDS, Flow, Workers, a_seed, committed_log, disturb, restart_broker
from .support import connected, eventually, fetch, value

WORKER = Path(__file__).with_name("consumer_stress_worker.py")
EFFECTS = """
    CREATE TABLE effect (
        id bigserial, topic text, partition int, "offset" bigint, key bytea, number int, via text, epoch bigint
    )
"""
PARTITIONS = {"plain": 4, "lists": 3, "isolated": 3, "grows": 2, "typed": 3}
GROWN = 4
TPS = [TopicPartition(t, p) for t, count in PARTITIONS.items() for p in range(GROWN if t == "grows" else count)]
KEYS = [None, b"", b"\xff\x00\x1f", "ключ".encode(), b"k" * 600, *[f"key-{n}".encode() for n in range(12)]]
LEFT = "SELECT count(*) FROM sidings.job WHERE held IS NULL"
CUT = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND random() < 0.3 AND datname IS NOT NULL
"""

Place = tuple[str, int, int]


class Messages:
    """Numbered messages with keys, headers and repeats of every kind."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sent = 0

    def __call__(self, _: bool) -> tuple[str, dict[str, Any]]:
        rng, topic = self._random, self._random.choice(list(PARTITIONS))
        self._sent += 1
        headers: list[tuple[str, bytes | None]] = [("x", b"\xff\x00"), ("ü", b""), ("x", None)]
        if topic in ("plain", "isolated") and rng.random() < 0.8:
            number = self._sent if rng.random() < 0.7 else max(1, self._sent - rng.randrange(60))
            headers.append(("sidings-id", str(number).encode()))
        if rng.random() < 0.2:
            headers.append(("traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"))
            headers.append(("correlation-id", rng.choice([b"c\x00\xff", b"c-1", b"c" * 600])))
        if topic == "typed" and (kind := rng.choice([b"one", b"many", b"many", b"many", b"unknown", None])):
            headers.append(("t", kind))
        raw = rng.choice([b"{", b"\xff"]) if rng.random() < 0.01 else json.dumps({"n": self._sent}).encode()
        options: dict[str, Any] = {"key": rng.choice(KEYS), "headers": headers, "value": raw}
        if topic != "grows":
            options["partition"] = rng.randrange(PARTITIONS[topic])
        return topic, options


def header(record: Any, name: str) -> bytes | None:
    return next((text for key, text in reversed(record.headers) if key == name), None)


def what_is_wrong(log: list[Any], effects: list[Any], resets: dict[TopicPartition, list[int]], held: Any) -> list[str]:
    """resets: the offsets that each partition was reset to, in order; held: how often each message is. An effect's
    epoch is the number of resets when it was committed."""
    wrong: list[str] = []
    found: dict[Place, list[Any]] = defaultdict(list)
    for row in effects:
        found[row["topic"], row["partition"], row["offset"]].append(row)
    records: dict[Place, Any] = {(r.topic, r.partition, r.offset): r for r in log}
    ids: dict[tuple[str, bytes], list[Place]] = defaultdict(list)
    without: set[tuple[str, bytes]] = set()  # ids of which some message has no effect, so that none need have
    for place, record in records.items():
        try:
            n = json.loads(record.value)["n"]
        except ValueError:
            n = None
        epochs = Counter(row["epoch"] for row in found[place])
        id, tp = header(record, "sidings-id"), TopicPartition(*place[:2])
        if any(count > 1 for count in epochs.values()):
            wrong.append(f"twice: {place} n={n} {epochs}")
        if n is None or n % 43 == 10 or header(record, "t") == b"unknown":
            if epochs or (id is None and held[place] != 1):
                wrong.append(f"cannot be decoded: {place} n={n} {epochs}, held {held[place]} times")
        elif n % 71 == 2:
            if epochs:
                wrong.append(f"discarded: {place} n={n} {epochs}")
        elif id is not None:
            ids[place[0], id].append(place)
            continue
        else:
            last = max((e for e, to in enumerate(resets[tp], start=1) if to <= place[2]), default=0)
            if sum(count for epoch, count in epochs.items() if epoch >= last) != 1:
                wrong.append(f"since reset {last}: {place} n={n} {epochs}")
        if id is not None:
            without.add((place[0], id))
    for known, places in ids.items():
        done = [place for place in places if found[place]]
        if len(done) > 1 or (not done and known not in without):
            wrong.append(f"{len(done)} of {known}: {places}")
    lanes: dict[object, list[int]] = defaultdict(list)
    for row in effects:  # what could not be decoded has left the order, and so has what is before a reset
        if row["key"] is not None and row["number"] % 41 != 9 and row["topic"] != "lists":
            lanes[row["topic"], row["partition"], row["key"]].append(row["offset"])
    wrong += [f"not in order: {lane} {offsets}" for lane, offsets in lanes.items() if offsets != sorted(offsets)]
    wrong += [f"not in the log: {place}" for place, rows in found.items() if rows and place not in records]
    return wrong


class World:
    """The servers, and what can happen to them."""

    def __init__(self, postgres: Any, kafka: Any, rng: random.Random) -> None:
        self.postgres, self.kafka, self.random = postgres, kafka, rng
        self.resets: dict[TopicPartition, list[int]] = defaultdict(list)
        self.grown = False
        self._service = Service("test", postgres=postgres.dsn, kafka=KafkaSettings(bootstrap=kafka.bootstrap))

    async def happen(self, action: str) -> None:
        postgres, rng = self.postgres, self.random
        match action:
            case "postgres":
                await asyncio.to_thread(rng.choice([postgres.kill, postgres.stop]))
                await asyncio.to_thread(postgres.start)
            case "postgres hangs":
                await asyncio.to_thread(postgres.pause)
                await asyncio.sleep(rng.choice([1, 5]))
                await asyncio.to_thread(postgres.resume)
            case "connections":
                async with connected(postgres.dsn) as connection:
                    await connection.execute(CUT)
            case "broker" if rng.random() < 0.5:
                await restart_broker(rng, self.kafka)
            case "reset":
                await self.reset(TopicPartition("lists", rng.randrange(PARTITIONS["lists"])))
            case "pause topic":
                await self.pause_or_resume(rng.choice(list(PARTITIONS)))
            case _:
                pass

    async def reset(self, tp: TopicPartition) -> None:
        where = "topic = $1 AND partition = $2"
        rows = await fetch(self.postgres.dsn, f"SELECT * FROM sidings.consumer_offset WHERE {where}", *tp)
        if not rows:
            return
        to = max(0, rows[0]["next_offset"] - self.random.choice([0, 1, 5, 50]))
        try:
            await self._service.reset_offsets(tp.topic, to, partitions=[tp.partition], actor="test")
        except SidingsError:
            rows = await fetch(self.postgres.dsn, f"SELECT * FROM sidings.consumer_offset WHERE {where}", *tp)
            if rows[0]["resets"] == len(self.resets[tp]):
                return
        self.resets[tp].append(to)

    async def pause_or_resume(self, topic: str) -> None:
        """Whichever it is not."""
        async with connected(self.postgres.dsn) as connection:
            admin = Admin(connection, actor="test")
            if topic in {pause.topic for pause in await admin.pauses()}:
                await admin.resume(topic=topic)
            else:
                await admin.pause(topic=topic, reason="a test")

    async def grow(self) -> None:
        if not self.grown:
            self.grown = True
            await add_partitions(self.kafka.bootstrap, "grows", GROWN)


async def paused_topics(dsn: str) -> list[str]:
    return [row["topic"] for row in await fetch(dsn, "SELECT topic FROM sidings.topic_pause")]


@pytest.mark.chaos
@pytest.mark.timeout(1500)
async def test_effects_are_those_of_the_log_once_each(own_postgres, own_kafka, tmp_path):
    seed = a_seed()
    rng = random.Random(seed)
    postgres, kafka = own_postgres(), await asyncio.to_thread(own_kafka)
    await migrate(postgres.dsn, service="test")
    async with connected(postgres.dsn) as connection:
        await connection.execute(EFFECTS)
    for topic, partitions in PARTITIONS.items():
        await create_topic(kafka.bootstrap, topic, partitions=partitions)
    decodable = tmp_path / "decodable"
    workers = Workers(WORKER, tmp_path, postgres.dsn, kafka.bootstrap, str(decodable))
    world = World(postgres, kafka, rng)
    actions = [*("kill", "stop", "pause", "more") * 2, "postgres", "postgres hangs", "connections", "broker"]
    flow = Flow(kafka.bootstrap, seed, Messages(seed))
    did: Counter[str] = Counter()

    async def none_left() -> bool:
        return await value(postgres.dsn, LEFT) == 0

    try:
        until = time.monotonic() + CHAOS_SECONDS
        while time.monotonic() < until:
            action = rng.choice([*actions, "reset", "reset", "pause topic", "pause topic"])
            did[action] += 1
            await disturb(rng, action, workers)
            await world.happen(action)
            if until - time.monotonic() < CHAOS_SECONDS / 2:
                await world.grow()
            await asyncio.sleep(rng.choice([0.3, 1, 2]))
        await flow.stop()
        await world.grow()
        for topic in await paused_topics(postgres.dsn):
            await world.pause_or_resume(topic)
        log = await committed_log(kafka.bootstrap, TPS)
        ends = {TopicPartition(r.topic, r.partition): r.offset for r in log}

        async def consumed() -> bool:
            rows = await fetch(postgres.dsn, "SELECT topic, partition, next_offset FROM sidings.consumer_offset")
            stored = {TopicPartition(row["topic"], row["partition"]): row["next_offset"] for row in rows}
            return all(stored.get(tp, -1) > end for tp, end in ends.items())

        await eventually(consumed, "all is consumed", seconds=400)
        await eventually(none_left, "no job is left", seconds=400)
        decodable.touch()
        async with connected(postgres.dsn) as connection:
            for row in await connection.fetch("SELECT id FROM sidings.job WHERE held IS NOT NULL ORDER BY id"):
                await Admin(connection, actor="test").release(row["id"])
        await eventually(none_left, "no job is left", seconds=400)
        effects = await fetch(postgres.dsn, "SELECT * FROM effect ORDER BY id")
        payloads = [json.loads(row["payload"]) for row in await fetch(postgres.dsn, "SELECT payload FROM sidings.job")]
        held = Counter((p["topic"], p["partition"], p["offset"]) for p in payloads)
        print(f"{len(log)} records, {len(effects)} effects, {did}, {dict(world.resets)}")
        assert what_is_wrong(log, effects, world.resets, held) == []
    finally:
        await flow.stop()
        await workers.kill()
