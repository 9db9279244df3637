"""A relay that is paused past its lease and then writes: its old message comes behind a newer one, and is put right."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError, ProducerClosed, UnknownError
from aiokafka.protocol.produce import ProduceRequest
from sidings.executor import Link, PostgresSettings
from sidings.kafka.directory import Directory
from sidings.kafka.outbox.amends import Amends
from sidings.kafka.outbox.backlog import Row, Slot
from sidings.kafka.outbox.failures import Failed
from sidings.kafka.outbox.rounds import Rounds
from sidings.kafka.outbox.senders import Sender
from sidings.schema import load_sql

from .directory_support import COMPACTED, quick
from .faulty_proxy import Moment, proxied
from .guide import block
from .outbox_support import arrived, emptied, records, relay_process, relaying
from .support import SECONDS, connected, eventually

PAGE = "directory-tables.md"

# It stops itself with the second message in its hand: behind its last look at the clock, before the write. With "die"
# it is killed behind the write.
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
    sent = write(self, request, **options)
    if len(written) == 2 and "die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    return sent

AIOKafkaConnection.send = send

async def main():
    async with relaying(sys.argv[1], sys.argv[2], lease_seconds=1.0):
        await asyncio.sleep(600)

asyncio.run(main())
"""


@asynccontextmanager
async def relay_that_stops(dsn: str, kafka: str, *then: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", PAUSED, dsn, kafka, *then], cwd=Path(__file__).parents[1])
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


@pytest.fixture
async def compacted(db: asyncpg.Connection, topic: Any) -> str:
    """The topic of a directory table with one row, which stands in the outbox."""
    name = await topic("terminals", config=COMPACTED)
    await db.execute(f"SELECT sidings.directory_table('terminal_acquirer', '{name}', '{{terminal_id}}', 'is_active')")
    await db.execute("INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ('t1', 'a')")
    return name


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").exists(), reason="asks /proc whether a process stands still")
@pytest.mark.parametrize("last", ["acquirer_id = 'c'", "is_active = false"])
async def test_an_old_row_that_a_paused_relay_writes_late_does_not_stay_the_last_one(
    database: str, db: asyncpg.Connection, sidings_kafka: str, compacted: str, last: str
):
    async with relay_that_stops(database, sidings_kafka) as paused:
        await eventually(lambda: arrived(sidings_kafka, compacted))
        await emptied(database)
        await edit(db, "acquirer_id = 'b'")
        await eventually(lambda: stopped(paused))
        async with relaying(database, sidings_kafka, lease_seconds=1.0) as heir:
            await eventually(lambda: len(heir.held) == 16)
            await emptied(database)
            await edit(db, last)
            await emptied(database)
            async with Directory(compacted, kafka=quick(sidings_kafka), model=dict) as directory:
                now = directory.get("t1")
                assert (now and now["acquirer_id"]) == ("c" if "c" in last[-3:] else None)
                paused.send_signal(signal.SIGCONT)
                await directory.wait_until(3, timeout=SECONDS)

                async def put_right() -> bool:
                    return [record.value for record in await records(sidings_kafka, compacted)][-1] == newest

                newest = (await records(sidings_kafka, compacted))[2].value
                await eventually(put_right)
                await directory.wait_until(timeout=SECONDS)
                assert directory.get("t1") == now
        found = await records(sidings_kafka, compacted)
        late = found[3]
        assert late.value == found[1].value != newest
        assert dict(late.headers)["sidings-id"] == dict(found[1].headers)["sidings-id"], "the late one is a repeat"
        assert {record.value for record in found[4:]} == {newest}


async def due(db: asyncpg.Connection) -> None:
    """What is in doubt is so no longer than until now."""
    await db.execute("UPDATE sidings.directory_doubt SET (since, due_at) = (now() - (due_at - since), now())")


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks /proc whether a process stands still")
async def test_an_old_row_does_not_stay_though_its_relay_is_killed_and_so_is_the_heir(
    database: str, db: asyncpg.Connection, sidings_kafka: str, compacted: str
):
    async with relay_that_stops(database, sidings_kafka, "die") as paused:
        await eventually(lambda: arrived(sidings_kafka, compacted))
        await emptied(database)
        await edit(db, "acquirer_id = 'b'")
        await eventually(lambda: stopped(paused))
        async with relay_process(database, sidings_kafka, lease_seconds=1.0) as heir:
            await emptied(database)
            await edit(db, "acquirer_id = 'c'")
            await emptied(database)
            heir.kill()
        before = await records(sidings_kafka, compacted)
        paused.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(paused.wait, SECONDS) == -signal.SIGKILL

        async def came_late() -> bool:
            return await arrived(sidings_kafka, compacted) == len(before) + 1

        await eventually(came_late)
        assert (await records(sidings_kafka, compacted))[-1].value == before[1].value, "the old one is the last one"
        async with relaying(database, sidings_kafka, lease_seconds=1.0):
            await due(db)

            async def put_right() -> bool:
                return (await records(sidings_kafka, compacted))[-1].value == before[2].value

            await eventually(put_right)
        assert json.loads(before[2].value)["acquirer_id"] == "c"


async def doubts(db: asyncpg.Connection) -> list[tuple[bytes, float]]:
    """Keys in doubt, and after how many seconds the table is asked."""
    sql = "SELECT key, extract(epoch FROM due_at - since)::float8 AS after FROM sidings.directory_doubt ORDER BY key"
    return [(row["key"], row["after"]) for row in await db.fetch(sql)]


@pytest.fixture
async def terminals(db: asyncpg.Connection) -> str:
    await db.execute(
        "SELECT sidings.directory_table('terminal_acquirer', 'terminals', '{terminal_id}', active => 'is_active')"
    )
    return "terminals"


@asynccontextmanager
async def amending(dsn: str, **settings: Any) -> AsyncIterator[Amends]:
    link = Link(PostgresSettings(dsn=dsn, **settings))
    amends = Amends(link, schema="sidings")
    running = asyncio.create_task(amends.run())
    try:
        yield amends
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await link.close()


def late(*keys: bytes | None) -> list[Row]:
    return [(1, Slot(0, "outbox/0", 1), key, None, b"", None, None, 0) for key in keys]


async def published(db: asyncpg.Connection) -> list[bytes]:
    return sorted(row["key"] for row in await db.fetch("DELETE FROM sidings.outbox RETURNING key"))


async def test_what_is_in_doubt_is_published_three_times_and_then_forgotten(
    database: str, db: asyncpg.Connection, terminals: str
):
    async with amending(database) as amends:
        amends.owe(terminals, late(b"t1", None))
        amends.owe("no directory's", late(b"t1"))
        await eventually(lambda: not amends.owed)
        for seconds in (5.0, 60.0, 720.0):
            assert await doubts(db) == [(b"t1", seconds)]
            assert await db.fetchval(load_sql("sidings.kafka.outbox", "settle", "sidings"), terminals) is None, (
                "not yet"
            )
            await due(db)
            assert await doubts(db) == [(b"t1", seconds)]
            amends.due([terminals])
            await eventually(lambda: db.fetchval("SELECT count(*) FROM sidings.outbox"))
            assert await published(db) == [b"t1"]
        assert await doubts(db) == []


async def test_a_key_in_doubt_anew_is_looked_at_from_the_beginning(
    database: str, db: asyncpg.Connection, terminals: str
):
    await db.execute("INSERT INTO sidings.directory_doubt VALUES ('terminals', 't1', now() - interval '1 min', now())")
    async with amending(database) as amends:
        amends.owe(terminals, late(b"t1", b"t2"))
        await eventually(lambda: not amends.owed)
    assert await doubts(db) == [(b"t1", 5.0), (b"t2", 5.0)]


async def test_what_cannot_be_told_to_the_database_is_told_when_it_answers(
    database: str, db: asyncpg.Connection, terminals: str, caplog: pytest.LogCaptureFixture
):
    async with proxied(database) as proxy, amending(proxy.dsn) as amends:
        proxy.arm("doubt", Moment.BEFORE, 2)
        amends.owe(terminals, late(b"t1"))
        await eventually(lambda: not amends.owed)
        assert await doubts(db) == [(b"t1", 5.0)]
        await eventually(lambda: "works again" in caplog.text)
        assert caplog.text.count("trying again") == 1, "told at the beginning, not at each of two tries"


async def test_what_stands_in_a_slot_when_it_is_taken_over_is_in_doubt_once_it_is_sent(
    database: str, db: asyncpg.Connection, sidings_kafka: str, topic: Any
):
    rows = await topic("terminals", config=COMPACTED)
    other = await topic("other")
    await db.execute(f"SELECT sidings.directory_table('terminal_acquirer', '{rows}', '{{terminal_id}}', 'is_active')")
    insert = "INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ($1, 'a')"
    await db.execute(insert, "t1")
    for _ in range(2):
        async with relaying(database, sidings_kafka) as relay:
            await eventually(lambda relay=relay: len(relay.held) == 16)
            await emptied(database)
            assert await doubts(db) == [], "nobody has had the slots before, or nothing stood in them"
    await db.execute(insert, "t2")
    await db.execute("SELECT sidings.publish($1, 'k', '1')", other)
    async with relaying(database, sidings_kafka) as relay:
        await eventually(lambda: len(relay.held) == 16)
        await emptied(database)
        assert await doubts(db) == [(b"t2", 5.0)]
        await db.execute(insert, "t3")
        await emptied(database)
        assert await doubts(db) == [(b"t2", 5.0)], "what comes later, only this relay has sent"


async def test_all_that_stands_in_a_slot_when_it_is_taken_over_may_have_been_sent(db: asyncpg.Connection):
    """Up to the last one: what the former owner has sent of it may come behind what is sent now."""
    insert = "INSERT INTO sidings.outbox (slot, topic, value) SELECT slot, 't', '' FROM unnest($1::int[]) slot"
    await db.execute(insert, [3, 5, 3, 3, 4])
    ids = [row["id"] for row in await db.fetch("SELECT id FROM sidings.outbox ORDER BY id")]
    inherited = await db.fetch(load_sql("sidings.kafka.outbox", "inherited"), [3, 4, 7])
    assert sorted(tuple(row) for row in inherited) == [(3, ids[3]), (4, ids[4]), (7, None)]


@pytest.mark.parametrize("cut", [False, True], ids=["no answer", "its producer was closed"])
async def test_a_message_that_is_sent_again_for_want_of_an_answer_is_in_doubt(
    database: str, db: asyncpg.Connection, sidings_kafka: str, topic: Any, monkeypatch: pytest.MonkeyPatch, cut: bool
):
    rows = await topic("terminals", config=COMPACTED)
    await db.execute(f"SELECT sidings.directory_table('terminal_acquirer', '{rows}', '{{terminal_id}}', 'is_active')")
    answers, unanswered = Rounds._answers, list[object]()  # pyright: ignore[reportPrivateUsage]

    async def silent(self: Any, futures: Any) -> Any:
        left = await answers(self, futures)
        if unanswered:
            return left
        unanswered.extend(futures)
        if cut:
            raise Failed(ProducerClosed(), cut=True)
        return futures

    monkeypatch.setattr(Rounds, "_answers", silent)
    async with relaying(database, sidings_kafka) as relay:
        await eventually(lambda: len(relay.held) == 16)
        await db.execute("INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ('t1', 'a')")
        await emptied(database)
    assert await arrived(sidings_kafka, rows) == 2
    assert await doubts(db) == [(b"t1", 5.0)]


async def test_what_a_producer_without_numbers_has_sent_twice_by_itself_is_in_doubt(
    database: str, db: asyncpg.Connection, sidings_kafka: str, topic: Any, monkeypatch: pytest.MonkeyPatch
):
    rows = await topic("terminals", config=COMPACTED | {"max.message.bytes": "20000"})
    await db.execute(f"SELECT sidings.directory_table('terminal_acquirer', '{rows}', '{{terminal_id}}', 'is_active')")
    insert = "INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ($1, $2)"
    send, to_lose = AIOKafkaClient.send, list[str]()

    async def lost(client: AIOKafkaClient, node: Any, request: Any, **options: Any) -> Any:
        answer = await send(client, node, request, **options)
        if isinstance(request, ProduceRequest) and to_lose:
            raise KafkaConnectionError(f"{to_lose.pop()} is lost")
        return answer

    monkeypatch.setattr(AIOKafkaClient, "send", lost)
    async with relaying(database, sidings_kafka) as relay:
        await eventually(lambda: len(relay.held) == 16)
        to_lose.append("an answer to the shared producer, whose batches have numbers")
        await db.execute(insert, "t1", "a")
        await emptied(database)
        await db.execute(insert, "t2", "too large" * 5_000)  # refused: the topic has a producer of its own for a while
        await emptied(database)
        await db.execute(insert, "t3", "a")
        await emptied(database)
        assert await arrived(sidings_kafka, rows) == 2
        assert await doubts(db) == []
        to_lose.append("an answer to its own one")
        await db.execute(insert, "t4", "a")
        await emptied(database)
    assert not to_lose
    assert [record.key for record in await records(sidings_kafka, rows)] == [b"t1", b"t3", b"t4", b"t4"]
    assert await doubts(db) == [(b"t4", 5.0)]


async def test_what_kafka_refuses_for_a_reason_that_the_client_does_not_know_may_be_there_and_is_in_doubt(
    database: str, db: asyncpg.Connection, sidings_kafka: str, compacted: str, monkeypatch: pytest.MonkeyPatch
):
    send, refused = Sender.send, list[int]()  # how many messages each batch had that was refused

    async def unknown(sender: Sender, batch: Any, topic: str, partition: int) -> "asyncio.Future[object]":
        answer = await send(sender, batch, topic, partition)
        if 2 in refused:
            return answer
        refused.append(batch.record_count())
        if len(refused) == 3:  # with the fourth one, messages count as refused
            await db.execute("INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ('t2', 'a')")
        await answer
        failed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        failed.set_exception(UnknownError())
        return failed

    monkeypatch.setattr(Sender, "send", unknown)
    async with relaying(database, sidings_kafka):
        await emptied(database)
    assert [key for key, _ in await doubts(db)] == [b"t1", b"t2"]


@pytest.mark.parametrize("batch_bytes", [500_000, 60_000], ids=["one batch", "two of them"])
async def test_doubts_end_where_the_topic_takes_smaller_batches_than_the_relay_makes(
    database: str,
    db: asyncpg.Connection,
    sidings_kafka: str,
    topic: Any,
    monkeypatch: pytest.MonkeyPatch,
    batch_bytes: int,
):
    """All that was left of a refused batch, or went in smaller ones, counted as sent twice, and was in doubt anew: the
    table was published every five seconds, for ever."""
    monkeypatch.setattr("sidings.kafka.outbox.lane_senders._CAREFUL_SECONDS", -1.0)  # a large one each time
    rows = await topic("terminals", config=COMPACTED | {"max.message.bytes": "20000"})
    await db.execute(f"SELECT sidings.directory_table('terminal_acquirer', '{rows}', '{{terminal_id}}', 'is_active')")
    async with relaying(database, sidings_kafka, batch_bytes=batch_bytes) as relay:
        await eventually(lambda: len(relay.held) == 16)
        await db.execute(
            "INSERT INTO terminal_acquirer (terminal_id, acquirer_id) "
            "SELECT 't' || n, repeat('a', 500) FROM generate_series(1, 200) n"
        )
        await emptied(database)
        assert await doubts(db) == []
        await db.execute(
            "INSERT INTO sidings.directory_doubt "
            "SELECT $1, convert_to(terminal_id, 'UTF8'), now(), now() + interval '5 seconds' FROM terminal_acquirer",
            rows,
        )
        for times, after in ((2, {60.0}), (3, {720.0}), (4, set[float]())):
            await due(db)

            async def sent(count: int = 200 * times) -> bool:
                return await arrived(sidings_kafka, rows) >= count

            await eventually(sent)
            await emptied(database)
            assert {seconds for _, seconds in await doubts(db)} == after


async def test_a_topic_that_fails_gets_no_further_messages(db: asyncpg.Connection, terminals: str):
    await db.execute("INSERT INTO sidings.directory_doubt VALUES ('terminals', 't1', now(), now())")
    await db.execute(
        "INSERT INTO sidings.outbox_relay (id, alive_until) VALUES (gen_random_uuid(), now() + interval '1 hour')"
    )
    await db.execute(
        "INSERT INTO sidings.origin (origin, owner, epoch, lease_until) "
        "SELECT 'outbox/0', id, 1, now() + interval '1 hour' FROM sidings.outbox_relay"
    )
    await db.execute(
        "INSERT INTO sidings.outbox_topic (topic, relay, retries, retry_at, error) "
        "SELECT 'terminals', id, 1, now(), 'a test' FROM sidings.outbox_relay"
    )

    async def attended() -> tuple[list[str], list[str]]:
        sql = load_sql("sidings.kafka.outbox", "attend", "sidings")
        row = await db.fetchrow(sql, uuid4(), 1.0, "host", 1, ["outbox/0"], False)
        assert row is not None
        return row["directories"], row["doubtful"]

    assert await attended() == ([terminals], [])
    await db.execute("UPDATE sidings.origin SET origin = 'a job queue'")
    assert await attended() == ([terminals], [terminals]), "not with a relay that sends nothing, be it alive"
    await db.execute("UPDATE sidings.origin SET origin = 'outbox/0', lease_until = now()")
    assert await attended() == ([terminals], [terminals]), "nor with one that has lost its slots"
    await db.execute("UPDATE sidings.origin SET lease_until = now() + interval '1 hour'")
    assert await attended() == ([terminals], [])
    await db.execute("DELETE FROM sidings.outbox_topic")
    assert await attended() == ([terminals], [terminals])
    await db.execute("UPDATE sidings.directory_doubt SET due_at = now() + interval '1 minute'")
    assert await attended() == ([terminals], [])


async def test_each_key_in_doubt_has_times_of_its_own(db: asyncpg.Connection, terminals: str):
    """One that has been asked for three times takes no other with it."""
    await db.execute(
        """INSERT INTO sidings.directory_doubt VALUES ('terminals', 't1', now() - interval '12 min', now()),
               ('terminals', 't2', now() - interval '5 s', now()), ('terminals', 't3', now() - interval '1 min', now()),
               ('terminals', 't4', now(), now() + interval '5 s')"""
    )
    await db.fetchval(load_sql("sidings.kafka.outbox", "settle", "sidings"), terminals)
    assert await doubts(db) == [(b"t2", 60.0), (b"t3", 720.0), (b"t4", 5.0)]
    assert await published(db) == [b"t1", b"t2", b"t3"]


async def test_of_very_many_keys_in_doubt_those_that_are_due_for_longest_come_first(
    db: asyncpg.Connection, terminals: str
):
    await db.execute(
        """INSERT INTO sidings.directory_doubt
           SELECT 'terminals', convert_to(n::text, 'UTF8'), at - interval '5 s', at
           FROM (SELECT n, now() - n * interval '1 ms' AS at FROM generate_series(1, 10001) n) d"""
    )
    settle = load_sql("sidings.kafka.outbox", "settle", "sidings")
    assert [await db.fetchval(settle, terminals) for _ in range(3)] == [10_000, 1, None]
    assert await db.fetchval("SELECT key FROM sidings.outbox ORDER BY id DESC LIMIT 1") == b"1"


@pytest.mark.parametrize("after", ["5 s", "10 min"], ids=["at first", "at last"])
async def test_a_key_in_doubt_anew_while_another_relay_looks_stays_in_doubt(
    database: str, db: asyncpg.Connection, terminals: str, after: str
):
    """Its relay waits for nobody, and takes nothing back of what came since."""
    insert = "INSERT INTO sidings.directory_doubt VALUES ('terminals', 't1', now() - $1::text::interval, now())"
    await db.execute(insert, after)
    doubt, settle = (load_sql("sidings.kafka.outbox", name, "sidings") for name in ("doubt", "settle"))
    async with connected(database, lock_timeout="200ms") as other, db.transaction():
        await db.execute(doubt, terminals, [b"t1"])
        assert await other.fetchval(settle, terminals) is None
    assert await doubts(db) == [(b"t1", 5.0)]


async def test_doubts_of_a_topic_that_is_no_tables_any_more_go(db: asyncpg.Connection, terminals: str):
    for key in ("terminals", "of before"):
        await db.execute("INSERT INTO sidings.directory_doubt VALUES ($1, 't1', now(), now())", key)
    await db.execute(load_sql("sidings.kafka.outbox", "settle", "sidings").replace("$1", "'terminals'"))
    assert [row["topic"] for row in await db.fetch("SELECT topic FROM sidings.directory_doubt")] == [terminals]


async def test_what_belongs_to_no_table_is_not_looked_for_among_all_that_is_in_doubt(
    db: asyncpg.Connection, terminals: str
):
    """All of it was read for each ten thousand that were put right."""
    await db.execute(
        "INSERT INTO sidings.directory_doubt "
        "SELECT 'terminals', convert_to(n::text, 'UTF8'), now(), now() + interval '1 minute' "
        "FROM generate_series(1, 50000) n"
    )
    for topic in ("a", "terminals", "z"):
        await db.execute("INSERT INTO sidings.directory_doubt VALUES ($1, 't1', now(), now())", topic)
    await db.execute("ANALYZE sidings.directory_doubt; SET enable_seqscan = off; SET enable_bitmapscan = off")
    sql = load_sql("sidings.kafka.outbox", "settle", "sidings").replace("$1", "'terminals'")
    plan = json.loads(await db.fetchval("EXPLAIN (ANALYZE, FORMAT JSON) " + sql))[0]["Plan"]
    [gone] = [node for node in plan["Plans"] if node.get("Subplan Name") == "CTE gone"]

    def scanned(node: Any) -> int:
        own = node["Actual Rows"] + node.get("Rows Removed by Filter", 0) if "Relation Name" in node else 0
        return own * node["Actual Loops"] + sum(map(scanned, node.get("Plans", ())))

    assert scanned(gone) < 100, gone
    left = await db.fetch("SELECT topic, count(*) AS count FROM sidings.directory_doubt GROUP BY topic")
    assert [tuple(row) for row in left] == [("terminals", 50_001)]


@pytest.mark.parametrize("call_seconds", [10.0, 0.3], ids=["longer than it waits for the lock", "shorter"])
async def test_a_table_that_somebody_writes_for_long_is_asked_again_a_minute_later(
    database: str, db: asyncpg.Connection, terminals: str, monkeypatch: pytest.MonkeyPatch, call_seconds: float
):
    """While we wait for him, all others that would write it wait for us: five seconds of each six they did."""
    asked, clock, fetch = list[str](), 1000.0, Amends._fetch  # pyright: ignore[reportPrivateUsage]

    async def counted(self: Amends, query: str, *args: object) -> None:
        try:
            await fetch(self, query, *args)
        finally:
            asked.append(query)

    monkeypatch.setattr(Amends, "_fetch", counted)
    monkeypatch.setattr("sidings.kafka.outbox.amends.now", lambda: clock)
    if call_seconds > 5:
        await db.execute("ALTER FUNCTION sidings.directory_repeat SET lock_timeout = '100ms'")
    await db.execute("INSERT INTO sidings.directory_doubt VALUES ('terminals', 't1', now(), now())")
    async with amending(database, call_seconds=call_seconds) as amends:
        async with connected(database) as other, other.transaction():
            await other.execute("UPDATE terminal_acquirer SET acquirer_id = 'b'")
            amends.due([terminals])
            await eventually(lambda: "settle" in asked)
            for key in (b"t2", b"t3"):  # a turn of the loop each
                amends.due([terminals])
                amends.owe(terminals, late(key))
                await eventually(lambda: not amends.owed)
            assert asked == ["settle", "doubt", "doubt"]
        clock += 60
        amends.due([terminals])
        await eventually(lambda: db.fetchval("SELECT count(*) FROM sidings.outbox"))
        assert await published(db) == [b"t1"]


async def slow(db: asyncpg.Connection, seconds: float) -> None:
    """To read a directory table takes so long, under its lock."""
    await db.execute("ALTER FUNCTION sidings.directory_statement RENAME TO statement_at_once")
    await db.execute(
        f"""CREATE FUNCTION sidings.directory_statement(d sidings.directory, event text) RETURNS text
            LANGUAGE sql RETURN sidings.statement_at_once(d, event) || left(pg_sleep({seconds})::text, 0)"""
    )


async def test_a_table_that_takes_longer_than_a_call_may_gets_the_time(
    database: str, db: asyncpg.Connection, terminals: str
):
    await slow(db, 1.5)
    await db.execute("INSERT INTO sidings.directory_doubt VALUES ('terminals', 't1', now(), now())")
    async with amending(database, call_seconds=0.5) as amends:

        async def put_right() -> bool:
            amends.due([terminals])
            return bool(await db.fetchval("SELECT count(*) FROM sidings.outbox"))

        await eventually(put_right)
    assert await published(db) == [b"t1"]


async def test_a_table_that_takes_longer_than_a_call_ever_may_is_left_alone_and_told(
    database: str, db: asyncpg.Connection, terminals: str, caplog: pytest.LogCaptureFixture
):
    """Else nobody could write it most of the time."""
    await slow(db, 3600.0)
    await db.execute("INSERT INTO sidings.directory_doubt VALUES ('terminals', 't1', now(), now())")
    async with amending(database, call_seconds=0.1) as amends, connected(database) as other:
        amends.due([terminals])
        await eventually(lambda: "call directory_republish" in caplog.text)
        for key in (b"t2", b"t3"):  # a turn of the loop each
            amends.due([terminals])
            amends.owe(terminals, late(key))
            await eventually(lambda: not amends.owed)
        await eventually(lambda: nobody_locks(other))
    [told] = [record.getMessage() for record in caplog.records if "directory_republish" in record.getMessage()]
    assert told.startswith("terminals: ")
    assert [key for key, _ in await doubts(db)] == [b"t1", b"t2", b"t3"], "it is asked again later"


async def nobody_locks(db: asyncpg.Connection) -> bool:
    sql = "SELECT count(*) = 0 FROM pg_locks WHERE relation = 'terminal_acquirer'::regclass"
    return bool(await db.fetchval(sql))


async def test_of_a_large_table_only_the_rows_in_doubt_are_made_json(db: asyncpg.Connection, terminals: str):
    """All of them were, with the writers locked out: for each ten thousand keys, and for a single one."""
    await db.execute(
        "INSERT INTO terminal_acquirer (terminal_id, acquirer_id) SELECT 't' || n, 'a' FROM generate_series(1, 2000) n"
    )
    assert len(await published(db)) == 2_000
    sql = await db.fetchval("SELECT sidings.directory_statement(d, 'KEYS') FROM sidings.directory d")
    explain = "EXPLAIN (ANALYZE, FORMAT JSON) " + sql.replace("$1", "'{t17,gone}'::bytea[]")
    plan = json.loads(await db.fetchval(explain))[0]["Plan"]

    def loops(node: Any) -> int:
        own = node["Actual Loops"] if node.get("Parent Relationship") == "SubPlan" else 0
        return own + sum(map(loops, node.get("Plans", ())))

    assert loops(plan) == 1, plan
    rows = await db.fetch("DELETE FROM sidings.outbox RETURNING key, value")
    assert {row["key"]: row["value"] and json.loads(row["value"])["terminal_id"] for row in rows} == {
        b"t17": "t17",
        b"gone": None,
    }


async def test_a_table_that_cannot_be_read_is_told_once_and_holds_up_no_other(
    database: str, db: asyncpg.Connection, terminals: str, caplog: pytest.LogCaptureFixture
):
    await db.execute("CREATE TABLE zone (k text PRIMARY KEY)")
    await db.execute("SELECT sidings.directory_table('zone', 'zones', '{k}')")
    await db.execute("ALTER TABLE terminal_acquirer RENAME terminal_id TO terminal")
    async with amending(database) as amends:
        amends.owe(terminals, late(b"t1"))
        amends.owe("zones", late(b"z1"))
        await eventually(lambda: not amends.owed)
        await due(db)
        amends.owe(terminals, late(b"t2"))
        await eventually(lambda: not amends.owed)
        amends.due([terminals, "zones"])
        await eventually(lambda: db.fetchval("SELECT count(*) FROM sidings.outbox"))
        await eventually(lambda: "call directory_republish" in caplog.text)

        async def given_up() -> bool:
            return [key for key, _ in await doubts(db)] == [b"t2", b"z1"]

        await eventually(given_up)
    assert await published(db) == [b"z1"]


async def test_a_key_that_comes_late_while_others_are_told_is_not_forgotten(
    database: str, db: asyncpg.Connection, terminals: str
):
    async with amending(database) as amends, connected(database) as other:
        async with db.transaction():
            await db.execute("LOCK TABLE sidings.directory_doubt")
            amends.owe(terminals, late(b"t1"))
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'sidings.directory_doubt'::regclass"
            await eventually(lambda: other.fetchval(waits))
            amends.owe(terminals, late(b"t2"))
        await eventually(lambda: not amends.owed)
        assert [key for key, _ in await doubts(db)] == [b"t1", b"t2"]


async def test_a_relay_that_stops_tells_the_database_first_what_is_in_doubt(
    database: str, db: asyncpg.Connection, sidings_kafka: str, terminals: str
):
    async with relaying(database, sidings_kafka, shutdown_seconds=SECONDS) as relay, connected(database) as other:
        await eventually(lambda: len(relay.held) == 16)
        async with db.transaction():
            await db.execute("LOCK TABLE sidings.directory_doubt IN EXCLUSIVE MODE")
            relay._amends.owe(terminals, late(b"t1"))  # pyright: ignore[reportPrivateUsage]
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'sidings.directory_doubt'::regclass"
            await eventually(lambda: other.fetchval(waits))
            stopping = asyncio.create_task(relay.stop())
            ended, _ = await asyncio.wait([stopping], timeout=2.0)  # it would be within milliseconds
            assert not ended
            assert len(relay.held) == 16
        await stopping
    assert await doubts(db) == [(b"t1", 5.0)]
