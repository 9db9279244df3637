"""A topic gets more partitions, so that keys move: a group's jobs stay in one origin until it is empty."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import TopicPartition
from sidings import Job, Message, PostgresSettings, Registry, Transaction
from sidings.executor import now
from sidings.jobs.context import current_work
from sidings.kafka import Topics, partition_for
from sidings.kafka.message import StoredMessage, group_of_key
from sidings.kafka.parking import Parking
from sidings.kafka.partition import Item, Partition
from sidings.kafka.topics import _Topic as TopicRow
from sidings.schema import load_sql
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    add_partitions,
    as_json,
    effects_table,
    numbers,
    offset_reaches,
    produce,
    producing,
    record,
    sample,
    stored_offsets,
)
from .support import SECONDS, Ride, connected, drained, eventually, fetch, jobs_left, value
from .ways import WAYS as CONNECTIONS
from .ways import opened

OLD, NEW = 4, 6
KEYS = [f"key-{n}" for n in range(100)]
# Keys whose partition is another among 6 than among 4, and one that stays.
MOVED = [key for key in KEYS if partition_for(key.encode(), OLD) != partition_for(key.encode(), NEW)]
KEPT = next(key for key in KEYS if key not in MOVED)
KEY = MOVED[0]
GROWN = f"INSERT INTO sidings.topic (topic, partitions, former) VALUES ('positions', {NEW}, '{{{OLD}}}')"

IS_BLOCKED = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


def before(key: str, topic: str = "positions") -> str:
    return f"{topic}/{partition_for(key.encode(), OLD)}"


def after(key: str, topic: str = "positions") -> str:
    return f"{topic}/{partition_for(key.encode(), NEW)}"


def a_message(key: str) -> Message[None]:
    """One of the partition where the key's messages are now."""
    return Message(None, topic="positions", partition=partition_for(key.encode(), NEW), key=key.encode())


@pytest.fixture
async def grown(database):
    async with connected(database) as connection:
        await connection.execute(GROWN)
    return database


def a_type(**options: Any) -> Any:
    """A job type of a process that knows that its topics have grown."""
    registry = Registry()
    registry.has_grown = lambda _: True
    return registry.job(**{"name": "ride", "group": "transport", "payload": Ride} | options)(lambda job: None)


async def store(dsn: str, job_type: Any, key: str, origin: str | None = None, **options: Any) -> str:
    """Enqueue one job in a transaction of its own; where it is."""
    async with connected(dsn) as connection, connection.transaction():
        id = await job_type.enqueue(connection, Ride(transport=key), origin=origin, **options)
    return await value(dsn, "SELECT origin FROM sidings.job WHERE id = $1", id)


async def end_all(dsn: str) -> None:
    await fetch(dsn, "DELETE FROM sidings.job")


@pytest.fixture
def quick_growth(monkeypatch):
    """A new count takes effect after a second and a half, and is believed to be old for less than that."""
    for name, seconds in (("LOAD", 0.1), ("LOOK", 0.05), ("FRESH", 1.0), ("ANNOUNCE", 1.5)):
        monkeypatch.setattr(f"sidings.kafka.topics._{name}_SECONDS", seconds)


# -- where a job goes -------------------------------------------------------------------------------------------------


async def test_a_group_stays_where_it_is_until_it_is_empty(grown):
    ride = a_type()
    assert await store(grown, ride, KEY, after(KEY)) == after(KEY)
    await end_all(grown)
    assert await store(grown, ride, KEY, before(KEY)) == before(KEY)  # a message from before the growth
    assert await store(grown, ride, KEY, after(KEY)) == before(KEY)
    assert await store(grown, ride, KEPT, after(KEPT)) == after(KEPT)
    await end_all(grown)
    assert await store(grown, ride, KEY, after(KEY)) == after(KEY)
    # A message from before the growth that comes last, and a process that knows only the old count.
    assert await store(grown, ride, KEY, before(KEY)) == after(KEY)
    assert await store(grown, a_type(group=None), KEY, before(KEY)) == before(
        KEY
    )  # alone: there is nothing to wait for


