"""A directory's start: until it holds all of its topic, beside a bare consumer that only reads it."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

from aiokafka import AIOKafkaProducer
from sidings.devstack.topics import create_topic

from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario

__all__: list[str] = []

PARTITIONS = 4
ROOT = Path(__file__).resolve().parents[2]

_filled: dict[tuple[str, int], str] = {}  # topics, by broker and number of records: the variants read the same


async def _topic(bench: Bench, records: int) -> tuple[str, str]:
    """Bootstrap servers, and a topic with that many rows of the article's table, as a relay has sent them."""
    assert bench.kafka is not None
    name = _filled.get((bench.kafka, records))
    if name is None:
        name = f"terminal-acquirer-{token_hex(3)}"
        await create_topic(bench.kafka, name, partitions=PARTITIONS, config={"cleanup.policy": "compact"})
        async with AIOKafkaProducer(bootstrap_servers=bench.kafka, linger_ms=20, max_batch_size=2**18) as producer:
            for number in range(records):
                terminal = f"T{number:08}"
                row = {
                    "id": number,
                    "is_active": True,
                    "acquirer_id": str(number % 37),
                    "terminal_id": terminal,
                    "updated_date": f"2024-01-01T11:11:11.{number % 10**6:06}",
                }
                header = ("sidings-id", b"reference:%x.%x" % (number, 1_704_107_471_000_000 + number))
                await producer.send(name, json.dumps(row).encode(), terminal.encode(), headers=[header])
        _filled[bench.kafka, records] = name
    return bench.kafka, name


async def _read(bench: Bench, kind: str, records: int, file: str = "-") -> Figures:
    bootstrap, topic = await _topic(bench, records)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.replica", kind, bootstrap, topic, file),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    said, _ = await process.communicate()
    found = json.loads(said)
    assert found["records"] == records, found
    return {
        "messages": records / found["seconds"],
        "seconds": found["seconds"],
        "client_us": found["cpu"] / records * 1e6,
        "postgres_us": 0.0,
        "memory_mib": found["memory_mib"],
    }


async def _from_file(bench: Bench, records: int, *, warm: bool) -> Figures:
    """warm: a life before has read all of it into the file."""
    with TemporaryDirectory(prefix="sidings-bench-") as folder:
        file = f"{folder}/store"
        cold = await _read(bench, "sqlite", records, file)
        return await _read(bench, "sqlite", records, file) if warm else cold


@scenario(
    "directory",
    "A directory of a compacted topic with 4 partitions, from its start until it is ready, a process for each",
    key="messages",
    compare=[
        Compare(
            "sidings, memory", key="seconds", target=1.0, at_most=True, label="sidings, memory: s until it is ready"
        ),
        Compare("sidings, memory", "floor: aiokafka alone", target=0.7),
        Compare("sidings, memory", key="memory_mib", target=200.0, at_most=True),
        Compare("sidings, memory", "a loop with a dict of models"),
        Compare("sidings, memory", "floor: aiokafka alone", key="client_us"),
        Compare("sidings, SQLite, cold", key="seconds", target=1.0, at_most=True),
        Compare("sidings, SQLite, cold", "floor: aiokafka alone"),
        Compare("sidings, SQLite, cold", key="memory_mib", target=200.0, at_most=True),
        Compare("sidings, SQLite, warm", key="seconds", target=1.0, at_most=True),
        Compare("sidings, SQLite, warm", key="memory_mib", target=200.0, at_most=True),
    ],
    note="Rows of a table with five columns, about 130 bytes of JSON each, with a message id, for a pydantic "
    "model. From the start of the client, so with its connections, which all of them need; imports are not counted. "
    "The floor reads the records and throws them away; the loop is what one writes without a directory. Warm: "
    "restarted on the file of a life before, so next to nothing is read. The targets are of 50,000 records; "
    "with --long there are 1,000,000. Other cores' work includes the broker's.",
    kafka=True,
)
def directory(size: Size) -> Sequence[Variant]:
    records = (
        1_000_000 if size.long else size.jobs(50_000) if size.name == "tiny" else 50_000
    )  # what the targets are of
    settings = {"records": records, "partitions": PARTITIONS}
    return [
        Variant("floor: aiokafka alone", lambda b: _read(b, "bare", records), settings),
        Variant("a loop with a dict of models", lambda b: _read(b, "by hand", records), settings),
        Variant("sidings, memory", lambda b: _read(b, "memory", records), settings),
        Variant("sidings, SQLite, cold", lambda b: _from_file(b, records, warm=False), settings),
        Variant("sidings, SQLite, warm", lambda b: _from_file(b, records, warm=True), settings),
    ]
