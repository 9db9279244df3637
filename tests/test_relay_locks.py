"""What somebody else's open transaction keeps locked holds up as little as can be, and `/health` says so."""

import asyncio

import pytest
from sidings.devstack.topics import create_topic, delete_topics
from sidings.errors import Busy, PostgresUnavailable
from sidings.kafka.outbox import Relay, relay

from .outbox_support import emptied, publish, publishing, records, relaying
from .support import SECONDS, connected, eventually, fetch


@pytest.fixture(autouse=True)
def told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_HELD_UP_SECONDS", 4.0)


def told_of(relay: Relay, words: str) -> bool:
    return any(words in problem for problem in relay.held_up())


@pytest.mark.long
async def test_a_message_that_is_locked_holds_up_no_others(database: str, sidings_kafka: str, topic) -> None:
    """All that was acknowledged was deleted in one statement, which failed for ever; when the window was full, nothing
    was sent any more, and nothing was wrong in `/health`."""
    etas, other = await topic("etas"), await topic("other")
    too_large = "SELECT sidings.publish_bytes($1, 'k', convert_to(repeat('x', 2000), 'UTF8'))"
    await publish(database, etas, [("a", b"1"), ("b", b"1")])
    await fetch(database, too_large, etas)
    async with connected(database) as person, publishing(database) as (outbox, _):
        ending = person.transaction()
        await ending.start()
        await person.execute("SELECT FROM sidings.outbox WHERE key <> 'b' FOR UPDATE")
        async with relaying(database, sidings_kafka, window=100, batch_size=50, max_message_bytes=1_024) as sender:
            for number in range(5):
                await publish(database, other, [(f"k{n}", b"%d" % number) for n in range(100)])
                await emptied(database, other)
            await publish(database, etas, [("a", b"2")])
            await eventually(lambda: told_of(sender, "keeps messages locked"))
            assert sender.problems() == []
            left = await fetch(database, "SELECT key FROM sidings.outbox")
            assert sorted(row["key"] for row in left) == [b"a", b"a", b"k"]
            await ending.rollback()
            await emptied(database)
            assert [len(p.value or b"") for p in await outbox.parked()] == [2_000]
            await eventually(lambda: sender.held_up() == [])
    found = await records(sidings_kafka, etas)
    assert sorted((r.key, r.value) for r in found) == [(b"a", b"1"), (b"a", b"2"), (b"b", b"1")]


@pytest.mark.chaos
async def test_a_message_that_is_locked_is_sent_again_before_those_behind_it(
    database: str, sidings_kafka: str, topic
) -> None:
    """By another relay: of its key only the locked one was left, and came behind newer ones, as the last."""
    etas = await topic("etas")
    await publish(database, etas, [("a", b"1"), ("b", b"1"), (None, b"1")])
    async with connected(database) as person:
        ending = person.transaction()
        await ending.start()
        await person.execute("SELECT FROM sidings.outbox WHERE key = 'a' OR key IS NULL FOR UPDATE")
        async with relaying(database, sidings_kafka) as sender:
            await eventually(lambda: told_of(sender, "keeps messages locked"))
            await publish(database, etas, [("a", b"2"), ("a", b"3"), ("b", b"2"), (None, b"2")])

            async def left() -> bool:
                rows = await fetch(database, "SELECT key, value FROM sidings.outbox ORDER BY id")
                return [tuple(row) for row in rows] == [(b"a", b"1"), (None, b"1"), (b"a", b"2"), (b"a", b"3")]

            await eventually(left)
        await ending.rollback()
    async with relaying(database, sidings_kafka):
        await emptied(database)
    assert [r.value for r in await records(sidings_kafka, etas) if r.key == b"a"] == [b"1", b"2", b"3"] * 2


@pytest.mark.chaos
async def test_a_message_that_is_locked_holds_up_no_others_when_its_topic_fails(database: str, own_kafka) -> None:
    """Until all that Kafka had was deleted, nothing more of the topic was sent."""
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "etas", partitions=1)
    await publish(database, "etas", [("a", b"1")])
    async with connected(database) as person:
        ending = person.transaction()
        await ending.start()
        await person.execute("SELECT FROM sidings.outbox FOR UPDATE")
        async with relaying(database, kafka.bootstrap, delivery_seconds=3) as sender:
            await eventually(lambda: told_of(sender, "keeps messages locked"))
            await asyncio.to_thread(kafka.pause)
            await publish(database, "etas", [("b", b"1"), ("a", b"2")])
            await asyncio.sleep(4.5)  # the round has failed by now
            await asyncio.to_thread(kafka.resume)
            await publish(database, "etas", [("b", b"2"), ("a", b"3")])

            async def left() -> bool:
                rows = await fetch(database, "SELECT key, value FROM sidings.outbox ORDER BY id")
                return [tuple(row) for row in rows] == [(b"a", b"1"), (b"a", b"2"), (b"a", b"3")]

            await eventually(left)
            await publish(database, "etas", [("b", b"3")])
            await eventually(left)
            await ending.rollback()
            await emptied(database)
    found = [(r.key, r.value) for r in await records(kafka.bootstrap, "etas")]
    for key in (b"a", b"b"):
        values = [value for k, value in found if k == key]
        assert list(dict.fromkeys(values)) == [b"1", b"2", b"3"]
        assert values[-1] == b"3"