WAYS: dict[str, Callable[[Any], Any]] = {
    "enqueue": lambda c: a_type().enqueue(c, Ride(transport=KEY), origin=after(KEY)),
    "many": lambda c: a_type().enqueue_many(c, [Ride(transport=KEY), Ride(transport=KEY)], origin=after(KEY)),
    "many with headers": lambda c: a_type().enqueue_many(
        c, [Ride(transport=KEY)] * 2, origin=after(KEY), headers=[None, {}]
    ),
    "unique": lambda c: a_type().enqueue(c, Ride(transport=KEY), origin=after(KEY), unique_key="u"),
    "home": lambda c: a_type(home="positions").enqueue(c, Ride(transport=KEY)),
    "many at home": lambda c: a_type(home="positions").enqueue_many(c, [Ride(transport=KEY), Ride(transport=KEY)]),
    "unique at home": lambda c: a_type(home="positions").enqueue(c, Ride(transport=KEY), unique_key="u"),
    "delayed": lambda c: a_type().enqueue(c, Ride(transport=KEY), origin=after(KEY), delay=timedelta(days=1)),
    "SQL": lambda c: c.fetchval("SELECT sidings.enqueue('ride', '{}', $1, $2)", after(KEY), KEY),
    "unique SQL": lambda c: c.fetchval("SELECT sidings.enqueue('r', '{}', $1, $2, unique_key => 'u')", after(KEY), KEY),
}


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_in_finds_the_group(grown, way):
    for origin in (before(KEY), after(KEY)):
        await store(grown, a_type(), KEY, origin)
        async with connected(grown) as connection, connection.transaction():
            tx = Transaction(connection)
            await WAYS[way](connection if "SQL" in way else tx)
            assert "SQL" in way or tx.enqueued.keys() == {origin}, "the wrong executor is woken"
        assert await value(grown, "SELECT array_agg(DISTINCT origin) FROM sidings.job") == [origin]
        await end_all(grown)


@pytest.mark.parametrize("when", [{}, {"delay": 3_600.0}, {"run_at": datetime(2100, 1, 1, tzinfo=UTC)}], ids=str)
async def test_what_is_said_of_a_job_is_stored_whatever_finds_out_its_origin(grown, when):
    """Each way has a statement of its own."""
    said = {"priority": 7, "headers": {"correlation_id": "c"}, **when}
    async with connected(grown) as connection, connection.transaction():
        for where in ("given", "grown", "home"):
            registry = Registry()
            registry.has_grown = lambda _, grown=where == "grown": grown
            home = "positions" if where == "home" else None
            ride: Any = registry.job(name="ride", group="transport", payload=Ride, policy="latest", home=home)(print)
            at = said if home else {"origin": after(KEY), **said}
            await ride.enqueue(connection, Ride(transport=KEY), **at)
            await ride.enqueue_many(connection, [Ride(transport=KEY)], **at)
            await ride.enqueue_many(connection, [Ride(transport=KEY)], **{**at, "headers": [said["headers"]]})
            await ride.enqueue(connection, Ride(transport=KEY), unique_key=where, **at)
        # A delay counts from the call, and not from the beginning of the transaction, which is now().
        due = "run_at - now() > '1 h' AND run_at - now() < '1 h 1 min'" if "delay" in when else "run_at = '2100-01-01Z'"
        stored = await connection.fetch(
            f"""SELECT count(*), type, origin, "group", priority, policy, headers ->> 'correlation_id', payload::text,
                       position IS NULL, {due}
                FROM sidings.job GROUP BY {", ".join(str(n) for n in range(2, 11))}"""
        )
        payload = Ride(transport=KEY).model_dump_json()
    assert [tuple(row) for row in stored] == [
        (12, "ride", after(KEY), KEY, 7, 1, "c", payload, bool(when), True if when else None)
    ]


async def test_topics_that_never_grew_pay_nothing(database):
    """Their jobs are stored by the statements that know of no growth."""
    registry = Registry()
    ride: Any = registry.job(name="ride", group="transport", payload=Ride)(lambda job: None)
    topics = Topics(PostgresSettings(dsn=database), {})
    await topics.load()
    await topics.close()

    def statements(origin: str) -> set[str]:
        options = (None, None, 0, None)
        return {
            ride._one(Ride(transport=KEY), origin, KEY, *options, None)().name,
            ride._many([Ride(transport=KEY)], origin, *options)().name,
        }

    assert statements("positions/1") == {"insert_job", "insert_jobs"}
    registry.has_grown = topics.has_grown
    assert statements("positions/1") == {"insert_job", "insert_jobs"}
    topics._known = {"positions": TopicRow(NEW, "murmur2", (OLD,)), "other": TopicRow(NEW, "murmur2")}
    assert statements("positions/1") == {"insert_placed_job", "insert_placed_jobs"}
    assert statements("other/1") == {"insert_job", "insert_jobs"}


