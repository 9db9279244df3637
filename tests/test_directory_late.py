"""A relay that is paused past its lease and then writes: its old message comes behind a newer one, and is put right."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sidings.executor import Link, PostgresSettings
from sidings.kafka.directory import Directory
from sidings.kafka.outbox.amends import Amends
from sidings.kafka.outbox.backlog import Row, Slot

from .directory_support import COMPACTED, quick
from .guide import block
from .outbox_support import arrived, emptied, records, relaying
from .support import SECONDS, connected, eventually

PAGE = "directory-tables.md"

# It stops itself with the second message in its hand: behind its last look at the clock, before the write.
PAUSED = """
import asyncio, os, signal, sys
from aiokafka.conn import AIOKafkaConnection
from tests.outbox_support import relaying

write, written = AIOKafkaConnection.send, []

def send(self, request, **options):
    if type(request).__name__.startswith("ProduceRequest"):
        written.append(request)
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
    return write(self, request, **options)

AIOKafkaConnection.send = send

async def main():
    async with relaying(sys.argv[1], sys.argv[2], lease_seconds=1.0):
        await asyncio.sleep(600)

asyncio.run(main())
"""


@asynccontextmanager
async def relay_that_stops(dsn: str, kafka: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", PAUSED, dsn, kafka], cwd=Path(__file__).parents[1])
    try:
        yield process
    finally:
        process.kill()
        process.wait(SECONDS)


def stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether it stands still."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
async def db(database: str) -> AsyncIterator[asyncpg.Connection]:
    async with connected(database) as connection:
        await connection.execute(block(PAGE, "The table", "sql"))
        yield connection


async def edit(db: asyncpg.Connection, change: str) -> None:
    await db.execute(f"UPDATE terminal_acquirer SET {change}")


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks /proc whether a process stands still")
@pytest.mark.parametrize("last", ["acquirer_id = 'c'", "is_active = false"])
async def test_an_old_row_that_a_paused_relay_writes_late_does_not_stay_the_last_one(
    database: str, db: asyncpg.Connection, sidings_kafka: str, topic: Any, last: str
):
    terminals = await topic("terminals", config=COMPACTED)
    await db.execute(
        f"SELECT sidings.directory_table('terminal_acquirer', '{terminals}', '{{terminal_id}}', 'is_active')"
    )
    await db.execute("INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ('t1', 'a')")

    async def first() -> bool:
        return await arrived(sidings_kafka, terminals) == 1

    async with relay_that_stops(database, sidings_kafka) as paused:
        await eventually(first)
        await emptied(database)
        await edit(db, "acquirer_id = 'b'")
        await eventually(lambda: stopped(paused))
        async with relaying(database, sidings_kafka, lease_seconds=1.0) as heir:
            await eventually(lambda: len(heir.held) == 16)
            await emptied(database)
            await edit(db, last)
            await emptied(database)
            async with Directory(terminals, kafka=quick(sidings_kafka), model=dict) as directory:
                now = directory.get("t1")
                assert (now and now["acquirer_id"]) == ("c" if "c" in last[-3:] else None)
                paused.send_signal(signal.SIGCONT)
                await directory.wait_until(3, timeout=SECONDS)

                async def put_right() -> bool:
                    return [record.value for record in await records(sidings_kafka, terminals)][-1] == newest

                newest = (await records(sidings_kafka, terminals))[2].value
                await eventually(put_right)
                await directory.wait_until(timeout=SECONDS)
                assert directory.get("t1") == now
        found = await records(sidings_kafka, terminals)
        ids = [dict(record.headers)["sidings-id"] for record in found]
        assert [record.value for record in found[1:]] == [found[1].value, newest, found[1].value, newest]
        assert ids[3] == ids[1] != ids[4], "the late one is a repeat, what puts it right is a message of its own"


async def test_a_key_that_comes_late_while_others_are_put_right_is_not_forgotten(
    database: str, db: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sidings.kafka.outbox.amends._ARRIVAL_SECONDS", 0.0)
    await db.execute(
        "SELECT sidings.directory_table('terminal_acquirer', 'terminals', '{terminal_id}', active => 'is_active')"
    )
    amends = Amends(Link(PostgresSettings(dsn=database)), schema="sidings")
    running = asyncio.create_task(amends.run())
    slot = Slot(0, "sidings/0", 1)
    late = {key: Row(1, slot, key, None, b"", None, None, 0) for key in (b"t1", b"t2")}
    try:
        async with db.transaction():
            await db.execute("LOCK TABLE terminal_acquirer IN ACCESS EXCLUSIVE MODE")
            amends.owe("terminals", [late[b"t1"]])
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'terminal_acquirer'::regclass"
            async with connected(database) as other:
                await eventually(lambda: other.fetchval(waits))
            amends.owe("terminals", [late[b"t2"]])
        await eventually(lambda: not amends.owed)
        assert {row["key"] for row in await db.fetch("SELECT key FROM sidings.outbox")} == {b"t1", b"t2"}
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
