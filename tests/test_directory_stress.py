"""Directories in memory and in files, with keys of their own and without, while the topic is written, compacted and
made anew, the broker dies and they stand still, end and are killed: they equal the log, tell of each change, and never
go back."""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiokafka import TopicPartition
from pydantic import BaseModel
from sidings import SQLite
from sidings.devstack.errors import DevstackError
from sidings.devstack.topics import create_topic, delete_topics

from .consumer_support import producing
from .directory_support import COMPACTED, a_directory, quick
from .stress_support import CHAOS_SECONDS, Flow, a_seed, committed_log, restart_broker
from .support import SECONDS, eventually

TPS = [TopicPartition("lines", partition) for partition in range(3)]
CONFIG = COMPACTED | {"segment.ms": "500", "min.cleanable.dirty.ratio": "0.001", "delete.retention.ms": "1500"}
IDS, KEYS = 40, 12
WORKER = """
import asyncio, sys
from sidings import SQLite
from tests.directory_support import a_directory
from tests.test_directory_stress import Line

async def main():
    kafka, path = sys.argv[1:]
    async with a_directory("lines", kafka, model=Line, key="k", storage=SQLite(path)):
        await asyncio.sleep(1_000)

asyncio.run(main())
"""


class Line(BaseModel):
    """A row: its version, `v`, grows with each change of any row."""

    id: str
    k: str
    v: int


def partition_of(id: str) -> int:
    return int(id.removeprefix("r")) % len(TPS)


