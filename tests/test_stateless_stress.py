"""Stateless consumers while processes and the broker die, pause and come back: nothing is lost, nothing is committed
before it is done, and no message starts before those of its key that precede it have been done."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from sidings.devstack.topics import create_topic

from .stress_support import (
    BROKEN,
    CHAOS_SECONDS,
    Flow,
    Workers,
    a_seed,
    committed_log,
    disturb,
    restart_broker,
)
from .support import eventually

WORKER = Path(__file__).with_name("stateless_stress_worker.py")
TPS = [TopicPartition(topic, partition) for topic in ("one", "many") for partition in range(4)]
KEYS = [None, b"", b"\xff", *[f"key-{n}".encode() for n in range(8)]]

Place = tuple[str, int, int]


async def committed(bootstrap: str) -> dict[TopicPartition, int]:
    client = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id="test", enable_auto_commit=False)
    await client.start()
    try:
        return {tp: await client.committed(tp) or 0 for tp in TPS}
    finally:
        await client.stop()


def what_is_wrong(
    log: Iterable[Any], dead: Iterable[Any], journal: list[Any], looks: list[tuple[dict[TopicPartition, int], int]]
) -> list[str]:
    """looks: what was committed when the journal had so many lines."""
    records: dict[Place, Any] = {(r.topic, r.partition, r.offset): r for r in log}
    buried: set[Place] = set()
    for letter in dead:
        told = dict(letter.headers)
        place = (told["sidings-topic"].decode(), int(told["sidings-partition"]), int(told["sidings-offset"]))
        buried.add(place)
    starts: list[tuple[int, Place]] = []
    done: dict[Place, int] = {}
    for line, (event, *where) in enumerate(journal):
        place = (where[0], where[1], where[2])
        if event == "start":
            starts.append((line, place))
        else:
            done.setdefault(place, line)
    left = {place: records[place] for place in sorted(records) if place not in buried}
    wrong = [f"lost: {place}" for place in left if place not in done]
    wrong += [f"of an aborted transaction: {place}" for _, place in starts if place not in records]
    for found, lines in looks:
        ahead = [place for place in left if place[2] < found[TopicPartition(*place[:2])] and done[place] >= lines]
        wrong += [f"committed before it was done: {place}" for place in ahead]
    lanes: dict[object, list[Place]] = {}
    for place, record in left.items():
        if place[0] == "one":
            lanes.setdefault(place[:2], []).append(place)
        elif record.key is not None:
            lanes.setdefault((*place[:2], record.key), []).append(place)
    before = {later: earlier for lane in lanes.values() for earlier, later in pairwise(lane)}
    for line, place in starts:
        if place in before and done[before[place]] > line:
            wrong.append(f"{place} starts before {before[place]} is done")
    return wrong


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_nothing_is_lost_or_committed_early_and_keys_keep_their_order(own_kafka, tmp_path):
    seed = a_seed()
    rng, numbers = random.Random(seed), random.Random(seed + 1)
    kafka = await asyncio.to_thread(own_kafka)
    for topic, partitions in (("one", 4), ("many", 4), ("dead", 1)):
        await create_topic(kafka.bootstrap, topic, partitions=partitions)
    journal = tmp_path / "journal"
    journal.touch()
    workers = Workers(WORKER, tmp_path, kafka.bootstrap, str(journal))
    sent = 0

    def make(_: bool) -> tuple[str, dict[str, Any]]:
        nonlocal sent
        sent += 1
        value = b"{" if numbers.random() < 0.005 else json.dumps({"n": sent}).encode()
        tp = numbers.choice([*TPS, *TPS[4:]])
        return tp.topic, {"value": value, "key": numbers.choice(KEYS), "partition": tp.partition}

    looks: list[tuple[dict[TopicPartition, int], int]] = []

    async def look() -> None:
        while True:
            with contextlib.suppress(*BROKEN):
                async with asyncio.timeout(10):
                    found = await committed(kafka.bootstrap)
                    looks.append((found, journal.read_bytes().count(b"\n")))
            await asyncio.sleep(0.5)

    flow = Flow(kafka.bootstrap, seed, make)
    looking = asyncio.create_task(look())
    did: Counter[str] = Counter()
    try:
        until = time.monotonic() + CHAOS_SECONDS
        while time.monotonic() < until:
            action = rng.choice(["kill", "kill", "stop", "stop", "pause", "pause", "more", "more", "broker"])
            did[action] += 1
            await disturb(rng, action, workers)
            if action == "broker" and rng.random() < 0.4:
                await restart_broker(rng, kafka)
            await asyncio.sleep(rng.choice([0.3, 1, 2]))
        await flow.stop()
        log = await committed_log(kafka.bootstrap, TPS)
        ends = {TopicPartition(r.topic, r.partition): r.offset for r in log}

        async def all_committed() -> bool:
            found = await committed(kafka.bootstrap)
            return all(found[tp] > end for tp, end in ends.items())

        await eventually(all_committed, "all is committed", seconds=300)
        looking.cancel()
        dead = await committed_log(kafka.bootstrap, [TopicPartition("dead", 0)])
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        print(f"{len(log)} records, {len(dead)} dead letters, {len(lines)} lines, {len(looks)} looks, {did}")
        assert what_is_wrong(log, dead, lines, looks) == []
    finally:
        looking.cancel()
        await flow.stop()
        await workers.kill()