@pytest.mark.parametrize("name", CONNECTIONS)
async def test_every_kind_of_connection_finds_the_group(grown, name):
    current_work.set(a_message(KEY))
    ride = a_type()
    async with opened(name, grown) as way:
        # The context of a handler is not that of a thread: there the origin is given, and the group is the key.
        group, origin = (KEY, after(KEY)) if way.synchronous else ("order-7", None)
        await store(grown, ride, group, before(KEY))
        await way.begin()
        await way.enqueue(ride, Ride(transport=group), origin=origin)
        await way.enqueue_many(ride, [Ride(transport=group)], origin=origin)
        await way.enqueue_many(ride, [Ride(transport=group)], origin=origin, headers=[{}])
        await way.enqueue(ride, Ride(transport=group), origin=origin, unique_key="u")
        await way.end("COMMIT")
    rows = await fetch(grown, "SELECT origin FROM sidings.job")
    assert [row["origin"] for row in rows] == [before(KEY)] * 5


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int]


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
@pytest.mark.parametrize("name", [name for name in CONNECTIONS if name.endswith("Session")])
async def test_a_session_that_waits_for_its_row_learns_that_the_topic_grows_meanwhile(grown, name, many):
    """It locks the row within the enqueue, where it is flushed. What it had been told before was believed."""
    registry, known = Registry(), set[str]()
    registry.has_grown = known.__contains__
    ride: Any = registry.job(name="ride", group="transport", payload=Ride)(lambda job: None)
    async with connected(grown) as other, opened(name, grown) as way, asyncio.TaskGroup() as tasks:
        await other.execute("CREATE TABLE orders (id text PRIMARY KEY, number int)")
        await other.execute("INSERT INTO orders VALUES ('1', 0)")
        async with other.transaction():
            await other.execute("UPDATE orders SET number = 1")
            order = await way.do(lambda: way.connection.get(Order, "1"))
            order.number = 2
            payload, call = Ride(transport=KEY), way.enqueue_many if many else way.enqueue
            late = tasks.create_task(call(ride, [payload] if many else payload, origin=before(KEY)))
            await eventually(lambda: value(grown, IS_BLOCKED))
            known.add("positions")
            await a_type().enqueue(other, payload, origin=after(KEY))
        await late
        await way.end("COMMIT")
    assert await value(grown, "SELECT array_agg(origin) FROM sidings.job") == [after(KEY)] * 2


async def test_many_jobs_of_one_statement_stay_together(grown):
    """Also where the first of them finds its group empty, and the origin is one of before."""
    async with connected(grown) as connection, connection.transaction():
        await a_type().enqueue_many(connection, [Ride(transport=key) for key in (KEY, KEPT, KEY)], origin=before(KEY))
    rows = await fetch(grown, 'SELECT "group", origin FROM sidings.job ORDER BY id')
    assert [row["origin"] for row in rows] == [before(KEY)] * 3


@pytest.mark.parametrize("state", ["delayed", "held", "backs off"])
async def test_jobs_that_do_not_run_now_keep_their_group_where_it_is(grown, state):
    await store(grown, a_type(), KEY, before(KEY), delay=timedelta(days=30) if state == "delayed" else None)
    if state == "held":
        await fetch(grown, "UPDATE sidings.job SET held = 'why', position = NULL")
    if state == "backs off":
        await fetch(grown, "UPDATE sidings.job SET run_at = now() + interval '1 day'")
    assert await store(grown, a_type(), KEY, after(KEY)) == before(KEY)


async def test_an_origin_that_is_none_of_the_keys_is_left_alone(grown):
    """Same-named groups of different origins have nothing to do with each other."""
    group = KEY
    elsewhere = next(f"positions/{n}" for n in range(NEW) if f"positions/{n}" not in (before(KEY), after(KEY)))
    await store(grown, a_type(), group, before(KEY))
    assert await store(grown, a_type(), group, elsewhere) == elsewhere
    assert await store(grown, a_type(), group, "other/1") == "other/1"
    assert await store(grown, a_type(), group, after(KEY)) == before(KEY)


async def test_a_group_with_jobs_in_two_origins_stays_in_the_one_that_was_asked_for(grown):
    async with connected(grown) as connection:
        await connection.execute(
            """INSERT INTO sidings.job (type, origin, "group") SELECT 'ride', unnest($1::text[]), $2""",
            *([before(KEY), after(KEY)], KEY),
        )
    for origin in (after(KEY), before(KEY)):
        assert await store(grown, a_type(), KEY, origin) == origin


async def test_the_messages_key_counts_where_the_group_is_another(grown):
    """A consumer's handler enqueues for the order of the message; it is the message's key that has moved."""
    ride = a_type()
    await store(grown, ride, "order-7", before(KEY))

    async def handle() -> str:
        current_work.set(a_message(KEY))
        return await store(grown, ride, "order-7")

    assert await asyncio.create_task(handle()) == before(KEY)
    assert await store(grown, ride, "order-8", after(KEY)) == after(KEY)
    messages = load_sql("sidings.kafka", "store_messages")
    for group, origin in (("order-7", before(KEY)), ("order-8", after(KEY))):  # as of a key that is no text
        its = ("message:t", [after(KEY)], [group], [None], ["{}"], [None], [KEY.encode()])
        assert [row["origin"] for row in await fetch(grown, messages, *its)] == [origin]


