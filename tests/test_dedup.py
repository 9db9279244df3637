"""Repeats at new offsets change nothing, wherever the first message is by then: handled, parked, held, in the batch."""

import asyncio
import logging
from collections.abc import Iterable

import asyncpg
import pytest
from sidings import ConfigurationError, Discard, Message, Retry, Transaction
from sidings.kafka.outbox import MESSAGE_ID
from sidings.kafka.seen import short_id
from tenacity import stop_after_attempt, wait_fixed

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    as_json,
    numbers,
    offset_reaches,
    produce,
    producing,
    record,
    sample,
    stored_offsets,
)
from .support import SECONDS, a_role, connected, drained, eventually, fetch, value


async def send(
    bootstrap: str,
    topic: str,
    messages: Iterable[tuple[int | bytes, str | None]],
    *,
    key: bytes | None = b"k",
    partition: int = 0,
    header: str = MESSAGE_ID,
) -> None:
    """Send (number, id) pairs, in order, to one partition."""
    async with producing(bootstrap) as producer:
        for content, id in messages:
            raw = as_json(content) if isinstance(content, int) else content
            headers = [] if id is None else [(header, id.encode())]
            sent = producer.send_and_wait(topic, raw, key=key, partition=partition, headers=headers)
            await asyncio.wait_for(sent, SECONDS)


def duplicates(service) -> float:
    return sample(service, "sidings_consumer_messages_total", result="duplicate")


async def test_only_the_first_of_messages_with_one_id_is_handled(effects, topic, sidings_kafka):
    """In one batch, in a later one, after a restart, in another partition."""
    name = await topic(partitions=2)

    def another():
        service = a_service(effects, sidings_kafka)
        service.consumer(name, model=Number, dedup=True)(record)
        return service

    await send(sidings_kafka, name, [(1, "a"), (2, "b"), (1, "a"), (3, "c"), (2, "b")])
    first = another()
    async with first:
        await eventually(offset_reaches(effects, name, 5))
        await eventually(lambda: duplicates(first) == 2)
        await send(sidings_kafka, name, [(3, "c"), (4, "d")])
        await eventually(offset_reaches(effects, name, 7))
        await send(sidings_kafka, name, [(4, "d"), (5, "e")], partition=1)
        await eventually(offset_reaches(effects, name, 2, 1))
        await eventually(lambda: duplicates(first) == 4)
        await eventually(lambda: sample(first, "sidings_consumer_messages_total", result="handled") == 5)
    second = another()
    await send(sidings_kafka, name, [(5, "e"), (1, "a"), (6, "f")])
    async with second:
        await eventually(offset_reaches(effects, name, 10))
        await eventually(lambda: duplicates(second) == 2)
    assert await numbers(effects) == [1, 2, 3, 4, 5, 6]


async def test_a_list_handler_gets_no_repeats(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    seen: list[int] = []

    @service.consumer(name, batch=100, dedup=True)
    async def handle(messages: list[Message[Number]], tx: Transaction) -> None:
        seen.extend(message.value.n for message in messages)

    await send(sidings_kafka, name, [(1, "a"), (1, "a"), (2, "b"), (1, "a")])
    await send(sidings_kafka, name, [(2, "b")] * 3)
    async with service:
        await eventually(offset_reaches(effects, name, 7))
    assert seen == [1, 2]


async def test_a_lock_on_the_ids_is_told_of_until_it_is_over(effects, topic, sidings_kafka, monkeypatch):
    """As that of a `VACUUM FULL`. Messages were put off each second without a word, as for another one with their id,
    and `/health` was good."""
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.5)
    name = await topic()
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number, dedup=True)(record)

    def told() -> bool:
        return "holds a lock on message_seen" in str(service.problems())

    async with service, connected(effects) as other:
        await send(sidings_kafka, name, [(1, "a")])
        await eventually(offset_reaches(effects, name, 1))
        async with other.transaction():
            await other.execute("LOCK TABLE sidings.message_seen")
            await send(sidings_kafka, name, [(2, "b")])
            await eventually(told, service.problems)
        await eventually(offset_reaches(effects, name, 2))
        await eventually(lambda: service.problems() == [], service.problems)
        assert sample(service, "sidings_consumer_failures_total") == 0
    assert await numbers(effects) == [1, 2]


