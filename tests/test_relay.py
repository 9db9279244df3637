"""The relay: order per key, batches, failing topics, refused messages, slots, waking, shutdown."""

import asyncio
import random
import re
import secrets
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import UnknownError, kafka_errors
from prometheus_client import CollectorRegistry
from sidings.devstack.topics import create_topic, delete_topics
from sidings.errors import KafkaUnavailable
from sidings.executor import Link, PostgresSettings
from sidings.kafka.outbox import (
    MESSAGE_ID,
    InvalidMessage,
    NotPublished,
    Outbox,
    OutboxMetrics,
    OutboxSettings,
    Relay,
    reader,
    recorder,
)
from sidings.kafka.outbox.backlog import Slot
from sidings.kafka.outbox.failures import InvalidRecordError
from sidings.kafka.outbox.figures import Figures
from sidings.kafka.outbox.senders import Sender
from sidings.kafka.outbox.slots import SlotKeeper
from sidings.kafka.settings import KafkaSettings

from .consumer_support import a_service
from .outbox_support import (
    FAST,
    a_relay,
    assert_complete,
    emptied,
    firsts,
    numbered,
    publish,
    publishing,
    records,
    relay_process,
    relaying,
    sending,
)
from .support import SECONDS, connected, eventually, fetch, value

UNREACHABLE = "127.0.0.1:1"


