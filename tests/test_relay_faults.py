"""The relay while things die: no gap, and per key no disorder of first occurrences; repeats are allowed."""

import asyncio
import multiprocessing
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from inspect import CORO_SUSPENDED, getcoroutinestate
from itertools import count
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import asyncpg
import psycopg
import pytest
from prometheus_client import CollectorRegistry
from sidings.devstack import Postgres
from sidings.devstack.databases import create_database, ensure_template
from sidings.devstack.fixtures import ServerDirectory
from sidings.devstack.topics import create_topic
from sidings.executor import Link, PostgresSettings
from sidings.kafka import KafkaSettings
from sidings.kafka.outbox import OutboxSettings, Relay, packing, reader, recorder, rounds, senders
from sidings.kafka.outbox import relay as relay_module
from sidings.kafka.outbox.reader import Reader

from .faulty_proxy import proxied
from .outbox_support import (
    Writer,
    a_relay,
    arrived,
    assert_complete,
    emptied,
    firsts,
    numbered,
    publish,
    publishing,
    records,
    relay_process,
    relaying,
)
from .support import SECONDS, a_role, answers, connected, eventually, fetch, value
from .test_narrow_network import narrow


async def test_killed_between_sending_and_deleting_repeats_but_loses_and_reorders_nothing(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas", partitions=3)
    await publish(database, etas, numbered(0, 2_000))
    async with publishing(database) as (_, blocker):
        async with blocker.transaction():
            # Deletions wait for this lock, so the relay sends, is acknowledged, and cannot delete.
            await blocker.execute("SELECT FROM sidings.outbox FOR UPDATE")
            async with relay_process(database, sidings_kafka, lease_seconds=1.0) as first:

                async def some_arrived() -> bool:
                    return await arrived(sidings_kafka, etas) >= 1_000

                await eventually(some_arrived)
                first.kill()
            # The server does not know yet, and would delete as soon as it may.
            await blocker.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = current_database() "
                "AND pid <> pg_backend_pid()"
            )
        assert await value(database, "SELECT count(*) FROM sidings.outbox") == 2_000, "sent, and nothing deleted"
        async with relaying(database, sidings_kafka, lease_seconds=1.0):
            await emptied(database)
    found = await records(sidings_kafka, etas)
    assert len(found) > 2_000, "this test is about repeats"
    assert_complete(found, 2_000)