@pytest.mark.parametrize("by", ["header", "function"])
async def test_the_id_may_stand_elsewhere(effects, topic, sidings_kafka, by):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    dedup = "ce_id" if by == "header" else (lambda message: str(message.value.n))
    service.consumer(name, model=Number, dedup=dedup)(record)
    await send(sidings_kafka, name, [(1, "a"), (1, "a"), (2, "b")], header="ce_id")
    async with service:
        await eventually(offset_reaches(effects, name, 3))
    assert await numbers(effects) == [1, 2]


async def test_what_our_outbox_sends_again_is_told_by_its_id(effects, topic, sidings_kafka):
    """A relay that dies after Kafka has the message, and before the outbox knows: its successor sends it again."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number, dedup=True)(record)
    async with service:
        async with service.transaction() as tx:
            await service.outbox.publish(tx, name, key="k", value=Number(n=1))
            kept = dict((await tx.fetch("SELECT * FROM sidings.outbox"))[0])
        await eventually(offset_reaches(effects, name, 1))
        async with connected(effects) as connection:
            columns = ", ".join(f'"{column}"' for column in kept)
            places = ", ".join(f"${place}" for place in range(1, len(kept) + 1))
            again = f"INSERT INTO sidings.outbox ({columns}) VALUES ({places}) ON CONFLICT DO NOTHING"

            async def is_gone() -> bool:
                return await connection.fetchval("SELECT count(*) FROM sidings.outbox") == 0

            await eventually(is_gone)
            # Its transaction is long visible: a relay finds it when it reads all anew, as after a takeover.
            await connection.execute(again, *kept.values())
    successor = a_service(effects, sidings_kafka)
    successor.consumer(name, model=Number, dedup=True)(record)
    async with successor:
        await eventually(offset_reaches(effects, name, 2))
        await eventually(lambda: duplicates(successor) == 1)
    assert await numbers(effects) == [1]


async def test_messages_without_an_id_are_handled_and_told_of(effects, topic, sidings_kafka, caplog):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number, dedup=True)(record)
    await send(sidings_kafka, name, [(1, None), (1, None), (2, "")])
    async with service:
        await eventually(offset_reaches(effects, name, 3))
    assert await numbers(effects) == [1, 1, 2]
    assert caplog.text.count("a message without an id, whose repeats cannot be told") == 1


async def test_a_repeat_of_a_parked_message_changes_nothing(effects, topic, sidings_kafka):
    """Not while it waits, and not when it has run; the key's other messages are parked behind it as ever."""
    name = await topic(partitions=2)
    service = a_service(effects, sidings_kafka)
    healed = asyncio.Event()

    @service.consumer(name, retry=TWICE_AND_PARK, dedup=True)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 1 and not healed.is_set():
            raise ValueError("not yet")
        await record(message, tx)

    service.registry.get(f"message:{name}").retry = Retry(wait=wait_fixed(0.05))
    await send(sidings_kafka, name, [(1, "a"), (1, "a"), (2, "b"), (2, "b")])
    async with service:
        await eventually(offset_reaches(effects, name, 4))
        await eventually(lambda: duplicates(service) == 2)
        assert await value(effects, "SELECT count(*) FROM sidings.job") == 2
        await send(sidings_kafka, name, [(1, "a")], partition=1)  # where its key is not parked
        await eventually(offset_reaches(effects, name, 1, 1))
        healed.set()
        await drained(effects)
        await send(sidings_kafka, name, [(1, "a"), (2, "b"), (3, "c")])
        await eventually(offset_reaches(effects, name, 7))
        await eventually(lambda: duplicates(service) == 5)
    assert await numbers(effects) == [1, 2, 3]