async def test_messages_of_one_key_arrive_in_order_and_once_while_nothing_fails(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas", partitions=6)
    await publish(database, etas, [(f"k{n % 50}", b"%d" % n) for n in range(5_000)])
    async with relaying(database, sidings_kafka):
        await emptied(database)
        await publish(database, etas, [(f"k{n % 50}", b"%d" % n) for n in range(5_000, 6_000)])
        await emptied(database)
    found = await records(sidings_kafka, etas)
    assert len(found) == 6_000
    for key, values in firsts(found).items():
        assert values == [b"%d" % n for n in range(int(key[1:]), 6_000, 50)]
    assert len({dict(r.headers)[MESSAGE_ID] for r in found}) == 6_000, "every message has an id of its own"


async def test_concurrent_writers_that_lock_the_entity_are_relayed_in_commit_order(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas", partitions=3)
    async with publishing(database) as (_, connection):
        await connection.execute("CREATE TABLE public.entity (id int PRIMARY KEY, version int)")
        await connection.execute("INSERT INTO public.entity SELECT n, 0 FROM generate_series(0, 19) n")

    async def write(seed: int) -> None:
        choose = random.Random(seed)
        async with publishing(database) as (outbox, connection):
            for _ in range(60):
                async with connection.transaction():
                    for entity in sorted(choose.sample(range(20), 2)):
                        version = await connection.fetchval(
                            "UPDATE public.entity SET version = version + 1 WHERE id = $1 RETURNING version", entity
                        )
                        await outbox.publish(connection, etas, key=str(entity), value=b"%d" % version)
                    await asyncio.sleep(choose.random() * 0.01)

    async with relaying(database, sidings_kafka, poll_seconds=0.005):
        await asyncio.gather(*(write(seed) for seed in range(8)))
        await emptied(database)
    entities = await fetch(database, "SELECT id, version FROM public.entity")
    in_order = firsts(await records(sidings_kafka, etas))
    assert sum(len(values) for values in in_order.values()) == 8 * 60 * 2
    for row in entities:
        assert in_order[str(row["id"]).encode()] == [b"%d" % n for n in range(1, row["version"] + 1)]


async def test_a_message_that_commits_late_behind_others_is_not_missed(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas")
    async with relaying(database, sidings_kafka) as relay, publishing(database) as (outbox, slow):
        async with slow.transaction():
            await outbox.publish(slow, etas, key="slow", value=b"first id")
            await publish(database, etas, [(f"k{n}", b"x") for n in range(200)])
            await eventually(lambda: relay.metrics.count("sent", etas) == 200)
        await emptied(database)
    assert len(await records(sidings_kafka, etas)) == 201


async def test_a_partition_key_chooses_partition_and_order_in_place_of_the_key(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas", partitions=8)
    async with publishing(database) as (outbox, connection), connection.transaction():
        for n in range(40):
            await outbox.publish(connection, etas, key=f"k{n}", value=b"%d" % n, partition_key="together")
    async with relaying(database, sidings_kafka):
        await emptied(database)
    found = await records(sidings_kafka, etas)
    assert len({r.partition for r in found}) == 1
    assert [r.value for r in found] == [b"%d" % n for n in range(40)]


async def test_a_key_reaches_the_partition_that_kafkas_own_clients_choose(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas", partitions=7)
    keys = [f"key-{n}" for n in range(60)]
    await publish(database, etas, [(key, b"relay") for key in keys])
    async with relaying(database, sidings_kafka):
        await emptied(database)
    async with AIOKafkaProducer(bootstrap_servers=sidings_kafka) as bare:
        await asyncio.gather(*[await bare.send(etas, key=key.encode(), value=b"bare") for key in keys])
    by_key: dict[bytes, set[int]] = {}
    for record in await records(sidings_kafka, etas):
        by_key.setdefault(record.key, set()).add(record.partition)
    assert len(by_key) == 60
    assert all(len(partitions) == 1 for partitions in by_key.values())


async def test_a_topic_that_does_not_exist_delays_no_other_and_is_sent_when_it_appears(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas", partitions=2)
    missing = f"{etas}-missing"
    async with relaying(database, sidings_kafka, max_backoff_seconds=0.5) as relay:
        await publish(database, missing, [(f"k{n % 5}", b"%d" % n) for n in range(3_000)])
        await publish(database, etas, [(f"k{n}", b"x") for n in range(3_000)])
        await emptied(database, etas)
        async with publishing(database) as (outbox, _):

            async def failing():
                return await outbox.failing()

            (state,) = await eventually(failing)
            assert (state.topic, state.retries >= 1) == (missing, True)
            assert "does not exist" in state.error
            assert relay.metrics.count("failed", missing) >= 1
            shared: Any = relay._senders._main
            assert missing not in shared._producer.client._topics, "nobody is asked for it for ever"
            await publish(database, etas, [(f"k{n}", b"y") for n in range(1_000)])
            await emptied(database, etas)
            assert await outbox.failing(), "still failing while the other one is served"
            await create_topic(sidings_kafka, missing, partitions=2)
            try:
                await emptied(database)

                async def works() -> bool:
                    return not await outbox.failing()

                await eventually(works, "the topic's error is reset")
                in_order = firsts(await records(sidings_kafka, missing))
                assert in_order == {b"k%d" % k: [b"%d" % n for n in range(k, 3_000, 5)] for k in range(5)}
            finally:
                await delete_topics(sidings_kafka, [missing])


async def test_a_missing_topics_messages_are_parked_when_patience_ends(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_AT_ONCE", 2)  # of each slot in a statement: there are more
    missing = f"{await topic('etas')}-missing"
    await publish(database, missing, [(f"k{n}", b"x") for n in range(50)])
    options = {"topic_patience_seconds": 0.0, "backoff_seconds": 60.0}  # it is tried once
    async with relaying(database, sidings_kafka, **options) as relay, publishing(database) as (outbox, _):
        await emptied(database)
        parked = await outbox.parked(missing)
        assert len(parked) == 50
        assert "does not exist" in parked[0].error
        assert await relay.drain(SECONDS), "nothing waits any more; its stop said that something did"
        await publish(database, missing, [("k", b"y")])
        assert not await relay.drain(SECONDS)


async def test_a_stop_before_the_first_slot_says_that_messages_wait_where_some_do(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def acquires_none(self: SlotKeeper, names: list[str]) -> None: ...

    monkeypatch.setattr(SlotKeeper, "_acquire", acquires_none)
    etas = await topic("etas")
    for waiting in (False, True):
        if waiting:
            await publish(database, etas, [("k", b"x")])
        caplog.clear()
        async with relaying(database, sidings_kafka) as relay:
            await eventually(lambda relay=relay: relay._senders.connected)
        assert ("messages still wait in the outbox" in caplog.text) is waiting


async def test_messages_whose_topic_can_have_no_such_name_are_parked_and_disturb_no_other(
    database: str, sidings_kafka: str, topic, caplog: pytest.LogCaptureFixture
) -> None:
    """The table takes any. Kafka's client cannot even write the longest of them, nor can an index take it whole: such
    messages stayed in the outbox for ever."""
    first, second = await topic("first"), await topic("second")
    digits = secrets.token_urlsafe(30_000)  # which cannot be compressed
    names, longer = {"two words", "", ".."}, {"x" * 250, "\U0001f680" * 250, digits}
    async with relaying(database, sidings_kafka), publishing(database) as (outbox, connection):
        await publish(database, first, [("k", b"x")])
        for name in names | longer:
            await connection.execute("INSERT INTO sidings.outbox (slot, topic, key) VALUES (0, $1, 'k')", name)
        await emptied(database)
        await publish(database, second, [("k", b"x")])
        await emptied(database)
        parked = {p.topic: p.error for p in await outbox.parked()}
        assert parked.keys() == names | {name[:248] + "…" for name in longer}
        assert all(name in parked[name[:248] + "…"] for name in longer), "the whole stands in the error"
        await outbox.discard(digits[:248] + "…", actor="test")
        assert len(await outbox.parked()) == len(parked) - 1
    assert "could not be" not in caplog.text


async def test_only_the_refused_messages_of_a_batch_are_parked(database: str, sidings_kafka: str, topic) -> None:
    small = await topic("small", partitions=2, config={"max.message.bytes": "40000"})
    giants = {100, 101, 500, 999}
    await publish(
        database, small, [(f"k{n % 10}", b"%d " % n + b"x" * (50_000 if n in giants else 20)) for n in range(1_000)]
    )
    async with relaying(database, sidings_kafka) as relay, publishing(database) as (outbox, _):
        await emptied(database)
        parked = await outbox.parked(small)
        assert {int(p.value.split()[0]) for p in parked if p.value} == giants
        assert all("MessageSizeTooLarge" in p.error for p in parked)
        assert relay.metrics.count("parked", small) == 4
    found = await records(sidings_kafka, small)
    for key, values in firsts(found).items():
        expected = [n for n in range(int(key[1:]), 1_000, 10) if n not in giants]
        assert [int(v.split()[0]) for v in values] == expected


async def test_what_the_broker_refuses_for_other_reasons_is_parked_too(
    database: str, sidings_kafka: str, topic
) -> None:
    strict = await topic("strict", config={"message.timestamp.before.max.ms": "60000"})
    compacted = await topic("compacted", config={"cleanup.policy": "compact"})
    async with (
        publishing(database) as (outbox, connection),
        relaying(database, sidings_kafka, metadata_seconds=5.0) as relay,
    ):
        async with connection.transaction():
            await connection.execute("SELECT sidings.publish_bytes($1, 'k', 'old', NULL, NULL, '2001-01-01')", strict)
            await connection.execute("SELECT sidings.publish_bytes($1, 'k', 'good')", strict)
            await connection.execute("SELECT sidings.publish_bytes($1, NULL, 'no key')", compacted)
            await connection.execute("SELECT sidings.publish_bytes($1, 'k', 'good')", compacted)
            await connection.execute("SELECT sidings.publish_bytes($1, 'k', 'bad headers', '7')", strict)
        await emptied(database)
        parked = {p.value: p.error for p in await outbox.parked()}
        assert set(parked) == {b"old", b"no key", b"bad headers"}
        assert "InvalidTimestamp" in parked[b"old"]
        assert "encoded" in parked[b"bad headers"]
        assert "a message without a key for a compacted topic" in parked[b"no key"]
        assert relay.metrics.count("failed") == 0, "no topic is to blame"
    assert [r.value for r in await records(sidings_kafka, strict)] == [b"good"]
    assert [r.value for r in await records(sidings_kafka, compacted)] == [b"good"]


async def test_what_is_refused_for_a_reason_that_the_client_does_not_know_is_parked_after_some_tries(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(kafka_errors, InvalidRecordError.errno)
    rows = await topic("rows", config={"cleanup.policy": "compact"})
    await publish(database, rows, [("k", b"1"), (None, b"no key"), ("k", b"2")])
    async with (
        publishing(database) as (outbox, _),
        relaying(database, sidings_kafka, metadata_seconds=5.0) as relay,
    ):
        await emptied(database)
        assert [(p.value, p.error) for p in await outbox.parked()] == [(b"no key", "[Error -1] UnknownError")]
        assert relay.metrics.count("failed") == 3
    assert [r.value for r in await records(sidings_kafka, rows)] == [b"1", b"2"]


async def test_a_partition_that_refuses_all_for_a_reason_that_the_client_does_not_know_is_waited_for(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose files a broker cannot write. After three tries all that waited for it was parked, one message after
    the other and round after round, without a pause."""
    send, broken = Sender.send, True

    async def refused(sender: Sender, batch: Any, topic: str, partition: int) -> "asyncio.Future[object]":
        if not (broken and partition == 1):
            return await send(sender, batch, topic, partition)
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        answer.set_exception(UnknownError())
        return answer

    monkeypatch.setattr(Sender, "send", refused)
    etas = await topic("etas", partitions=2)
    await publish(database, etas, numbered(0, 2_000))
    options: dict[str, Any] = {"max_backoff_seconds": 0.2, "topic_patience_seconds": None}
    async with publishing(database) as (outbox, _), relaying(database, sidings_kafka, **options) as relay:
        await eventually(lambda: relay.metrics.count("failed", etas) >= 6 or relay.metrics.count("parked", etas))
        assert await outbox.parked() == []
        assert [state.topic for state in await outbox.failing()] == [etas]
        broken = False
        await emptied(database)
        assert await outbox.parked() == []
    assert_complete(await records(sidings_kafka, etas), 2_000)


@pytest.mark.parametrize("first", [True, False])
async def test_several_that_are_refused_for_a_reason_that_the_client_does_not_know_are_parked_together(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Another one of their partition was sent: so that is not at fault. first: of all that wait, or the last."""
    monkeypatch.delitem(kafka_errors, InvalidRecordError.errno)
    rows = await topic("rows", config={"cleanup.policy": "compact"})
    bad: list[tuple[str | None, bytes | None]] = [(None, b"no key")] * 3
    await publish(database, rows, [*bad, ("k", b"1")] if first else [("k", b"1"), *bad])
    options: dict[str, Any] = {"max_backoff_seconds": 0.2, "topic_patience_seconds": None}
    async with publishing(database) as (outbox, _), relaying(database, sidings_kafka, **options):
        await emptied(database)
        assert [p.value for p in await outbox.parked()] == [b"no key"] * 3
    assert [r.value for r in await records(sidings_kafka, rows)] == [b"1"]


async def test_where_only_such_messages_wait_they_are_parked_when_the_patience_is_over_for_each(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they or their partition are at fault nothing tells, and nothing else may be held up for ever."""
    monkeypatch.delitem(kafka_errors, InvalidRecordError.errno)
    rows = await topic("rows", config={"cleanup.policy": "compact"})
    await publish(database, rows, [(None, b"1"), (None, b"2")])
    options: dict[str, Any] = {"max_backoff_seconds": 0.1, "topic_patience_seconds": 0.5}
    async with publishing(database) as (outbox, _), relaying(database, sidings_kafka, **options) as relay:
        await emptied(database)
        assert [p.value for p in await outbox.parked()] == [b"1", b"2"]
        assert relay.metrics.count("failed", rows) > 6, "there was a pause after each try"
        await publish(database, rows, [("k", b"3")])
        await emptied(database)
    assert [r.value for r in await records(sidings_kafka, rows)] == [b"3"]


async def test_messages_that_are_large_by_a_key_or_headers_are_parked_and_not_sent(
    database: str, sidings_kafka: str, topic
) -> None:
    """One of more than 100 MB, which SQL can store: its request broke the connection, again and again."""
    etas = await topic("etas")
    async with publishing(database) as (outbox, connection):
        for arguments in (
            "convert_to(repeat('k', 2000), 'UTF8'), 'key'",
            "'k', 'headers', json_build_object('h', repeat('v', 2000))",
            "'k', 'partition key', NULL, convert_to(repeat('k', 2000), 'UTF8')",
            "'k', 'good'",
        ):
            await connection.execute(f"SELECT sidings.publish_bytes($1, {arguments})", etas)
        async with relaying(database, sidings_kafka, max_message_bytes=1_024):
            await emptied(database)
        parked = {p.value: p.error for p in await outbox.parked()}
    assert set(parked) == {b"key", b"headers", b"partition key"}
    assert "a key of 2000, headers of 0, a partition key of 0, one of them more than max_message" in parked[b"key"]
    assert [r.value for r in await records(sidings_kafka, etas)] == [b"good"]


async def test_two_relays_share_the_slots_evenly_and_each_key_has_one(database: str, sidings_kafka: str, topic) -> None:
    etas = await topic("etas", partitions=4)
    async with relaying(database, sidings_kafka) as first:
        await eventually(lambda: len(first.held) == 16, "one relay takes all")
        async with relaying(database, sidings_kafka) as second:
            await eventually(lambda: len(first.held) == len(second.held) == 8, "half each")
            assert not first.held.keys() & second.held.keys()
            await publish(database, etas, [(f"k{n % 64}", b"%d" % n) for n in range(4_000)])
            await emptied(database)
            assert first.metrics.count("sent", etas) > 0
            assert second.metrics.count("sent", etas) > 0
        await eventually(lambda: len(first.held) == 16, "a clean stop gives its half back at once", 3.0)
    found = await records(sidings_kafka, etas)
    assert len(found) == 4_000
    assert firsts(found) == {b"k%d" % k: [b"%d" % n for n in range(k, 4_000, 64)] for k in range(64)}
    assert await value(database, "SELECT count(*) FROM sidings.outbox_relay") == 0


async def test_slots_move_between_relays_under_load_without_gap_or_disorder(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas", partitions=4)
    written = 0
    async with relaying(database, sidings_kafka):
        for _ in range(3):
            async with relaying(database, sidings_kafka) as other:
                while not other.held:
                    await publish(database, etas, [(f"k{n % 20}", b"%d" % n) for n in range(written, written + 200)])
                    written += 200
            await publish(database, etas, [(f"k{n % 20}", b"%d" % n) for n in range(written, written + 200)])
            written += 200
        await emptied(database)
    found = await records(sidings_kafka, etas)
    assert firsts(found) == {b"k%d" % k: [b"%d" % n for n in range(k, written, 20)] for k in range(20)}
    assert Counter(r.value for r in found).most_common(1)[0][1] == 1, "moving a slot repeats nothing"


async def test_publishing_and_the_relay_start_while_kafka_is_away(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with relaying(database, UNREACHABLE) as relay, publishing(database) as (outbox, connection):
        async with connection.transaction():
            receipt = await outbox.publish(connection, "etas", key="a", value=b"x")
        await eventually(lambda: "the relay's producer could not be connected" in caplog.text)
        with pytest.raises(TimeoutError):
            await outbox.published(receipt, timeout=0.3)
        assert relay.held == {}, "slots are for relays that can send"


async def test_what_waits_is_counted_also_while_no_relay_reaches_kafka(database: str) -> None:
    """None has any slot then, and each counted its own: nothing, for as long as the outage lasted."""
    await publish(database, "etas", [("a", b"x")] * 7)
    async with relaying(database, UNREACHABLE) as relay:
        await eventually(lambda: relay.metrics.waiting.get("etas", (0, 0))[0] == 7)
        assert relay.held == {}


async def test_what_no_relay_has_is_counted_by_one_at_a_time_and_the_others_tell_of_their_last_count(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While none reached Kafka, all instances counted the whole outbox, at once."""
    turn = "hashtextextended('sidings.outbox_waiting', 0)"
    metrics, time = OutboxMetrics("test", CollectorRegistry()), 0.0
    monkeypatch.setattr("sidings.kafka.outbox.figures.now", lambda: time)
    async with connected(database) as other:
        await other.execute(
            "INSERT INTO sidings.outbox (slot, topic, value) VALUES (3, 'etas', ''), (4, 'etas', ''), (4, 'others', '')"
        )
        link, mine, free = Link(PostgresSettings(dsn=database)), [3], [4, 5]
        figures = Figures(link, metrics, schema="sidings", seconds=5.0, slots=lambda: mine, free=lambda: free)

        async def counted() -> dict[str, int]:
            assert await figures.count() == 5.0
            return {topic: count for topic, (count, _) in metrics.waiting.items()}

        await other.execute(f"SELECT pg_advisory_lock({turn})")  # another relay is counting
        assert await counted() == {"etas": 1}
        await other.execute(f"SELECT pg_advisory_unlock({turn})")
        assert await counted() == {"etas": 2, "others": 1}
        await other.execute(f"SELECT pg_advisory_lock({turn})")
        await other.execute("DELETE FROM sidings.outbox")
        time += 10.0
        assert await counted() == {"etas": 1, "others": 1}, "who looks at the same moment sees nothing of it"
        time += 1.0
        assert await counted() == {}, "others have counted since"
        await other.execute(f"SELECT pg_advisory_unlock({turn})")
        await other.execute("INSERT INTO sidings.outbox (slot, topic, value) VALUES (4, 'etas', '')")
        assert await counted() == {"etas": 1}
        await other.execute(f"SELECT pg_advisory_lock({turn})")
        free.remove(4)
        assert await counted() == {}, "some relay has it, and counts it"
        await link.close()


async def test_a_commit_of_this_process_is_relayed_without_waiting_for_the_poll(
    database: str, sidings_kafka: str, topic
) -> None:
    """Nor is one of a connection that is not the service's, once somebody waits for what it has published."""
    etas = await topic("etas")
    service = a_service(database, sidings_kafka, outbox=OutboxSettings(poll_seconds=60.0))
    async with service:
        await eventually(lambda: len(service._parts.database.relay.held) == 16)
        for _ in range(3):  # the first one may still be found by a read of the start's
            async with service.transaction() as tx:
                await service.outbox.publish(tx, etas, key="a", value=b"x")
            await emptied(database)
        async with connected(database) as connection:
            async with connection.transaction():
                receipt = await service.outbox.publish(connection, etas, key="a", value=b"x")
            await service.outbox.published(receipt, timeout=10)


async def test_a_stopping_relay_sends_what_waits_first(database: str, sidings_kafka: str, topic) -> None:
    etas = await topic("etas")
    relay = a_relay(database, sidings_kafka, poll_seconds=60.0)
    await relay.start()
    await eventually(lambda: len(relay.held) == 16)
    await publish(database, etas, [(f"k{n}", b"x") for n in range(2_000)])
    await relay.stop()
    await relay.stop()
    assert await value(database, "SELECT count(*) FROM sidings.outbox") == 0
    assert len(await records(sidings_kafka, etas)) == 2_000
    assert await value(database, "SELECT count(*) FROM sidings.origin WHERE owner IS NOT NULL") == 0


async def test_a_relay_that_was_never_started_can_be_stopped(database: str, sidings_kafka: str) -> None:
    relay = a_relay(database, sidings_kafka)
    await relay.stop()
    await relay.stop()


async def test_nothing_of_a_relay_stays_when_its_stop_is_cancelled_again_and_again(
    database: str, sidings_kafka: str
) -> None:
    """As anyio's cancel scopes do. Its thread, producers and connections stayed, and no other stop ended them."""
    settings, prometheus, tasks = OutboxSettings(**FAST), CollectorRegistry(), asyncio.all_tasks()
    before = {*threading.enumerate()}  # the pool of an event loop that is closed goes with the garbage
    postgres, kafka = PostgresSettings(dsn=database), KafkaSettings(bootstrap=sidings_kafka)
    relay = Relay("test", postgres, kafka, settings, prometheus=prometheus)
    await relay.start()
    await eventually(lambda: len(relay.held) == 16)
    stopping = asyncio.create_task(relay.stop())
    await asyncio.sleep(0)
    while not stopping.done():
        stopping.cancel()
        await asyncio.sleep(0)
    assert stopping.cancelled()
    ours = "datname = current_database() AND application_name = 'sidings'"

    async def disconnected() -> bool:
        return await value(database, f"SELECT count(*) = 0 FROM pg_stat_activity WHERE {ours}")

    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("sidings") and t not in before]

    await eventually(lambda: not threads(), threads)
    await eventually(lambda: asyncio.all_tasks() == tasks, asyncio.all_tasks)
    await eventually(disconnected)
    assert list(prometheus.collect()) == []


async def test_the_relay_runs_alone_as_a_process_and_ends_cleanly_on_sigterm(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas")
    async with relay_process(database, sidings_kafka) as process:
        await publish(database, etas, [("a", b"x")])
        await emptied(database)
        assert await process.terminate() == 0
    assert await value(database, "SELECT count(*) FROM sidings.origin WHERE owner IS NOT NULL") == 0


async def test_waiting_messages_and_their_age_are_counted_by_topic(database: str, sidings_kafka: str, topic) -> None:
    missing = f"{await topic('etas')}-missing"
    async with relaying(database, sidings_kafka) as relay:
        await publish(database, missing, [(f"k{n}", b"x") for n in range(7)])
        await eventually(lambda: relay.metrics.waiting.get(missing, (0, 0))[0] == 7)
        await eventually(lambda: relay.metrics.waiting[missing][1] > 0.5)
        names = {sample.name for metric in relay.metrics.collect() for sample in metric.samples}
        assert "sidings_outbox_oldest_seconds" in names


async def test_a_long_transaction_does_not_make_reads_crawl_through_dead_entries(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas")
    async with connected(database) as old:
        transaction = old.transaction(isolation="repeatable_read")
        await transaction.start()
        await old.execute("CREATE TABLE public.holds_an_id ()")  # its snapshot keeps vacuum from removing anything
        async with relaying(database, sidings_kafka) as relay:
            for _ in range(4):
                await publish(database, etas, [(f"k{n}", b"x") for n in range(5_000)])
                await emptied(database)
            await reads_little(database, relay)
        await transaction.rollback()


async def test_messages_that_are_not_committed_yet_are_passed_and_sent_when_they_are(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read stepped over all of them, 0.6 s for a million, while it kept all others waiting."""
    monkeypatch.setattr(reader, "_STEPPING_READ", -1.0)
    etas = await topic("etas", partitions=3)
    async with relaying(database, sidings_kafka) as relay, publishing(database) as (outbox, slow):
        async with slow.transaction():
            for value in (b"1", b"2"):
                await outbox.publish_many(slow, etas, [(f"k{n}", value) for n in range(10_000)])
            drawn = await slow.fetchval("SELECT last_value FROM sidings.outbox_id")
            await eventually(lambda: min((s.high for s in relay.backlog.slots.values()), default=0) >= drawn)
            await reads_little(database, relay)
        await emptied(database)
    found = firsts(await records(sidings_kafka, etas))
    assert found == {b"k%d" % n: [b"1", b"2"] for n in range(10_000)}


async def test_a_refill_does_not_step_over_all_that_waits_for_another_topic(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a topic that failed had few messages among four million of another one's, each try of it read all of these
    in all slots, for longer than a call may take: nothing else was sent meanwhile."""
    monkeypatch.setattr(reader, "_LOOKED_AT", 2_000)
    await few_behind_many(database, a_relay(database, "localhost:1"), read=True)


async def test_a_read_does_not_step_over_all_that_waits_for_a_topic_that_fails(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a relay has just started, or acquired slots: nothing else was sent for 2 s for each million."""
    monkeypatch.setattr(reader, "_LOOKED_AT", 2_000)
    await few_behind_many(database, a_relay(database, "localhost:1"), read=False)


async def few_behind_many(database: str, relay: Relay, *, read: bool) -> None:
    """The last message comes, where all before it are another topic's, which fails. read: all were read already."""
    backlog, slot = relay.backlog, Slot(0, "outbox/0", 1)
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.outbox (slot, topic, value) SELECT 0, 'many', 'x' FROM generate_series(1, 100000); "
            "INSERT INTO sidings.outbox (slot, topic, value) VALUES (0, 'few', 'y')"
        )
        await connection.execute("ANALYZE sidings.outbox")
        last = await connection.fetchval("SELECT max(id) FROM sidings.outbox")
    backlog.add_slot(slot)
    backlog.lane("many").paused = True
    if read:
        slot.high = last
        for topic in ("many", "few"):
            backlog.lane(topic).behind[slot] = 0
    reads = 0
    try:
        while not backlog.lane("few").queue:
            await reads_little(database, relay)
            plan = relay.reader._plan()
            rows = await relay.reader._link.fetch(relay.reader._sql, *relay.reader._arguments(plan))
            relay.reader._deliver(plan, rows, passing=False)
            reads += 1
            assert backlog.lane("few").queue or relay.reader.hungry()
    finally:
        await relay.reader._link.close()
    assert [row[0] for row in backlog.lane("few").queue] == [last]
    assert reads <= 51


async def reads_little(database: str, relay: Relay) -> None:
    """The relay's next read."""
    async with connected(database) as looking:
        rows = await looking.fetch(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT TEXT) " + relay.reader._sql,
            *relay.reader._arguments(relay.reader._plan()),
        )
    lines = [row[0] for row in rows]
    touched = max(int(line.split("shared hit=")[1].split()[0]) for line in lines if "shared hit=" in line)
    assert touched < 500, "\n".join(lines)


async def test_the_producer_sends_at_once_without_postgres(sidings_kafka: str, topic) -> None:
    etas = await topic("etas", partitions=3, config={"max.message.bytes": "2000"})
    async with sending(sidings_kafka, delivery_seconds=10, metadata_seconds=2.0) as producer:
        for n in range(20):
            await producer.send(etas, key="a", value=b"%d" % n, headers={"h": "v"})
        with pytest.raises(InvalidMessage, match="refused"):
            await producer.send(etas, key="a", value=b"x" * 5_000)
        await producer.send(etas, key="a", value=b"after the refusal")
        with pytest.raises(NotPublished, match="does not exist"):
            await producer.send(f"{etas}-missing", key="a", value=b"x")
        await producer.send(etas, key="a", value=None)
    with pytest.raises(KafkaUnavailable):
        await producer.send(etas, key="a", value=b"x")
    found = await records(sidings_kafka, etas)
    assert [r.value for r in found] == [*(b"%d" % n for n in range(20)), b"after the refusal", None]
    assert dict(found[0].headers)["h"] == b"v"


async def test_a_setting_sends_a_topic_directly_without_a_change_of_the_code(
    database: str, sidings_kafka: str, topic
) -> None:
    etas = await topic("etas")
    async with sending(sidings_kafka) as producer:
        outbox = Outbox(PostgresSettings(dsn=database), OutboxSettings(routes={etas: "direct"}), direct=producer)
        try:
            receipt = await outbox.publish(None, etas, key="a", value=b"x")
            await outbox.published(receipt, timeout=1)
        finally:
            await outbox.close()
    assert len(await records(sidings_kafka, etas)) == 1
    assert await value(database, "SELECT count(*) FROM sidings.outbox") == 0


async def test_what_is_sent_directly_waits_for_nothing_that_is_in_the_outbox(
    database: str, sidings_kafka: str, topic
) -> None:
    """As the guide says, with the remedy: let that leave before."""
    etas = await topic("etas")
    async with sending(sidings_kafka) as producer:
        direct = Outbox(PostgresSettings(dsn=database), OutboxSettings(routes={etas: "direct"}), direct=producer)
        for first in (False, True):
            await publish(database, etas, [("a", b"before")])
            if first:
                async with relaying(database, sidings_kafka):
                    await emptied(database)
            await direct.publish(None, etas, key="a", value=b"after")
            async with relaying(database, sidings_kafka):
                await emptied(database)
        await direct.close()
    assert [r.value for r in await records(sidings_kafka, etas)] == [b"after", b"before", b"before", b"after"]


def test_the_documentation_lists_all_metrics_of_the_relay() -> None:
    table = Path(__file__).parent.parent.joinpath("docs/outbox.md").read_text().partition("## Metrics")[2]
    documented = set(re.findall(r"^\| `(sidings_outbox_\w+?)(?:_total)?` \|", table, re.MULTILINE))
    assert documented == {metric.name for metric in OutboxMetrics("test", CollectorRegistry()).collect()}