@pytest.mark.long
async def test_a_message_that_is_locked_does_not_keep_its_slot_from_another_relay(
    database: str, sidings_kafka: str, topic
) -> None:
    """A slot that is given away is read no more: until the message was locked no longer, nothing of it was sent."""
    etas = await topic("etas")
    keys = [f"k{n}" for n in range(64)]
    await publish(database, etas, [(key, b"1") for key in keys])
    async with connected(database) as person:
        ending = person.transaction()
        await ending.start()
        await person.execute("SELECT FROM sidings.outbox WHERE key < 'k2' FOR UPDATE")
        async with relaying(database, sidings_kafka) as sender:
            await eventually(lambda: told_of(sender, "keeps messages locked"))
            async with relaying(database, sidings_kafka) as other:
                await eventually(lambda: len(other.held) == 8)
                await publish(database, etas, [(key, b"2") for key in keys])

                async def left() -> bool:
                    rows = await fetch(database, "SELECT key, value FROM sidings.outbox WHERE key >= 'k2'")
                    return not rows

                await eventually(left)
                await ending.rollback()
                await emptied(database)
    found = [(r.key, r.value) for r in await records(sidings_kafka, etas)]
    for key in keys:
        assert [v for k, v in found if k == key.encode()][-1] == b"2"


async def test_a_message_that_is_locked_keeps_no_others_of_a_missing_topic_from_being_parked(
    database: str, sidings_kafka: str, topic
) -> None:
    """None was parked, for as long as the transaction lasted, and each try held up what other topics had to record."""
    missing = f"{await topic('etas')}-missing"
    await publish(database, missing, [(key, b"1") for key in "abc"])
    async with connected(database) as person, publishing(database) as (outbox, _):
        ending = person.transaction()
        await ending.start()
        await person.execute("SELECT FROM sidings.outbox WHERE key = 'a' FOR UPDATE")
        async with relaying(database, sidings_kafka, topic_patience_seconds=0.0, max_backoff_seconds=0.3):

            async def parked() -> list[bytes | None]:
                return [message.key for message in await outbox.parked()]

            async def others() -> bool:
                return await parked() == [b"b", b"c"]

            await eventually(others, seconds=10.0)
            await ending.rollback()
            await emptied(database)
            assert await parked() == [b"a", b"b", b"c"]


@pytest.mark.long
async def test_what_kafka_has_of_a_topic_that_is_gone_is_not_parked(database: str, sidings_kafka: str, topic) -> None:
    """As messages behind one that somebody has locked: released, they would be sent again."""
    etas = await topic("etas")
    await publish(database, etas, [("a", b"1")])
    options = {"topic_patience_seconds": 0.0, "max_backoff_seconds": 0.3, "delivery_seconds": 3.0}
    async with connected(database) as person, publishing(database) as (outbox, _):
        ending = person.transaction()
        await ending.start()
        await person.execute("SELECT FROM sidings.outbox FOR UPDATE")
        async with relaying(database, sidings_kafka, **options) as sender:
            await eventually(lambda: told_of(sender, "keeps messages locked"))
            await publish(database, etas, [("a", b"2"), ("a", b"3")])
            await eventually(lambda: len(sender.backlog.locked) == 3)
            await delete_topics(sidings_kafka, [etas])
            await publish(database, etas, [("b", b"1")])
            await eventually(outbox.parked)
            await ending.rollback()
            await emptied(database)
            assert [message.key for message in await outbox.parked()] == [b"b"]