async def test_a_repeat_that_is_handled_while_the_first_one_fails_counts_for_both(effects, topic, sidings_kafka):
    """The first message is tried alone, and its transaction with its id is undone: the repeat in another partition
    runs, and then the first one is the repeat."""
    name = await topic(partitions=2)
    service = a_service(effects, sidings_kafka)
    failed = asyncio.Event()

    @service.consumer(name, retry=Retry(wait=wait_fixed(0.05)), dedup=True)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)
        if message.partition == 0 and message.value.n == 1:
            failed.set()
            raise ValueError("never here")

    await send(sidings_kafka, name, [(0, "z"), (1, "a"), (2, "b")])
    async with service:
        await asyncio.wait_for(failed.wait(), SECONDS)
        await send(sidings_kafka, name, [(1, "a")], partition=1)
        await eventually(offset_reaches(effects, name, 1, 1))
        await eventually(offset_reaches(effects, name, 3))
        await eventually(lambda: duplicates(service) == 1)
    assert await numbers(effects, "partition = 0") == [0, 2]
    assert await numbers(effects, "partition = 1") == [1]


async def test_a_message_whose_repeat_was_handled_before_it_could_be_parked_is_the_repeat(
    effects, topic, sidings_kafka
):
    """The repeat waits for the end of the last attempt's transaction, and so comes before the one that parks."""
    name = await topic(partitions=2)
    service = a_service(effects, sidings_kafka)
    tries, alone = 0, asyncio.Event()

    async def waits() -> bool:
        sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return await value(effects, sql) == 1

    @service.consumer(name, retry=Retry(wait=wait_fixed(0), stop=stop_after_attempt(1)), dedup=True)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal tries
        await record(message, tx)
        if message.partition == 0:
            tries += 1
            if tries == 2:  # the first was in the main line
                alone.set()
                await eventually(waits)
            raise ValueError("never here")

    await send(sidings_kafka, name, [(1, "a")])
    async with service:
        await asyncio.wait_for(alone.wait(), SECONDS)
        await send(sidings_kafka, name, [(1, "a")], partition=1)
        await eventually(offset_reaches(effects, name, 1, 1))
        await eventually(offset_reaches(effects, name, 1))
        await eventually(lambda: duplicates(service) == 1)
    assert await numbers(effects) == [1]
    assert await value(effects, "SELECT count(*) FROM sidings.job") == 0


async def test_a_batch_that_ends_early_loses_nothing_of_its_rest(effects, topic, sidings_kafka):
    name = await topic()
    settings = {
        "fetch_seconds": 0.05,
        "batch_seconds": 0.000001,
    }  # one message a transaction, whatever has been fetched
    service = a_service(effects, sidings_kafka, settings=settings)
    service.consumer(name, model=Number, dedup=True)(record)
    await send(sidings_kafka, name, [*((n, str(n)) for n in range(5)), (2, "2"), (5, "5")])
    async with service:
        await eventually(offset_reaches(effects, name, 7))
        await eventually(lambda: sample(service, "sidings_consumer_batch_messages_count") > 1)
        await eventually(lambda: duplicates(service) == 1)
    assert await numbers(effects) == [0, 1, 2, 3, 4, 5]