async def test_the_messages_key_does_not_count_where_an_origin_is_given(grown):
    """It is the group's, of which a handler of other messages has asked `origin_for`."""
    ride = a_type()
    await store(grown, ride, KEY, before(KEY))

    async def handle() -> str:
        current_work.set(a_message(KEPT))
        return await store(grown, ride, KEY, after(KEY))

    assert await asyncio.create_task(handle()) == before(KEY)


async def test_a_topic_that_grew_twice_is_searched_by_every_count(database):
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.topic (topic, partitions, former, partitioner) VALUES ('t', 7, '{3,5}', 'crc32')"
        )
    key = next(k for k in KEYS if len({partition_for(k.encode(), n, "crc32") for n in (3, 5, 7)}) == 3)
    places = [f"t/{partition_for(key.encode(), n, 'crc32')}" for n in (3, 5, 7)]
    for there in places:
        for asked in places:
            await store(database, a_type(), key, there)
            assert await store(database, a_type(), key, asked) == there
            await end_all(database)


async def test_writers_that_lock_the_entity_find_what_was_committed_while_they_waited(grown):
    """The first has its job where the key was, and commits while the second, which is of the new partition, waits for
    the entity's row: so does the second's. READ COMMITTED, as servers have it by default."""
    await fetch(grown, "CREATE TABLE entity (key text PRIMARY KEY, seq int NOT NULL)")
    await fetch(grown, "INSERT INTO entity VALUES ($1, 0)", KEY)
    update = "UPDATE entity SET seq = seq + 1 WHERE key = $1"
    ride = a_type()
    async with connected(grown) as first, connected(grown) as second:
        one, two = first.transaction(), second.transaction()
        await one.start()
        await two.start()
        await second.fetchval("SELECT 1")
        await first.execute(update, KEY)
        await ride.enqueue(first, Ride(transport=KEY), origin=before(KEY))
        waiting = asyncio.create_task(second.execute(update, KEY))
        await eventually(lambda: value(grown, IS_BLOCKED))
        await one.commit()
        await waiting
        await ride.enqueue(second, Ride(transport=KEY), origin=after(KEY))
        await two.commit()
    rows = await fetch(grown, "SELECT origin FROM sidings.job ORDER BY position")
    assert [row["origin"] for row in rows] == [before(KEY)] * 2


async def test_a_job_that_is_requeued_goes_where_its_group_is(grown):
    await fetch(
        grown,
        """INSERT INTO sidings.job_history (job_id, type, origin, "group", attempt, outcome, priority, payload,
                                            finished_at, enqueued_at, executor, epoch)
           VALUES (7, 'ride', $1, $2, 1, 'discarded', 0, '{}', now(), now(), gen_random_uuid(), 1)""",
        *(before(KEY), KEY),
    )
    await store(grown, a_type(), KEY, after(KEY))
    await fetch(grown, "SELECT sidings.requeue_job(7, 'somebody')")
    assert await value(grown, "SELECT array_agg(DISTINCT origin) FROM sidings.job") == [after(KEY)]


async def test_a_message_that_is_requeued_goes_where_its_group_is_though_its_key_is_no_text(grown):
    """Of such a key the group has the hash alone, by whose partitions it was looked for: two of the key ran at once."""
    keys = [bytes([255, n]) for n in range(100)]
    key = next(key for key in keys if partition_for(key, OLD) != partition_for(key, NEW))
    there, here = (f"positions/{partition_for(key, count)}" for count in (NEW, OLD))
    sent = SimpleNamespace(topic="positions", partition=0, offset=7, timestamp=1, key=key, value=None, headers=[])
    payload = StoredMessage.of(cast("Any", sent), "ValueError: a\0b", None).model_dump_json()
    await fetch(
        grown,
        """INSERT INTO sidings.job_history (job_id, type, origin, "group", attempt, outcome, priority, payload,
                                            finished_at, enqueued_at, executor, epoch)
           VALUES (7, 'message:positions', $1, $2, 1, 'discarded', 0, $3, now(), now(), gen_random_uuid(), 1)""",
        *(here, group_of_key(key), payload),
    )
    messages = load_sql("sidings.kafka", "store_messages")
    await fetch(grown, messages, "message:positions", [there], [group_of_key(key)], [None], ["{}"], [None], [key])
    await fetch(grown, "SELECT sidings.requeue_job(7, 'somebody')")
    assert await value(grown, "SELECT array_agg(DISTINCT origin) FROM sidings.job") == [there]