@pytest.mark.chaos
async def test_killed_again_and_again_under_load_nothing_is_missing_or_out_of_order(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas", partitions=3)
    async with Writer(database, etas) as writer:
        for _ in range(4):
            async with relay_process(database, sidings_kafka, lease_seconds=0.6) as process:
                before = await arrived(sidings_kafka, etas)

                async def progress(before: int = before) -> bool:
                    return await arrived(sidings_kafka, etas) > before + 200

                await eventually(progress)
                process.kill()
    async with relaying(database, sidings_kafka, lease_seconds=0.6):
        await emptied(database)
    assert_complete(await records(sidings_kafka, etas), writer.count)


async def test_a_relay_that_was_paused_past_its_lease_changes_nothing_in_the_database(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas", partitions=3)
    async with Writer(database, etas) as writer, relay_process(database, sidings_kafka, lease_seconds=1.0) as zombie:

        async def relayed() -> bool:
            return await arrived(sidings_kafka, etas) > 500

        await eventually(relayed)
        zombie.signal(signal.SIGSTOP)
        async with relaying(database, sidings_kafka, lease_seconds=1.0) as heir:
            await eventually(lambda: len(heir.held) == 16, "all slots are taken over")
            await eventually(lambda: heir.metrics.count("sent", etas) > 500)
            zombie.signal(signal.SIGCONT)
            # It comes back, and gets its half in order, by an agreed release.
            await eventually(lambda: len(heir.held) == 8)
            epochs = {row["epoch"] for row in await _origins(database)}
            assert min(epochs) >= 2
            count = writer.count
            await eventually(lambda: writer.count > count + 400)
    async with relaying(database, sidings_kafka, lease_seconds=1.0):
        await emptied(database)
    assert_complete(await records(sidings_kafka, etas), writer.count)


@pytest.mark.chaos
async def test_postgres_restarts_under_the_relay(own_postgres, sidings_kafka: str, topic) -> None:

    etas = await topic("etas", partitions=3)
    server = own_postgres()
    dsn = await create_database(server.dsn, "relay", template=await ensure_template(server.dsn, service="test"))
    async with relaying(dsn, sidings_kafka, lease_seconds=1.0) as relay:
        await publish(dsn, etas, numbered(0, 4_000))
        await eventually(lambda: relay.metrics.count("sent", etas) > 0)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await publish(dsn, etas, numbered(4_000, 400))
        await emptied(dsn)
    assert_complete(await records(sidings_kafka, etas), 4_400)


async def test_another_time_zone_or_date_style_of_the_database_is_no_restart(
    database: str, sidings_kafka: str, topic, caplog: pytest.LogCaptureFixture
) -> None:
    """With the next connection the start of the server, by which a restart is told, was another text: the relay gave
    its slots up, and waited for their leases, a minute here."""
    etas = await topic("etas")
    async with relaying(database, sidings_kafka, lease_seconds=60.0), connected(database) as connection:
        await publish(database, etas, numbered(0, 1))
        await emptied(database)
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f"ALTER DATABASE \"{name}\" SET timezone = 'Asia/Kathmandu'")
        await connection.execute(f"ALTER DATABASE \"{name}\" SET datestyle = 'German'")
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await publish(database, etas, numbered(1, 1))
        await emptied(database, seconds=10.0)
    assert "was restarted" not in caplog.text


async def test_statistics_that_a_person_has_reset_are_no_restart(
    database: str, sidings_kafka: str, topic, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay gave its slots up, and waited for their leases, a minute here. All kinds at once are what Postgres 17's
    `pg_stat_reset_shared()` resets."""
    etas = await topic("etas")
    async with relaying(database, sidings_kafka, lease_seconds=60.0), connected(database) as connection:
        await publish(database, etas, numbered(0, 1))
        await emptied(database)
        for number, kinds in enumerate((["bgwriter"], ["archiver", "bgwriter"]), start=1):
            await connection.execute("SELECT pg_stat_reset_shared(kind) FROM unnest($1::text[]) kind", kinds)
            await publish(database, etas, numbered(number, 1))
            await emptied(database, seconds=10.0)
    assert "was restarted" not in caplog.text


@pytest.mark.long
async def test_health_says_why_the_outbox_cannot_be_read(database: str, sidings_kafka: str) -> None:
    async with a_role(database) as (role, dsn), relaying(dsn, sidings_kafka) as relay, connected(database) as owner:
        await owner.execute(f"REVOKE SELECT ON sidings.outbox FROM {role}")
        [told] = await eventually(relay.problems)
        assert "permission denied for table outbox" in told


async def test_a_lost_answer_to_a_deletion_is_asked_again(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    etas = await topic("etas")
    original = recorder.Recorder.call
    lost: list[str] = []

    async def call(self: Any, query: str, *args: object) -> Any:
        answer = await original(self, query, *args)
        if query == "record" and len(lost) < 3:
            lost.append(query)
            self._link.drop()
            raise asyncpg.ConnectionDoesNotExistError("the answer was lost")
        return answer

    monkeypatch.setattr(recorder.Recorder, "call", call)
    async with relaying(database, sidings_kafka):
        await publish(database, etas, numbered(0, 3_000))
        await emptied(database)
    assert len(lost) == 3
    found = await records(sidings_kafka, etas)
    assert len(found) == 3_000, "no repeat: only the deletion was repeated"
    assert_complete(found, 3_000)


@pytest.mark.parametrize("window", [2_000, 1_000])  # a batch under way fills half of it, or all
async def test_a_topic_whose_broker_hangs_leaves_memory_and_reads_to_the_others(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    slow, fast = await topic("slow"), await topic("fast")
    answers = rounds.Rounds._answers
    released = asyncio.Event()

    async def hang(self: Any, futures: Any) -> Any:
        if self.lane.topic == slow and not released.is_set():
            self.lane.paused = True
            self.lane.shelve()
            self._on_room()
            await released.wait()
        return await answers(self, futures)

    monkeypatch.setattr(rounds.Rounds, "_answers", hang)
    async with relaying(database, sidings_kafka, window=window) as relay:
        await publish(database, slow, numbered(0, 6_000))
        await eventually(lambda: relay.backlog.lanes.get(slow) is not None and relay.backlog.lanes[slow].paused)
        await publish(database, fast, numbered(0, 6_000))
        await emptied(database, fast)
        assert await value(database, "SELECT count(*) FROM sidings.outbox WHERE topic = $1", slow) == 6_000
        released.set()
        await emptied(database)
    for name in (slow, fast):
        found = await records(sidings_kafka, name)
        assert len(found) == 6_000
        assert_complete(found, 6_000)


async def test_a_topic_that_is_looked_for_leaves_memory_and_reads_to_the_others(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for a missing one filled the window for `metadata_seconds`, with each try of it anew."""
    slow, fast = await topic("slow"), await topic("fast")
    partitions = senders.Sender.partitions
    looking, found = asyncio.Event(), asyncio.Event()

    async def late(self: senders.Sender, name: str, timeout: float) -> list[int]:
        if name == slow:
            looking.set()
            await found.wait()
        return await partitions(self, name, timeout)

    monkeypatch.setattr(senders.Sender, "partitions", late)
    async with relaying(database, sidings_kafka, window=1_000, slow_seconds=0.1) as relay:
        await publish(database, slow, numbered(0, 6_000))
        await looking.wait()
        await publish(database, fast, numbered(0, 6_000))
        await emptied(database, fast)
        assert await value(database, "SELECT count(*) FROM sidings.outbox WHERE topic = $1", slow) == 6_000
        assert relay.backlog.room(1_000) == 1_000
        found.set()
        await emptied(database)
    assert_complete(await records(sidings_kafka, slow), 6_000)


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_a_broker_is_lost_in_the_middle_of_a_batch(database: str, own_kafka) -> None:
    kafka = await asyncio.to_thread(own_kafka, brokers=3)

    await create_topic(kafka.bootstrap, "etas", partitions=6, replicas=3, config={"min.insync.replicas": "2"})
    async with relaying(database, kafka.bootstrap) as relay, Writer(database, "etas") as writer:
        for broker in (1, 2):
            sent = relay.metrics.count("sent", "etas")
            await eventually(lambda sent=sent: relay.metrics.count("sent", "etas") > sent + 400)
            await asyncio.to_thread(kafka.broker(broker).kill)
            sent = relay.metrics.count("sent", "etas")
            await eventually(lambda sent=sent: relay.metrics.count("sent", "etas") > sent + 2_000, seconds=60.0)
            await asyncio.to_thread(kafka.start)
        await writer.__aexit__()
        await emptied(database, seconds=60.0)
    assert_complete(await records(kafka.bootstrap, "etas"), writer.count)


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_too_few_replicas_make_the_topic_fail_visibly_and_lose_nothing(database: str, own_kafka) -> None:
    kafka = await asyncio.to_thread(own_kafka, brokers=3)

    await create_topic(kafka.bootstrap, "strict", partitions=2, replicas=3, config={"min.insync.replicas": "3"})
    await create_topic(kafka.bootstrap, "lenient", partitions=2, replicas=3, config={"min.insync.replicas": "1"})
    options = {"delivery_seconds": 3.0, "max_backoff_seconds": 1.0}
    async with relaying(database, kafka.bootstrap, **options) as relay, publishing(database) as (outbox, _):
        await publish(database, "strict", numbered(0, 200))
        await emptied(database)
        await asyncio.to_thread(kafka.broker(3).kill)
        await publish(database, "strict", numbered(200, 200))
        await publish(database, "lenient", numbered(0, 400))
        await emptied(database, "lenient", seconds=60.0)
        await eventually(lambda: "strict" in relay.metrics.failing, seconds=60.0)
        assert [topic.topic for topic in await outbox.failing()] == ["strict"]
        await asyncio.to_thread(kafka.start)
        await emptied(database, seconds=60.0)
        await eventually(lambda: relay.metrics.failing == set())
    assert_complete(await records(kafka.bootstrap, "strict"), 400)
    assert_complete(await records(kafka.bootstrap, "lenient"), 400)


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_a_hundred_thousand_messages_of_a_thousand_keys_by_concurrent_writers(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas", partitions=12)
    writers, rounds, keys = 8, 125, 1_000
    async with publishing(database) as (_, connection):
        await connection.execute("CREATE TABLE public.entity (id int PRIMARY KEY, version int)")
        await connection.execute("INSERT INTO public.entity SELECT n, 0 FROM generate_series(0, $1 - 1) n", keys)

    async def write(seed: int) -> None:
        async with publishing(database) as (outbox, connection):
            for turn in range(rounds):
                async with connection.transaction():
                    rows = await connection.fetch(
                        """WITH mine AS (SELECT id FROM public.entity WHERE id % 10 = $1 ORDER BY id FOR UPDATE)
                           UPDATE public.entity e SET version = version + 1 FROM mine WHERE e.id = mine.id
                           RETURNING e.id, e.version""",
                        (seed * 7 + turn) % 10,
                    )
                    await outbox.publish_many(connection, etas, [(str(r[0]), b"%d" % r[1]) for r in rows])

    async with relay_process(database, sidings_kafka, lease_seconds=1.0) as killed, relaying(database, sidings_kafka):
        writing = asyncio.gather(*(write(seed) for seed in range(writers)))
        await asyncio.wait([writing], timeout=2.0)
        killed.kill()
        await writing
        started = time.monotonic()
        await emptied(database, seconds=120.0)
        print(f"emptied {time.monotonic() - started:.1f} s after the last commit")
    async with publishing(database) as (_, connection):
        versions = {str(r[0]).encode(): r[1] for r in await connection.fetch("SELECT id, version FROM public.entity")}
    assert sum(versions.values()) == writers * rounds * keys // 10
    in_order = firsts(await records(sidings_kafka, etas))
    assert in_order == {key: [b"%d" % n for n in range(1, last + 1)] for key, last in versions.items()}


async def _origins(dsn: str) -> list[asyncpg.Record]:
    async with publishing(dsn) as (_, connection):
        return await connection.fetch("SELECT * FROM sidings.origin WHERE origin LIKE 'outbox/%'")


async def test_what_was_read_from_another_timeline_deletes_nothing(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failover that lost commits an id may be another message's. Here the relay believes in a former one."""
    etas = await topic("etas")
    original = recorder.Recorder.call
    answers: list[int] = []

    async def call(self: Any, query: str, *args: object) -> Any:
        if query == "record" and not answers:
            args = (*args[:-1], "FFFFFFFF")
        answer = await original(self, query, *args)
        if query == "record":
            answers.append(len(answer))
        return answer

    monkeypatch.setattr(recorder.Recorder, "call", call)
    async with relaying(database, sidings_kafka, lease_seconds=1.0):
        await publish(database, etas, numbered(0, 400))
        await emptied(database)
    assert answers[0] == 0  # void: the slots were acquired again, and the messages sent once more
    assert_complete(await records(sidings_kafka, etas), 400)


async def test_a_relay_that_has_not_begun_for_want_of_postgres_stops_at_once(own_postgres) -> None:
    """It has nothing to give back; it waited for a server that hangs, at its start and once more at its end."""
    postgres = own_postgres()
    await asyncio.to_thread(postgres.pause)
    hanging = PostgresSettings(dsn=postgres.dsn, connect_seconds=3_600.0, call_seconds=3_600.0)
    settings = OutboxSettings(shutdown_seconds=3_600.0)
    relay = Relay("test", hanging, KafkaSettings(bootstrap="127.0.0.1:1"), settings, prometheus=CollectorRegistry())
    async with asyncio.timeout(SECONDS):
        await relay.start()
        await asyncio.sleep(0)  # its first look at Postgres begins
        await relay.stop()


async def test_a_timestamp_that_kafka_cannot_express_parks_its_message_and_holds_up_no_other(
    database: str, sidings_kafka: str, topic
) -> None:
    """Reads failed on it, of all topics and for ever."""
    etas = await topic("etas")
    async with publishing(database) as (outbox, connection), relaying(database, sidings_kafka):
        async with connection.transaction():
            for time in ("infinity", "-infinity", "294000-01-01", "0001-01-01", "4000-01-01 BC"):
                await connection.execute(f"SELECT sidings.publish_bytes($1, 'k', '{time}', NULL, NULL, '{time}')", etas)
            await outbox.publish(connection, etas, key="max", value=b"max", timestamp=datetime.max.replace(tzinfo=UTC))
            await outbox.publish(connection, etas, key="k", value=b"now")
        await emptied(database)
        parked = {p.value: p.error for p in await outbox.parked()}
    assert {value for value, error in parked.items() if "infinite" in error} == {b"infinity", b"-infinity", b"max"}
    assert {r.value for r in await records(sidings_kafka, etas)} >= {b"now", b"0001-01-01"}


async def test_a_clock_of_postgres_that_is_hours_ahead_parks_no_message(
    database: str, sidings_kafka: str, topic
) -> None:
    """Kafka 4 refuses timestamps that lie more than an hour ahead."""
    etas = await topic("etas")
    async with connected(database) as connection:
        await connection.execute(
            "ALTER TABLE sidings.outbox ALTER published_at SET DEFAULT clock_timestamp() + interval '2 hours'"
        )
    await publish(database, etas, numbered(0, 20))
    async with publishing(database) as (outbox, _), relaying(database, sidings_kafka):
        await emptied(database)
        assert await outbox.parked() == []
    assert len(await records(sidings_kafka, etas)) == 20


async def test_a_clock_of_a_broker_that_is_hours_behind_parks_no_message(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the broker the times of Postgres and of the relay lie hours ahead. All were parked, one by one, and newer ones
    of their keys sent when the clock was right."""
    etas, ahead, clock = await topic("etas"), 7_200.0, time.time
    async with connected(database) as connection:
        await connection.execute(
            "ALTER TABLE sidings.outbox ALTER published_at SET DEFAULT clock_timestamp() + interval '2 hours'"
        )
        await publish(database, etas, numbered(0, 100))
        await connection.execute("SELECT sidings.publish_bytes($1, 'k', 'its own', NULL, NULL, '4000-01-01')", etas)
    monkeypatch.setattr(packing, "time", SimpleNamespace(time=lambda: clock() + ahead))
    async with publishing(database) as (outbox, _), relaying(database, sidings_kafka):
        await eventually(outbox.failing)
        [failing] = await outbox.failing()
        assert "the clock of this machine or of a broker is wrong" in failing.error
        ahead = 0.0
        await emptied(database)
        assert [parked.value for parked in await outbox.parked()] == [b"its own"]
    assert_complete(await records(sidings_kafka, etas), 100)


async def test_a_relay_whose_clock_is_days_behind_sends_messages_with_the_time_of_their_publication(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had the relay's: to Kafka they were older than it keeps any, and it dropped them before they were read."""
    etas, clock = await topic("etas"), time.time
    await publish(database, etas, numbered(0, 100))
    monkeypatch.setattr(packing, "time", SimpleNamespace(time=lambda: clock() - 8 * 86_400.0))
    async with relaying(database, sidings_kafka):
        await emptied(database)
    found = await records(sidings_kafka, etas)
    assert_complete(found, 100)
    assert min(record.timestamp for record in found) / 1_000 > clock() - 3_600.0


async def test_messages_that_have_waited_for_longer_than_their_topic_takes_are_sent(
    database: str, sidings_kafka: str, topic
) -> None:
    """As after an outage, of a topic that refuses old timestamps. They were parked, and newer ones of their keys sent;
    once released they were refused again, for ever. One whose author has given it such a timestamp still is parked."""
    strict = await topic("strict", config={"message.timestamp.before.max.ms": "3600000"})
    async with connected(database) as connection:
        await connection.execute(
            "ALTER TABLE sidings.outbox ALTER published_at SET DEFAULT clock_timestamp() - interval '2 hours'"
        )
        await publish(database, strict, numbered(0, 20))
        await connection.execute("SELECT sidings.publish_bytes($1, 'k', 'old', NULL, NULL, '2001-01-01')", strict)
        await connection.execute("ALTER TABLE sidings.outbox ALTER published_at SET DEFAULT clock_timestamp()")
    await publish(database, strict, numbered(20, 20))
    async with publishing(database) as (outbox, _), relaying(database, sidings_kafka):
        await emptied(database)
        assert [parked.value for parked in await outbox.parked()] == [b"old"]
    found = await records(sidings_kafka, strict)
    assert len(found) == 40
    assert_complete(found, 40)


async def test_messages_that_need_more_room_with_the_time_of_now_are_all_sent(
    database: str, sidings_kafka: str, topic
) -> None:
    """A batch has the first timestamp, and how far the others are from it: of those with the time of now that was more,
    and what the full batch had no room for any more was deleted, though nobody had sent it. A batch takes some 90."""
    counts = (*range(82, 94), 201)
    strict = [
        await topic("strict", partitions=1, config={"message.timestamp.before.max.ms": "3600000"}) for _ in counts
    ]
    async with connected(database) as connection:
        await connection.execute(
            "ALTER TABLE sidings.outbox ALTER published_at SET DEFAULT clock_timestamp() - interval '61 minutes'"
        )
        for name, count in zip(strict, counts, strict=True):
            first = "SELECT sidings.publish_bytes($1, 'k', '0', NULL, NULL, now() - interval '58 minutes')"
            await connection.execute(first, name)
            await publish(database, name, [("k", b"%d" % n) for n in range(1, count)])
    async with publishing(database) as (outbox, _), relaying(database, sidings_kafka, batch_bytes=4096):
        await emptied(database)
        assert await outbox.parked() == []
    for name, count in zip(strict, counts, strict=True):
        assert [int(record.value) for record in await records(sidings_kafka, name)] == list(range(count))


async def test_parked_messages_that_are_older_than_their_topic_takes_are_sent_when_they_are_released(
    database: str, sidings_kafka: str
) -> None:
    """As those of a topic that was missing. The time of their publication passed for one that their author had given:
    they were refused, and parked again, however often they were released."""
    late = f"late-{uuid4().hex}"
    async with connected(database) as connection:
        await connection.execute(
            "ALTER TABLE sidings.outbox ALTER published_at SET DEFAULT clock_timestamp() - interval '2 hours'"
        )
        await publish(database, late, numbered(0, 40))
        await connection.execute("ALTER TABLE sidings.outbox ALTER published_at SET DEFAULT clock_timestamp()")
    async with publishing(database) as (outbox, _), relaying(database, sidings_kafka, topic_patience_seconds=0.5):

        async def parked() -> bool:
            return len(await outbox.parked()) == 40

        await eventually(parked)
        await create_topic(sidings_kafka, late, partitions=2, config={"message.timestamp.before.max.ms": "3600000"})
        assert len(await outbox.release(late, actor="alice")) == 40
        await emptied(database)
        assert await outbox.parked() == []
    assert_complete(await records(sidings_kafka, late), 40)


@pytest.mark.long
async def test_a_read_that_no_smaller_one_can_replace_is_given_more_time(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that steps over tens of millions of messages that have been sent, while somebody's transaction keeps
    vacuum from removing them: after a start no read got past them any more."""
    monkeypatch.setattr(reader, "_QUICK_READ", 0.4)
    etas = await topic("etas")
    await publish(database, "sent", [("key", b"x")] * 600)
    await publish(database, etas, numbered(0, 20))
    async with a_role(database) as (role, of_role), connected(database) as admin:
        await admin.execute(
            "CREATE FUNCTION public.is_there(topic text) RETURNS boolean VOLATILE LANGUAGE plpgsql AS "
            "$$BEGIN IF topic = 'sent' THEN PERFORM pg_sleep(0.001); END IF; RETURN topic <> 'sent'; END$$; "
            f"CREATE POLICY slow ON sidings.outbox TO {role} USING (public.is_there(topic)); "
            "ALTER TABLE sidings.outbox ENABLE ROW LEVEL SECURITY"
        )
        relay = a_relay(database, sidings_kafka)
        relay.reader._link = Link(PostgresSettings(dsn=of_role, call_seconds=0.5))
        await relay.start()
        try:
            await emptied(database, etas)
        finally:
            await relay.stop()
            await relay.reader._link.close()


@pytest.mark.long
async def test_messages_that_do_not_come_through_in_time_are_read_by_fewer(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first read asked for hundreds whatever their size, was given up, and asked again for as many, for ever."""
    monkeypatch.setattr("sidings.executor.link._MOST_PATIENCE", 1)  # more time would do as well
    etas = await topic("etas")
    await publish(database, etas, [(f"k{n}", b"%d" % n + b"x" * 100_000) for n in range(120)])
    async with narrow(database) as slow:
        relay = a_relay(database, sidings_kafka)
        relay.reader._link = Link(PostgresSettings(dsn=slow, call_seconds=1.0))
        await relay.start()
        try:
            await emptied(database)
        finally:
            await relay.stop()
            await relay.reader._link.close()
    assert len(await records(sidings_kafka, etas)) == 120


async def test_large_messages_that_follow_small_ones_come_in_reads_that_memory_has_room_for(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many were read as there would have been room for of the ones before: gigabytes, where a thousand of a megabyte
    came behind small ones, or the relay had just started. So, too, of late ones, and of a topic that works again."""
    for name in ("_BYTES", "_MOST_BYTES", "_HELD_BYTES"):
        monkeypatch.setattr(reader, name, getattr(reader, name) // 128)
    brought: list[int] = []
    deliver = Reader._deliver

    def measured(self: Reader, plan: Any, rows: list[Any], **options: Any) -> None:
        brought.append(sum(len(row["value"] or b"") for row in rows))
        deliver(self, plan, rows, **options)

    monkeypatch.setattr(Reader, "_deliver", measured)
    etas, missing = await topic("etas"), f"missing-{uuid4().hex}"
    numbers = count()

    def messages(key: str, many: int, size: int) -> list[tuple[str | None, bytes | None]]:
        return [(f"{key}{n % 40}", b"%d " % next(numbers) + random.randbytes(size)) for n in range(many)]

    small, late, large, later = [messages(key, 200, size) for key, size in zip("abbc", (9, *[50_000] * 3), strict=True)]
    waiting = messages("w", 100, 50_000)
    async with relaying(database, sidings_kafka), publishing(database) as (outbox, connection):
        for name in (etas, missing):
            await publish(database, name, small)
        await emptied(database, etas)
        await publish(database, missing, waiting)
        async with connection.transaction():
            await outbox.publish_many(connection, etas, late)
            await outbox.publish(connection, etas, key="none", value=None)
            await publish(database, etas, later)
            await emptied(database, etas)
        await publish(database, etas, large)
        await create_topic(sidings_kafka, missing, partitions=2)
        await emptied(database)
    assert max(brought) <= 1.5 * reader._MOST_BYTES
    for name, sent in ((etas, [*small, *late, ("none", None), *later, *large]), (missing, [*small, *waiting])):
        wanted: defaultdict[bytes, list[bytes | None]] = defaultdict(list)
        for key, body in sent:
            wanted[str(key).encode()].append(body)
        assert firsts(await records(sidings_kafka, name)) == wanted


@asynccontextmanager
async def late_messages(dsn: str, topic: str, count: int) -> AsyncIterator[None]:
    """Messages of one transaction, which becomes visible behind others that have been relayed in the meantime."""
    async with publishing(dsn) as (outbox, connection):
        transaction = connection.transaction()
        await transaction.start()
        await outbox.publish_many(connection, topic, numbered(0, count))
        await publish(dsn, topic, [(f"other{n}", b"x") for n in range(200)])
        await emptied(dsn)
        await transaction.commit()
        yield


async def test_a_large_transaction_that_commits_late_is_read_page_by_page(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read brought all of it, however much it was."""
    monkeypatch.setattr(reader, "_ALL_LATE", 320)
    etas = await topic("etas", partitions=2)
    sizes: list[int] = []
    deliver = Reader._deliver

    def measured(self: Reader, plan: Any, rows: list[Any], **options: Any) -> None:
        sizes.append(len(rows))
        deliver(self, plan, rows, **options)

    monkeypatch.setattr(Reader, "_deliver", measured)
    async with relaying(database, sidings_kafka, window=400), late_messages(database, etas, 4_000):
        await publish(database, etas, numbered(4_000, 400))
        await emptied(database)
    assert max(sizes) < 1_000
    assert_complete([r for r in await records(sidings_kafka, etas) if r.value != b"x"], 4_400)


async def test_late_messages_that_cannot_be_found_in_time_are_found_by_starting_over(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were looked for among all that waits for a topic that fails, which may be millions, for ever: a step takes
    as long here as with a thousand times as many."""
    monkeypatch.setattr("sidings.executor.link._MOST_PATIENCE", 1)  # more time would do as well
    etas, stepped_over = await topic("etas"), "AND NOT pg_visible_in_snapshot(m.txid"
    relay = a_relay(database, sidings_kafka)
    assert relay.reader._sql.count(stepped_over) == 1
    relay.reader._sql = relay.reader._sql.replace(stepped_over, f"AND pg_sleep(0.02) IS NOT NULL {stepped_over}")
    relay.reader._link = Link(PostgresSettings(dsn=database, call_seconds=1.0))
    await relay.start()
    try:
        async with publishing(database) as (outbox, connection):
            async with connection.transaction():
                await outbox.publish(connection, etas, key="k", value=b"late")
                await publish(database, f"{etas}-missing", [(f"k{n}", b"x") for n in range(200)])
                await eventually(lambda: f"{etas}-missing" in relay.metrics.failing)
            await emptied(database, etas)
    finally:
        await relay.stop()
        await relay.reader._link.close()
    assert [r.value for r in await records(sidings_kafka, etas)] == [b"late"]


async def test_messages_that_a_dump_has_brought_from_another_server_are_sent_once(
    database: str, sidings_kafka: str, topic
) -> None:
    """Their transaction ids are yet to come here: they counted as late, and were sent again behind newer ones."""
    etas, other = await topic("etas"), await topic("other")
    await publish(database, etas, numbered(0, 4_000))
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.outbox SET txid = '999999999'")
    async with Writer(database, other), relaying(database, sidings_kafka, window=4_000):
        await emptied(database, etas)
    assert await arrived(sidings_kafka, etas) == 4_000


async def test_messages_that_get_the_ids_of_such_as_a_crash_has_taken_are_found(
    sidings_server_directory: ServerDirectory, sidings_kafka: str, topic, caplog: pytest.LogCaptureFixture
) -> None:
    """A backend that is killed takes all others with it, and what was not on the disk, but not the server's start."""
    etas = await topic("etas")
    settings = {"synchronous_commit": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}
    mortal = Postgres(sidings_server_directory("mortal-outbox"), settings=settings)
    try:
        mortal.start()
        template = await ensure_template(mortal.dsn, service="test")
        dsn = await create_database(mortal.dsn, "mortal", template=template)
        async with relaying(dsn, sidings_kafka, lease_seconds=3.0) as relay:
            await eventually(lambda: len(relay.held) == 16)
            await value(dsn, "CHECKPOINT")  # the leases stay
            await publish(dsn, f"{etas}-missing", numbered(0, 400))
            last = await value(dsn, "SELECT max(id) FROM sidings.outbox")
            await eventually(lambda: max(slot.high for slot in relay.backlog.slots.values()) >= last)
            async with connected(dsn) as connection:
                os.kill(await connection.fetchval("SELECT pg_backend_pid()"), signal.SIGKILL)
            await eventually(lambda: answers(dsn), "the server to answer")
            await publish(dsn, etas, numbered(0, 40))
            assert await value(dsn, "SELECT max(id) FROM sidings.outbox") < last, "ids have been handed out again"
            await emptied(dsn, etas)
    finally:
        mortal.remove()
    assert "was restarted" in caplog.text
    assert_complete(await records(sidings_kafka, etas), 40)


async def test_a_process_whose_event_loop_hangs_loses_its_slots(
    database: str, sidings_kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that renews the leases went on, and no other relay could send."""
    monkeypatch.setattr(relay_module, "_STALL_SECONDS", 0.5)
    async with relaying(database, sidings_kafka, lease_seconds=1.0) as relay:
        await eventually(lambda: len(relay.held) == 16)
        hang_until_the_leases_are_over(database)
        await eventually(lambda: len(relay.held) == 16, "it has them again")


def hang_until_the_leases_are_over(dsn: str) -> None:
    """Nothing else happens in this thread."""
    over = "SELECT bool_and(lease_until < clock_timestamp()) FROM sidings.origin WHERE origin LIKE 'outbox/%'"
    deadline = time.monotonic() + SECONDS
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not connection.execute(over).fetchone()[0]:  # type: ignore[index]
            assert time.monotonic() < deadline, "the leases are renewed"
            time.sleep(0.02)


@pytest.mark.parametrize("part", ["sidings outbox etas", "sidings Reader.run"])
async def test_a_relay_a_part_of_which_somebody_has_cancelled_ends_and_says_so(
    database: str, sidings_kafka: str, part: str
) -> None:
    """It went on without it: the topic, or all of them, stood still, and `/health` said that all was well."""
    await publish(database, "etas", numbered(0, 1))  # there is no such topic, so that its part waits
    relay = a_relay(database, sidings_kafka)
    await relay.start()

    def at_work() -> list[asyncio.Task[Any]]:
        """Not while it has yet to begin: nothing of it would know."""
        named: list[asyncio.Task[Any]] = [task for task in asyncio.all_tasks() if task.get_name() == part]
        return [task for task in named if getcoroutinestate(cast(Any, task.get_coro())) == CORO_SUSPENDED]

    try:
        [task] = await eventually(at_work)
        task.cancel()
        async with asyncio.timeout(SECONDS):
            with pytest.raises(ExceptionGroup) as ended:
                await relay.wait()
        assert "was cancelled from outside" in str(ended.value.exceptions[0])
    finally:
        await relay.stop()


def _run_for_ever(relay: Relay) -> None:
    async def run() -> None:
        await relay.start()
        await relay.wait()

    asyncio.run(run())


async def test_relays_that_are_forked_with_a_service_are_relays_of_their_own(database: str, sidings_kafka: str) -> None:
    """As by `gunicorn --preload`: under one id they took each other's slots as their own, in turns."""
    relay = a_relay(database, sidings_kafka)
    children = [multiprocessing.get_context("fork").Process(target=_run_for_ever, args=(relay,)) for _ in range(2)]

    async def shared() -> bool:
        held = await fetch(
            database, "SELECT count(*) AS slots FROM sidings.origin WHERE owner IS NOT NULL GROUP BY owner"
        )
        return [row["slots"] for row in held] == [8, 8]

    try:
        for child in children:
            child.start()
        await eventually(shared)
        pids = {row["pid"] for row in await fetch(database, "SELECT pid FROM sidings.outbox_relay")}
        assert pids == {child.pid for child in children}
    finally:
        for child in children:
            child.kill()
            child.join()


async def test_while_postgres_is_away_nothing_is_told_of_what_waited(database: str, sidings_kafka: str) -> None:
    """The last count was told for as long as it was away, though other relays had long sent the messages."""
    await publish(database, "nowhere", numbered(0, 7))
    async with proxied(database) as proxy, relaying(proxy.dsn, sidings_kafka, lease_seconds=1.0) as relay:

        def waiting() -> dict[str, int]:
            return {topic: count for topic, (count, _) in relay.metrics.waiting.items()}

        await eventually(lambda: waiting() == {"nowhere": 7})
        proxy.cut()
        await eventually(lambda: waiting() == {}, waiting)
        proxy.heal()
        await eventually(lambda: waiting() == {"nowhere": 7})


async def test_what_cannot_be_counted_in_time_is_given_more(database: str, sidings_kafka: str) -> None:
    """As tens of millions of messages: of a relay that had just started no metric told that anything waited."""
    await publish(database, "nowhere", [("key", b"x")] * 500)
    async with a_role(database) as (role, of_role), connected(database) as admin:
        await admin.execute(
            "CREATE FUNCTION public.is_there() RETURNS boolean VOLATILE LANGUAGE plpgsql AS "
            "$$BEGIN PERFORM pg_sleep(0.001); RETURN true; END$$; "
            f"CREATE POLICY slow ON sidings.outbox TO {role} USING (public.is_there()); "
            "ALTER TABLE sidings.outbox ENABLE ROW LEVEL SECURITY"
        )
        relay = a_relay(database, sidings_kafka)
        link = relay._links["figures"] = Link(PostgresSettings(dsn=of_role, call_seconds=0.3))
        await relay.start()
        try:
            waiting = await eventually(lambda: relay.metrics.waiting, lambda: link.patience)
            assert waiting["nowhere"][0] == 500
        finally:
            await relay.stop()