async def test_an_id_counts_only_once_its_message_was_come_to(effects, topic, sidings_kafka):
    """Its record may be gone before it is delivered again, as where the topic is made anew and filled again, a log is
    cut off, or compaction keeps a later one: that one, all that is left, passed for its repeat, and was lost."""
    name = await topic()
    settings = {"fetch_seconds": 0.05, "batch_seconds": 0.000001}
    first = a_service(effects, sidings_kafka, settings=settings)
    recorded = "SELECT count(DISTINCT id) FROM sidings.message_seen"

    @first.consumer(name, model=Number, dedup=True, retry=Retry(wait=wait_fixed(600)))
    async def only_the_first(message: Message[Number], tx: Transaction) -> None:
        if message.value.n > 0:
            raise ValueError("never here")
        await record(message, tx)

    await send(sidings_kafka, name, [(n, str(n)) for n in range(5)])
    async with first:
        await eventually(offset_reaches(effects, name, 1))
    assert await value(effects, recorded) == 1
    await send(sidings_kafka, name, [(n, str(n)) for n in range(5)])
    second = a_service(effects, sidings_kafka, settings=settings)
    second.consumer(name, model=Number, dedup=True)(record)
    await second.reset_offsets(name, 5, partitions=[0], actor="alice")  # 1 to 4 are delivered no more
    async with second:
        await eventually(offset_reaches(effects, name, 10))
        await eventually(lambda: duplicates(second) == 1)
    assert await numbers(effects) == [0, 1, 2, 3, 4]
    assert await value(effects, recorded) == 5


async def test_slow_handlers_record_few_ids_that_they_do_not_come_to(effects, topic, sidings_kafka):
    """Else each of these transactions would record, and take back, the ids of all that was fetched."""
    name = await topic()
    settings = {"fetch_seconds": 0.05, "batch_seconds": 0.000001}
    service = a_service(effects, sidings_kafka, settings=settings)
    sizes: list[int] = []

    @service.consumer(name, model=Number, batch=10, dedup=True)
    async def handle(messages: list[Message[Number]], tx: Transaction) -> None:
        sizes.append(len(messages))

    await send(sidings_kafka, name, [(n, str(n)) for n in range(200)])
    async with service:
        await eventually(offset_reaches(effects, name, 200))
    inserted = "SELECT max(n_tup_ins)::int FROM pg_stat_user_tables WHERE relname LIKE 'message\\_seen\\_%'"

    others = (  # which count what they have inserted at their end, at the latest
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' "
        "AND datname = current_database() AND pid <> pg_backend_pid()"
    )

    async def all_counted() -> bool:
        return not await value(effects, others)

    await eventually(all_counted)
    rows = await value(effects, inserted)
    assert 200 <= rows < 200 + 200 + 19 * 10  # the first fetch, and a list beside each: not 2,100
    assert sizes == [10] * 20