@pytest.mark.parametrize("per", ["origin", "origin, once per service", "service, once per origin"])
async def test_a_tick_of_an_origin_that_is_requeued_comes_back_there(grown, per):
    """Its type passed for a key, so it was drawn into another origin, where the job's name had another tick."""
    places = [before(KEY), after(KEY)]
    seen = dict.fromkeys(places, "0 s")
    if per != "origin":  # with what is left from before
        seen |= {"": "-1 hour" if per.startswith("origin") else "1 hour"}
    for origin, ago in seen.items():
        row = "(name, schedule, origin, job_origin, seen_at) VALUES ($1, 'daily', $2, $3, now() + $4::text::interval)"
        await fetch(grown, f"INSERT INTO sidings.periodic {row}", KEY, origin, origin or "positions/9", ago)
    for number, origin in enumerate(places, 1000):
        await fetch(
            grown,
            """INSERT INTO sidings.job_history (job_id, type, origin, "group", attempt, outcome, priority, payload,
                                                finished_at, enqueued_at, executor, epoch)
               VALUES ($1, $2, $3, $2, 1, 'discarded', 0, '{}', now(), now(), gen_random_uuid(), 1)""",
            *(number, KEY, origin),
        )
        await fetch(grown, "SELECT sidings.requeue_job($1, 'somebody')", number)
    found = await value(grown, "SELECT array_agg(origin ORDER BY id) FROM sidings.job")
    assert found == (["positions/9"] * 2 if per.startswith("service") else places)


async def test_a_reset_spares_a_message_of_another_partition_that_waits_in_its_origin(grown):
    """It would not be delivered again."""
    async with connected(grown) as connection:
        for partition in (1, 2):
            await connection.execute(
                "SELECT sidings.enqueue('message:positions', $1, 'positions/1', 'a')",
                f'{{"topic": "positions", "partition": {partition}, "offset": 900}}',
            )
        rest = "SELECT array_agg(payload ->> 'partition') FROM sidings.job"
        await connection.execute("SELECT sidings.reset_offsets('positions', '{1}', '{500}', 'somebody', NULL)")
        assert await connection.fetchval(rest) == ["2"]
        await connection.execute("SELECT sidings.reset_offsets('positions', '{1,2}', '{500,901}', 'somebody', NULL)")
        assert await connection.fetchval(rest) == ["2"]
        await connection.execute("SELECT sidings.reset_offsets('positions', '{1,2}', '{500,900}', 'somebody', NULL)")
        assert await connection.fetchval(rest) is None


# -- what is known of the topic ---------------------------------------------------------------------------------------