@pytest.mark.parametrize("verb", ["release", "discard"])
async def test_a_parked_message_that_is_locked_is_told_of(database: str, verb: str) -> None:
    """It was asyncpg's own error, which the outbox's callers do not expect."""
    await fetch(
        database,
        "INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, key, value, error) "
        "SELECT n, now(), 0, 'etas', 'a', 'x', 'no' FROM generate_series(1, 3) n",
    )
    async with connected(database) as person, publishing(database) as (outbox, _):
        ending = person.transaction()
        await ending.start()
        await person.execute("SELECT FROM sidings.outbox_parked WHERE id = 2 FOR UPDATE")
        with pytest.raises(Busy, match="locked"):
            await getattr(outbox, verb)("etas", actor="alice")
        assert len(await outbox.parked()) == 3
        assert await getattr(outbox, verb)("etas", ids=[1, 3], actor="alice") == [1, 3]
        await ending.rollback()
        assert await getattr(outbox, verb)("etas", actor="alice") == [2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("table", "words"), [("outbox_parked", "cannot be deleted"), ("outbox_relay", "slots of the outbox cannot")]
)
async def test_health_says_what_holds_up_all_messages(
    database: str, sidings_kafka: str, topic, table: str, words: str
) -> None:
    """As a table that somebody has locked. It said nothing: all that was read was well."""
    etas = await topic("etas")
    await publish(database, etas, [("a", b"1")])
    async with connected(database) as person:
        ending = person.transaction()
        await ending.start()
        await person.execute(f"LOCK sidings.{table}")
        async with relaying(database, sidings_kafka) as sender:
            await eventually(lambda: told_of(sender, words), sender.held_up)
            assert sender.problems() == []
            await ending.rollback()
            await emptied(database)
            await eventually(lambda: sender.held_up() == [])


@pytest.mark.parametrize("error", [PostgresUnavailable("no connection"), KeyError("a defect")], ids=["away", "defect"])
async def test_health_says_that_the_slots_leases_cannot_be_renewed(
    database: str, sidings_kafka: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The thread's connection alone was gone: the slots went from relay to relay, and all was well."""
    monkeypatch.setattr(relay, "_HELD_UP_SECONDS", 1.0)

    async def fails(*_: object) -> None:
        raise error

    words = "the leases of the outbox's slots cannot be renewed, for "
    async with relaying(database, sidings_kafka, lease_seconds=2.0) as sender:
        await eventually(lambda: sender.held)
        with monkeypatch.context() as patched:
            patched.setattr(sender._leases, "_renew", fails)
            await eventually(lambda: told_of(sender, words), sender.held_up)
            assert str(error) in str(sender.held_up())
            assert sender.problems() == []
        await eventually(lambda: sender.held_up() == [], sender.held_up)


async def test_a_relay_that_has_lost_its_slots_is_not_told_of_their_leases(
    database: str, sidings_kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It renews nothing any more, so nothing would end that."""
    monkeypatch.setattr(relay, "_HELD_UP_SECONDS", 0.5)

    async def fails(*_: object) -> None:
        raise PostgresUnavailable("no connection")

    async with relaying(database, sidings_kafka, lease_seconds=2.0) as sender:
        await eventually(lambda: sender.held)
        with monkeypatch.context() as patched:
            patched.setattr(sender._leases, "_renew", fails)
            await eventually(lambda: told_of(sender, "cannot be renewed"), sender.held_up)
            sender._slots.stopping = True  # as if others had them
            await eventually(lambda: not sender.held)
        await eventually(lambda: sender.held_up() == [], sender.held_up)
        assert sender._leases.outage.error == "no connection"


async def test_a_receipt_is_waited_for_while_the_outbox_is_locked(database: str, sidings_kafka: str, topic) -> None:
    """As for a VACUUM FULL. It failed with asyncpg's own error after three seconds."""
    etas = await topic("etas")
    async with connected(database) as person, publishing(database) as (outbox, connection):
        async with connection.transaction():
            receipt = await outbox.publish(connection, etas, key="a", value=b"1")
        ending = person.transaction()
        await ending.start()
        await person.execute("LOCK sidings.outbox")
        with pytest.raises(TimeoutError):
            await outbox.published(receipt, timeout=4.0)
        await ending.rollback()
        async with relaying(database, sidings_kafka):
            await outbox.published(receipt, timeout=SECONDS)


@pytest.mark.long
async def test_what_is_behind_a_message_that_is_locked_takes_no_others_place(
    database: str, sidings_kafka: str, topic
) -> None:
    """When as many as fit into memory were behind it, nothing was read any more of any topic."""
    etas, other = await topic("etas"), await topic("other")
    await publish(database, etas, [("a", b"0")])
    async with connected(database) as person:
        ending = person.transaction()
        await ending.start()
        await person.execute("SELECT FROM sidings.outbox FOR UPDATE")
        async with relaying(database, sidings_kafka, window=100, batch_size=50) as sender:
            await eventually(lambda: told_of(sender, "keeps messages locked"))
            for number in range(5):
                await publish(database, etas, [("a", b"%d" % n) for n in range(1 + 50 * number, 51 + 50 * number)])
                await publish(database, other, [(f"k{n}", b"%d" % number) for n in range(50)])
                await emptied(database, other)
            await ending.rollback()
            await emptied(database)
    found = [int(r.value) for r in await records(sidings_kafka, etas)]
    assert list(dict.fromkeys(found)) == list(range(251))