async def test_a_message_that_another_instance_was_recording_and_did_not_come_to_is_handled(
    effects, topic, sidings_kafka
):
    """As over a rebalance, where the former owner, of an earlier release, ends its batch early and takes no id back."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number, dedup=True)(record)
    await send(sidings_kafka, name, [(1, "a"), (2, "b"), (1, "a")])
    ids = [short_id(name, b"b"), short_id(name, b"a")]
    async with connected(effects) as owner:
        await owner.execute("SELECT sidings.maintain_seen(7)")
        transaction = owner.transaction()
        await transaction.start()
        await owner.execute("SELECT sidings.record_seen($1, '{0, 0}', '{1, 0}')", ids)
        async with service:
            await eventually(lambda: somebody_waits_for_another(effects))
            await transaction.commit()
            await eventually(offset_reaches(effects, name, 3))
            await eventually(lambda: duplicates(service) > 0)
            assert duplicates(service) == 1
    assert await numbers(effects) == [1, 2]


async def somebody_waits_for_another(dsn: str) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'transactionid'"
    return await value(dsn, query) > 0


async def test_isolated_undecodable_and_discarded_messages_are_kept_once(effects, topic, sidings_kafka, caplog):
    isolated, plain = await topic("isolated"), await topic("plain")
    service = a_service(effects, sidings_kafka)
    service.consumer(isolated, model=Number, dedup=True, isolate=True)(record)

    @service.consumer(plain, model=Number, dedup=True, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        raise Discard("all but garbage")

    await send(sidings_kafka, isolated, [(1, "a"), (1, "a"), (2, "b")])
    await send(sidings_kafka, plain, [(b"garbage", "a"), (b"garbage", "a"), (3, "c"), (3, "c")])
    async with service:
        await eventually(offset_reaches(effects, isolated, 3))
        await eventually(offset_reaches(effects, plain, 4))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="held") == 1)
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="discarded") == 1)
        await eventually(lambda: duplicates(service) == 3)
        held = "SELECT count(*) FROM sidings.job WHERE held IS NOT NULL"

        async def done() -> bool:
            return await value(effects, held) == await value(effects, "SELECT count(*) FROM sidings.job") == 1

        await eventually(done)
    assert await numbers(effects) == [1, 2]
    assert caplog.text.count("cannot be decoded, and is kept as a held job: ") == 1


async def test_an_id_is_of_its_topic_alone(effects, topic, sidings_kafka):
    """One event may be published to two."""
    one, other = await topic("one"), await topic("other")
    service = a_service(effects, sidings_kafka)
    for name in (one, other):
        service.consumer(name, model=Number, dedup=True)(record)
    await send(sidings_kafka, one, [(1, "a"), (2, "b")])
    await send(sidings_kafka, other, [(3, "b"), (4, "a")])  # elsewhere: at one place both would be the same message
    async with service:
        await eventually(offset_reaches(effects, one, 2))
        await eventually(offset_reaches(effects, other, 2))
    assert sorted(await numbers(effects)) == [1, 2, 3, 4]


async def test_an_id_with_half_of_a_character_is_one(effects, topic, sidings_kafka):
    """`json.loads` takes it, and so may a decoder."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    ids = ["\ud800", "\ud800", "\ud801", "\ud83d\ude00"]
    service.consumer(name, model=Number, dedup=lambda message: ids[message.value.n])(record)
    await produce(sidings_kafka, name, range(4))
    async with service:
        await eventually(offset_reaches(effects, name, 4))
    assert await numbers(effects) == [0, 2, 3]


async def test_a_function_that_fails_loses_no_message(effects, topic, sidings_kafka, caplog):
    name = await topic()
    service = a_service(effects, sidings_kafka)

    class Odd:
        def __repr__(self) -> str:
            return "\0 \ud800"  # neither of which Postgres takes

    given = {1: "a", 2: Odd()}
    service.consumer(name, model=Number, dedup=lambda message: given[message.value.n])(record)
    caplog.set_level(logging.ERROR)
    await send(sidings_kafka, name, [(1, None), (2, None), (3, None)])
    async with service:
        await eventually(offset_reaches(effects, name, 3))
    reasons = [row["held"] for row in await fetch(effects, "SELECT held FROM sidings.job ORDER BY id")]
    assert r"dedup= returned \0 \ud800: it must be str, bytes or None" in reasons[0]
    assert "dedup= failed: KeyError: 3" in reasons[1]
    assert await numbers(effects) == [1]


async def test_repeats_across_a_rebalance_change_nothing(effects, topic, sidings_kafka):
    """Messages and their repeats keep coming in several partitions, while the first of two instances leaves."""
    name = await topic(partitions=4)
    settings = {"fetch_seconds": 0.05, "session_seconds": 2, "rebalance_seconds": 5, "max_records": 20}

    def an_instance():
        service = a_service(effects, sidings_kafka, settings=settings)
        service.consumer(name, model=Number, dedup=True)(record)
        return service

    async def keep_sending() -> int:
        """Each message, and its repeat in the next partition; returns how many there were."""
        async with producing(sidings_kafka) as producer:
            n = 0
            while not enough.is_set():
                for partition in (n, n + 1, n):
                    await producer.send(
                        name, as_json(n), partition=partition % 4, headers=[(MESSAGE_ID, str(n).encode())]
                    )
                n += 1
                await asyncio.sleep(0.002)
            await producer.flush()
            return n

    enough = asyncio.Event()
    sending = asyncio.create_task(keep_sending())
    first, second = an_instance(), an_instance()
    async with second:
        async with first:
            await eventually(lambda: second._life.consumer.joined and first._life.consumer.joined)
            await eventually(
                lambda: (
                    len(first._life.consumer._stored.partitions) == len(second._life.consumer._stored.partitions) == 2
                )
            )
            at = sum((await stored_offsets(effects)).values())

            async def goes_on() -> bool:
                return sum((await stored_offsets(effects)).values()) > at + 100

            await eventually(goes_on)
        await eventually(lambda: len(second._life.consumer._stored.partitions) == 4)
        enough.set()
        count = await asyncio.wait_for(sending, SECONDS)

        async def all_read() -> bool:
            return sum((await stored_offsets(effects)).values()) == 3 * count

        await eventually(all_read)
    assert sorted(await numbers(effects)) == list(range(count))