class Metadata:
    """Stands for a client that knows of so many partitions."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions

    def partitions_for_topic(self, _: str) -> set[int]:
        return set(range(self.partitions))


async def test_a_new_count_is_announced_before_it_takes_effect_and_an_old_one_never_wins(
    database, quick_growth, monkeypatch
):
    monkeypatch.setattr("sidings.kafka.topics._ANNOUNCE_SECONDS", 3600.0)
    row = "SELECT partitions, former FROM sidings.topic"
    ahead, behind = (Topics(PostgresSettings(dsn=database), {}) for _ in range(2))
    metadata: Any = Metadata(OLD)
    late: Any = Metadata(OLD)
    watching = [
        asyncio.create_task(topics.watch(client, ["positions"], lambda: None))
        for topics, client in ((ahead, metadata), (behind, late))
    ]
    try:
        await eventually(lambda: value(database, "SELECT count(*) FROM sidings.topic"))
        await eventually(lambda: ahead.covers(TopicPartition("positions", 0)) and not ahead.has_grown("positions"))
        metadata.partitions = NEW
        await eventually(lambda: ahead.has_grown("positions"))
        assert [tuple(r) for r in await fetch(database, row)] == [(OLD, [OLD])]
        assert not ahead.covers(TopicPartition("positions", OLD))
        assert ahead.covers(TopicPartition("positions", OLD - 1))
        assert ahead.origin_for(KEY, "positions") == before(KEY)
        assert await value(database, "SELECT sidings.origin_for($1, 'positions')", KEY) == before(KEY)
        await fetch(database, "UPDATE sidings.topic SET seen_at = seen_at - interval '2 hours'")
        await eventually(lambda: ahead.covers(TopicPartition("positions", OLD)))
        assert ahead.origin_for(KEY, "positions") == after(KEY)
        assert ahead.was_added(TopicPartition("positions", OLD))
        assert not ahead.was_added(TopicPartition("positions", OLD - 1))
        # The other process still sees the old count, and says so again.
        await behind._remember({"positions": ahead._known["positions"]._replace(partitions=OLD)})
        assert [tuple(r) for r in await fetch(database, row)] == [(NEW, [OLD])]
        assert behind.origins_of(KEY.encode(), "positions") == [before(KEY), after(KEY)]
        await ahead.load()
        await fetch(database, "DELETE FROM sidings.topic")  # as the log says of a topic that was made anew
        await ahead.load()
        await eventually(lambda: value(database, "SELECT count(*) FROM sidings.topic"), "it is written anew", 5)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await ahead.close()
        await behind.close()


async def test_a_count_that_is_announced_is_not_lost_to_a_smaller_one(database):
    """As where a topic was made anew meanwhile: keys of the larger count would be looked for in too few origins."""
    remember = load_sql("sidings.kafka", "remember_topics")
    row = "SELECT partitions, former, partitioner FROM sidings.topic"
    async with connected(database) as connection:
        for count, partitioner, known in (
            (6, "murmur2", (6, [], "murmur2")),
            (0, "", (6, [], "murmur2")),
            (12, "murmur2", (6, [6], "murmur2")),
            (12, "murmur2", (6, [6], "murmur2")),
            (3, "murmur2", (6, [6, 3], "murmur2")),
            (3, "crc32", (6, [6, 3], "crc32")),
            (12, "crc32", (6, [6, 3], "crc32")),
            (0, "", (6, [6, 3], "crc32")),
            (12, "crc32", (12, [6, 3], "crc32")),
            (6, "murmur2", (12, [6, 3], "murmur2")),
        ):
            if count:
                await connection.execute(remember, ["positions"], [count], [partitioner], 3600.0)
            else:
                await connection.execute("UPDATE sidings.topic SET seen_at = seen_at - interval '2 hours'")
            assert [tuple(r) for r in await connection.fetch(row)] == [known]


async def test_a_smaller_count_counts_once_everybody_has_to_know_it_whatever_the_servers_clock_says(
    database, monkeypatch
):
    """That was set back by an hour after the row was written; and a person may write rows, too."""
    time = 1_000.0
    monkeypatch.setattr("sidings.kafka.topics.now", lambda: time)
    topics = Topics(PostgresSettings(dsn=database), {})
    await fetch(
        database,
        "INSERT INTO sidings.topic (topic, partitions, seen_at, former) "
        "VALUES ('positions', 3, now() + interval '1 h', '{2}'), ('orders', 2, now(), '{3}')",
    )
    await topics.load()
    try:
        assert [topics.has_shrunk("positions", count) for count in (1, 2, 3, 4)] == [True, True, False, False]
        time += 9.9
        await topics.load()
        assert topics.has_shrunk("positions", 2)
        time += 0.2
        assert [topics.has_shrunk("positions", count) for count in (1, 2, 3)] == [True, False, False]
        behind = {"positions": (2, False), "orders": (3, True), "unknown": (1, True)}
        for name, (count, is_behind) in behind.items():
            assert topics._is_behind({name: TopicRow(count, "murmur2")}) == is_behind, name
        assert topics._is_behind({"positions": TopicRow(1, "murmur2")})
    finally:
        await topics.close()


async def test_that_a_topic_has_not_grown_is_believed_for_a_while_only(database, monkeypatch):
    topics = Topics(PostgresSettings(dsn=database), {})
    assert topics.has_grown("positions"), "nothing is known yet"
    assert not topics.covers(TopicPartition("positions", 0))
    await topics.load()
    assert not topics.has_grown("positions")
    topics._loaded_at = now() - 60  # Postgres has not answered since, or the process was paused
    assert topics.has_grown("positions")
    await topics.close()


async def test_a_topic_that_was_made_anew_smaller_is_told_of(grown, monkeypatch, caplog, quick_growth):
    monkeypatch.setattr("sidings.kafka.topics._SHRUNK_SECONDS", 0.1)
    topics = Topics(PostgresSettings(dsn=grown), {})
    await topics.load()
    client: Any = Metadata(2)
    watching = asyncio.create_task(topics.watch(client, ["positions"], lambda: None))
    try:
        await eventually(lambda: "'positions' has 2 partitions, and had 6" in caplog.text)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await topics.close()
    row = "SELECT partitions, former FROM sidings.topic"
    assert [tuple(r) for r in await fetch(grown, row)] == [(NEW, [OLD, 2])]


async def test_instances_with_different_partitioners_of_a_topic_are_told_of(database, caplog, quick_growth):
    """The last to connect decides for all: at each reconnect, keys were hashed in another way, without a word."""
    first = Topics(PostgresSettings(dsn=database), {})
    second = Topics(PostgresSettings(dsn=database), {"positions": "crc32"})
    client: Any = Metadata(OLD)
    watching = [asyncio.create_task(first.run()), asyncio.create_task(first.watch(client, ["positions"], lambda: None))]

    def told() -> list[str]:
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        return [text for text in errors if "'positions'" in text and "'murmur2'" in text and "'crc32'" in text]

    try:
        await eventually(lambda: first.covers(TopicPartition("positions", 0)))
        for count in (1, 2):
            watching.append(asyncio.create_task(second.watch(client, ["positions"], lambda: None)))
            await eventually(lambda count=count: len(told()) == count, told)
            assert first.origin_for(KEY, "positions") == second.origin_for(KEY, "positions")
            watching.append(asyncio.create_task(first.watch(client, ["positions"], lambda: None)))  # it connects anew
            await eventually(lambda: first._known["positions"].partitioner == "murmur2")
            await eventually(lambda: not first._differing)
        assert len(told()) == 2
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await first.close()
        await second.close()


# -- a real Kafka -----------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_partitions_are_added_under_load_and_each_keys_jobs_stay_in_order(
    database, topic, sidings_kafka, quick_growth
):
    """Two executors; jobs of every key wait when the partitions come, and messages of before are still to be read."""
    few, many = 3, 6  # a multiple: so no key moves between partitions of before
    name = await topic(partitions=few)
    await fetch(database, "CREATE TABLE entity (key text PRIMARY KEY, seq int NOT NULL)")
    step = """INSERT INTO entity VALUES ($1, 1) ON CONFLICT (key) DO UPDATE SET seq = entity.seq + 1 RETURNING seq"""
    keys = [f"key-{n}" for n in range(12)]
    moved = {key for key in keys if partition_for(key.encode(), few) != partition_for(key.encode(), many)}
    go_on = asyncio.Event()
    at_work: set[str] = set()
    overlaps: list[str] = []
    ran: dict[str, list[int]] = defaultdict(list)
    origins: dict[str, list[str]] = defaultdict(list)
    consumed: set[int] = set()
    added = {partition_for(key.encode(), many) for key in moved}

    def another() -> Any:
        settings = {"fetch_seconds": 0.05, "metadata_seconds": 0.3, "session_seconds": 3.0}
        service = a_service(database, sidings_kafka, settings=settings)

        @service.job(group="transport")
        async def work(job: Job[Ride]) -> None:
            key = job.payload.transport
            if key in at_work:
                overlaps.append(key)
            at_work.add(key)
            try:
                await go_on.wait()
                ran[key].append(job.payload.number)
                origins[key].append(job.origin)
            finally:
                at_work.discard(key)

        @service.consumer(name)
        async def handle(message: Message[Number], tx: Transaction) -> None:
            key = message.key_text or ""
            await work.enqueue(tx, Ride(transport=key, number=await tx.fetchval(step, key)))
            consumed.add(message.partition)

        return service

    sent = 0
    async with another() as first, another() as second:
        await eventually(lambda: first._life.consumer.joined and second._life.consumer.joined)
        async with producing(sidings_kafka, metadata_max_age_ms=200) as producer:

            async def send(rounds: int) -> None:
                nonlocal sent
                for _ in range(rounds):
                    for key in keys:
                        await producer.send_and_wait(name, as_json(sent), key=key.encode())
                        sent += 1

            async def one_more_reaches_what_was_added() -> bool:
                await send(1)
                return added <= consumed

            async def all_are_stored() -> bool:
                return await jobs_left(database) == sent

            await send(10)
            await eventually(lambda: at_work == set(keys), "a job of every key has begun")
            await add_partitions(sidings_kafka, name, many)
            await eventually(one_more_reaches_what_was_added)
            await eventually(all_are_stored)
            stored = await fetch(database, 'SELECT DISTINCT "group", origin FROM sidings.job')
            assert len(stored) == len(keys), "a group has jobs in two origins"
            go_on.set()
            await drained(database)
            await send(5)
            await eventually(lambda: sum(map(len, ran.values())) >= sent)
        await drained(database)
    assert overlaps == []
    assert all(ran[key] == list(range(1, len(ran[key]) + 1)) for key in keys), dict(ran)
    assert sum(map(len, ran.values())) == sent
    assert added
    for key in keys:
        ends = (origins[key][0], origins[key][-1])
        assert ends == tuple(f"{name}/{partition_for(key.encode(), count)}" for count in (few, many))


async def test_later_messages_of_a_key_that_moved_are_parked_behind_its_parked_one(
    database, topic, sidings_kafka, quick_growth
):
    await effects_table(database)
    few, many = 1, 4
    name = await topic(partitions=few)
    key = next(key for key in KEYS if partition_for(key.encode(), many) >= few)
    mended = asyncio.Event()
    service = a_service(
        database, sidings_kafka, settings={"fetch_seconds": 0.05, "metadata_seconds": 0.3, "session_seconds": 3.0}
    )

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 0 and not mended.is_set():
            raise ValueError("not yet")
        await record(message, tx)

    async with service:
        await produce(sidings_kafka, name, [0], key=key)
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") == 1)
        await add_partitions(sidings_kafka, name, many)
        await eventually(lambda: len(service.executor.held) == many)
        await produce(sidings_kafka, name, [1, 2], key=key, partition=partition_for(key.encode(), many))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") == 3)
        assert await value(database, "SELECT array_agg(DISTINCT origin) FROM sidings.job") == [f"{name}/0"]
        mended.set()
        await fetch(database, "UPDATE sidings.job SET run_at = now() WHERE run_at IS NOT NULL")
        await drained(database)
    assert await numbers(database) == [0, 1, 2]


@pytest.mark.parametrize("last", [before(KEY), after(KEY)], ids=["old", "new"])
async def test_of_a_key_in_two_partitions_none_passes_what_is_parked(grown, last):
    """One batch has both where a producer learns of the new count late. One of a partition that is none of the key's
    does not wait for them: its job would not be beside theirs."""
    settings = PostgresSettings(dsn=grown)
    topics = Topics(settings, {})
    await topics.load()

    def item(origin: str) -> Item:
        topic, _, partition = origin.partition("/")
        record: Any = SimpleNamespace(key=KEY.encode(), offset=0)
        return Item(Partition(TopicPartition(topic, int(partition))), record, None, None)

    elsewhere = next(f"positions/{n}" for n in range(NEW) if f"positions/{n}" not in (before(KEY), after(KEY)))
    items = sorted(map(item, (before(KEY), after(KEY), elsewhere)), key=lambda item: item.partition.origin == last)
    try:
        async with connected(grown) as connection, connection.transaction():
            await connection.execute("SELECT sidings.enqueue('message:positions', '{}', $1, $2)", before(KEY), KEY)
            blocked = await Parking(settings, topics, lambda _: None).blocked(Transaction(connection), items)
    finally:
        await topics.close()
    assert blocked == {(before(KEY), KEY), (after(KEY), KEY)}


async def test_a_partition_that_was_added_is_read_from_its_beginning(database, topic, sidings_kafka, quick_growth):
    """Also by a consumer that starts at the end of what it has never seen."""
    await effects_table(database)
    name = await topic(partitions=1)
    service = a_service(
        database, sidings_kafka, settings={"fetch_seconds": 0.05, "metadata_seconds": 0.3, "session_seconds": 3.0}
    )
    service.consumer(name, model=Number, start="latest")(record)
    await produce(sidings_kafka, name, [0])
    async with service:
        await eventually(
            lambda: service._parts.database.topics.covers(TopicPartition(name, 0)) and service._life.consumer.joined
        )
        await eventually(
            lambda: [p for p in service._life.consumer._stored.partitions.values() if p.state.name == "READY"]
        )
        await add_partitions(sidings_kafka, name, 2)
        await produce(sidings_kafka, name, [1], partition=1)

        async def read() -> bool:
            return await numbers(database) == [1]

        await eventually(read, seconds=SECONDS)


async def test_but_not_by_a_consumer_that_begins_after_that(database, topic, sidings_kafka):
    """Of a topic that a home, or `topics=`, had made known: it handled again all that the added partition had."""
    await effects_table(database)
    name = await topic(partitions=2)
    await fetch(database, "INSERT INTO sidings.topic (topic, partitions, former) VALUES ($1, 2, '{1}')", name)
    await fetch(database, "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ('other', 0, 5)")
    service = a_service(database, sidings_kafka)
    service.consumer(name, model=Number, start="latest")(record)
    for partition in (0, 1):
        await produce(sidings_kafka, name, [partition], partition=partition)

    async def placed() -> bool:
        return len(await stored_offsets(database)) == 3

    async with service:
        await eventually(placed)
        for partition in (0, 1):
            await produce(sidings_kafka, name, [2 + partition], partition=partition)
        await eventually(offset_reaches(database, name, 2, 0))
        await eventually(offset_reaches(database, name, 2, 1))
    assert sorted(await numbers(database)) == [2, 3]