class Lines:
    """Changes of rows, in all the ways in which they are written; each producer has rows of its own."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.version = 0
        self.bad: dict[str, int] = {}  # the version of a row's last record that nobody can read

    def __call__(self, transactional: bool) -> tuple[str, dict[str, Any]]:
        rng = self._random
        id = f"r{2 * rng.randrange(IDS // 2) + transactional}"
        self.version += 1
        line = {"id": id, "k": f"k{rng.randrange(KEYS)}", "v": self.version}
        envelope = {"before": None, "op": "u", "after": line}
        tombstones, bad = (
            [None, None, b"null", b'{"schema": {}, "payload": null}'],
            [b"{", b'{"id": 5}', b"[]", b"\xff"],
        )
        value = rng.choices(
            [json.dumps(line).encode(), json.dumps(envelope).encode(), json.dumps(line | {"is_active": False}).encode(),
             rng.choice(tombstones), rng.choice(bad)],
            weights=[10, 2, 2, 4, 1],
        )[0]  # fmt: skip
        if value in bad:
            self.bad[id] = self.version
        return "lines", {"key": id.encode(), "value": value, "partition": partition_of(id)}


class Truth:
    """What the log says. of_ids, of_keys: what a directory should have; a row whose newest record is bad keeps what it
    had, which compaction may have taken: such ids and keys may have either."""

    def __init__(self, log: list[Any]) -> None:
        rows: dict[str, tuple[tuple[int, int, int], Line]] = {}
        self.loose: set[str] = set()
        for record in sorted(log, key=lambda record: (record.partition, record.offset)):
            id, line = record.key.decode(), meaning(record.value)
            if line == "bad":
                self.loose |= {id, *(rows[id][1].k for _ in range(id in rows))}
            elif line is None:
                rows.pop(id, None)
                self.loose.discard(id)
            else:
                rows[id] = ((record.timestamp, record.partition, record.offset), line)
                self.loose.discard(id)
        self.of_ids = {id: line for id, (_, line) in rows.items()}
        self.of_keys = {line.k: line for _, line in sorted(rows.values(), key=lambda kept: kept[0])}

    def differs(self, found: dict[Any, Line], *, keyed: bool) -> list[str]:
        wanted = self.of_keys if keyed else self.of_ids
        wrong: list[str] = []
        for key in {*found, *wanted}:
            lines = (found.get(key), wanted.get(key))
            if lines[0] != lines[1] and key not in self.loose and not any(n and n.id in self.loose for n in lines):
                wrong.append(f"{key}: {lines[0]} instead of {lines[1]}")
        return wrong


def meaning(value: bytes | None) -> Any:
    """The row, None where it is deleted, or ``"bad"``."""
    try:
        data = None if value is None else json.loads(value)
    except ValueError:
        return "bad"
    if data is None or (isinstance(data, dict) and data.get("is_active", data.get("payload", 1)) in (False, None)):
        return None
    if not isinstance(data, dict) or data["id" if "id" in data else "after"] == 5:
        return "bad"
    return Line(**data.get("after", data))


class Watched:
    """A directory, a replica that its callbacks make, and the versions that were seen."""

    def __init__(self, bootstrap: str, number: int, directory: Path) -> None:
        self.keyed = number % 2 == 1
        self.wrong: list[str] = []
        self._bootstrap = bootstrap
        self._path = None if number < 2 else directory / f"{number}.db"
        self._seen: dict[str, tuple[int, bool]] = {}  # version, and whether it was deleted since
        self.now: Any = None
        self._replica: dict[Any, Line] = {}

    async def start(self) -> None:
        storage = None if self._path is None else SQLite(self._path)
        settings = quick(self._bootstrap, request_seconds=8, rebalance_seconds=5)
        options = {"model": Line, "key": "k" if self.keyed else None, "storage": storage, "load_seconds": 60}
        directory = a_directory("lines", settings, **options)
        replica: dict[Any, Line] = {}

        def told(change: Any) -> None:
            if replica.get(change.key) != change.old:
                self.wrong.append(f"told of {change}, after {replica.get(change.key)}")
            replica[change.key] = change.new
            if change.new is None:
                del replica[change.key]

        directory.on_change(told, load=True)
        await asyncio.wait_for(directory.__aenter__(), 3 * SECONDS)
        self.now, self._replica = directory, replica

    async def stop(self, *, cut: bool = False) -> None:
        directory, self.now = self.now, None
        if directory is None:
            return
        if cut:
            directory._running.cancel()
            await asyncio.gather(directory._running, return_exceptions=True)
        else:
            await directory.__aexit__(None, None, None)

    def look(self, id: str, bad: int) -> None:
        """No version comes after a newer one, nor after its deletion. bad: of its last record that nobody can read.
        While all is read again, compaction may take what it followed, when what was before has been read."""
        if self.keyed or self.now is None:
            return
        line, (version, deleted) = self.now.get(id), self._seen.get(id, (0, False))
        if line is None:
            self._seen[id] = (version, version > 0)
            return
        if (line.v < version or (line.v == version and deleted)) and bad < version:
            self.wrong.append(f"{id} went back from {version} to {line.v}, deleted: {deleted}")
        self._seen[id] = (line.v, False)

    def compare(self, truth: Truth) -> None:
        found = dict(self.now.items())
        self.wrong += truth.differs(found, keyed=self.keyed)
        if self._replica != found:
            self.wrong.append(f"told of {self._replica}, has {found}")
        if len(self.now) != len(found) or any(self.now.get(key) != line for key, line in found.items()):
            self.wrong.append("items(), get() and len() differ")


async def make_anew(bootstrap: str, rng: random.Random, lines: Lines, rows: dict[str, Line]) -> None:
    """Most rows come again, younger than before; sometimes there are more records than before, too."""
    await delete_topics(bootstrap, ["lines"])
    while True:
        with contextlib.suppress(DevstackError):  # it may still be there
            await create_topic(bootstrap, "lines", partitions=len(TPS), config=CONFIG)
            break
        await asyncio.sleep(0.2)
    async with producing(bootstrap) as producer:
        for n in range(rng.choice([0, 0, 200])):
            await producer.send("lines", None, key=b"r99", partition=n % len(TPS))
        for id, line in rows.items():
            lines.version += 1
            if rng.random() < 0.8:
                value = line.model_copy(update={"v": lines.version}).model_dump_json().encode()
                await producer.send_and_wait("lines", value, key=id.encode(), partition=partition_of(id))


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_directories_equal_the_log_and_never_go_back(own_kafka, tmp_path, monkeypatch):
    monkeypatch.setattr("sidings.kafka.directory.completeness._ABSENT_SECONDS", 1.0)
    monkeypatch.setattr("sidings.kafka.directory.same_log._DOUBT_SECONDS", 2.0)
    seed = a_seed()
    rng, looks = random.Random(seed), random.Random(seed)
    kafka = await asyncio.to_thread(own_kafka, settings={"log.cleaner.backoff.ms": "100"})
    await create_topic(kafka.bootstrap, "lines", partitions=len(TPS), config=CONFIG)
    lines = Lines(seed)
    flow = Flow(kafka.bootstrap, seed, lines)
    watched = [Watched(kafka.bootstrap, number, tmp_path) for number in range(4)]
    did: Counter[str] = Counter()
    rebuilds = 0

    async def look() -> None:
        while True:
            for one in watched:
                id = f"r{looks.randrange(IDS)}"
                one.look(id, lines.bad.get(id, 0))
            await asyncio.sleep(0.001)

    async def truth() -> Truth:
        await flow.rest()
        return Truth(await committed_log(kafka.bootstrap, TPS))

    async def compare() -> None:
        known = await truth()
        for one in watched:
            await one.now.wait_until(timeout=2 * SECONDS)
            one.compare(known)
        flow.go_on()

    async def spawn() -> asyncio.subprocess.Process:
        command = (sys.executable, "-c", WORKER, kafka.bootstrap, str(tmp_path / "killed.db"))
        return await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[1])

    process, looking = await spawn(), asyncio.create_task(look())
    try:
        for one in watched:
            await one.start()
        until = time.monotonic() + CHAOS_SECONDS
        while time.monotonic() < until and not any(one.wrong for one in watched):
            action = rng.choice([*("compare", "end", "kill") * 3, "cut", "stand still", "broker", "anew"])
            did[action] += 1
            match action:
                case "compare":
                    await compare()
                case "kill":
                    process.kill()
                    await process.wait()
                    process = await spawn()
                case "end" | "cut":
                    one = rng.choice(watched)
                    rebuilds += one.now._follower.rebuilds
                    await one.stop(cut=action == "cut")
                    await asyncio.sleep(rng.choice([0, 0.5, 2.5]))
                    await one.start()
                case "stand still":
                    time.sleep(rng.choice([0.5, 2.5]))  # noqa: ASYNC251 - as a handler that blocks the loop
                case "broker" if rng.random() < 0.5:
                    await restart_broker(rng, kafka)
                case "anew" if rng.random() < 0.5:
                    await make_anew(kafka.bootstrap, rng, lines, (await truth()).of_ids)
                    await asyncio.sleep(3)  # it is noticed within two
                    flow.go_on()
                case _:
                    pass
            await asyncio.sleep(rng.choice([0.1, 0.5, 1, 2]))
        await compare()
        process.kill()
        await process.wait()
        known = await truth()
        settings = quick(kafka.bootstrap)
        async with a_directory("lines", settings, model=Line, key="k", storage=SQLite(tmp_path / "killed.db")) as last:
            assert known.differs(dict(last.items()), keyed=True) == []
        rebuilds += sum(one.now._follower.rebuilds for one in watched)
        print(f"{lines.version} versions, {rebuilds} rebuilds, {did}")
        assert [one.wrong[:10] for one in watched] == [[]] * 4
    finally:
        looking.cancel()
        await flow.stop()
        for one in watched:
            await one.stop()
        if process.returncode is None:
            process.kill()
            await eventually(lambda: process.returncode is not None)