async def test_days_are_made_ahead_and_old_ones_dropped_while_a_consumer_runs(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "dedup_days": 3})
    service.consumer(name, model=Number, dedup=True)(record)
    day = "SELECT sidings.make_seen_day((now() AT TIME ZONE 'UTC')::date - $1::int)"
    for ago in (3, 4, 5):
        await value(effects, day, ago)
    days = (
        # Joined: as a regclass, a day that is dropped meanwhile would be told by its number.
        "SELECT array_agg(to_date(right(relname, 8), 'YYYYMMDD') - (now() AT TIME ZONE 'UTC')::date) "
        "FROM pg_inherits JOIN pg_class ON oid = inhrelid WHERE inhparent = 'sidings.message_seen'::regclass"
    )

    async def maintained() -> bool:
        return set(await value(effects, days)) - {-1} == {-3, 0, 1, 2}  # yesterday's in the first hour of a day

    async with service:
        await eventually(maintained)


async def test_the_ids_of_before_are_dropped_once_no_consumer_asks_for_them(effects, topic, sidings_kafka):
    """With the last `dedup=` the upkeep had gone: they stayed for ever."""
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "dedup_days": 3})
    service.consumer(await topic(), model=Number)(record)
    for ago in (4, 5, 6, 9):
        await value(effects, "SELECT sidings.make_seen_day((now() AT TIME ZONE 'UTC')::date - $1::int)", ago)
    days = "SELECT count(*) = 0 FROM pg_inherits WHERE inhparent = 'sidings.message_seen'::regclass"
    async with service:
        await eventually(lambda: value(effects, days))


async def test_a_role_that_owns_no_tables_can_tell_repeats(effects, topic, sidings_kafka):
    """Only the owner can make the table of a day, and nobody has made that of today yet: each message failed."""
    name = await topic()
    await send(sidings_kafka, name, [(1, "a"), (2, "b"), (1, "a")])
    async with a_role(effects) as (role, dsn):
        async with connected(effects) as admin:
            await admin.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
            await admin.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}")
        service = a_service(dsn, sidings_kafka)
        service.consumer(name, model=Number, dedup=True, retry=TWICE_AND_PARK)(record)
        async with service:
            await eventually(offset_reaches(effects, name, 3))
        async with connected(dsn) as its:  # it can make no others
            with pytest.raises(asyncpg.InsufficientPrivilegeError, match="is none to make now"):
                await its.execute("SELECT sidings.make_seen_day('3000-01-01')")
    assert await numbers(effects) == [1, 2]


def test_wrong_declarations_are_refused_with_the_remedy():
    service = a_service("postgresql://localhost/nowhere", "127.0.0.1:1")
    for options, text in [
        ({"dedup": ""}, "dedup=''"),
        ({"dedup": 3}, "dedup=3"),
        ({"dedup": True, "timeout": None}, "timeout=None with dedup="),
        ({"dedup": True, "timeout": 3_600}, "give at most 1800 s"),
        ({"max_waiting": 0}, "max_waiting=0"),
    ]:
        with pytest.raises(ConfigurationError, match=text):
            service.consumer("topic", model=Number, **options)(record)
