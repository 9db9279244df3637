"""One service becomes two, and two become one, as docs/operations.md says: nothing is lost, doubled or out of order."""

import subprocess
from collections import defaultdict
from contextlib import AsyncExitStack
from datetime import timedelta
from secrets import token_hex
from typing import Any, Self

import asyncpg
import pytest
from pydantic import BaseModel
from sidings import Job, Message, OutboxSettings, Retry, Tick, Transaction
from sidings.devstack.binaries import postgres_program
from sidings.devstack.databases import create_database, drop_database
from sidings.devstack.process import clean_environment
from sidings.kafka import partition_for
from sidings.schema import migrate
from tenacity import wait_fixed

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    as_json,
    effects_table,
    producing,
    record,
)
from .guide import block, perform
from .outbox_support import FAST, emptied, records, relaying
from .support import connected, eventually, fetch, value

PARTITIONS = 3
KEYS = [f"k-{n}" for n in range(4)]
COUNTED = "CREATE TABLE tick (name text, at timestamptz); CREATE TABLE run (job bigint, fence bigint, origin text)"


class Fee(BaseModel):
    key: str
    n: int


class Part:
    """Two instances of a service that does some of what there is to do: tells of rides, bills orders, or both."""

    def __init__(self, dsn: str, kafka: str, schema: str, invoices: str, parts: dict[str, str], *topics: str) -> None:
        self.mended = False
        self.stack = AsyncExitStack()
        self.services = [self._service(dsn, kafka, schema, invoices, parts, topics) for _ in range(2)]

    def _service(self, dsn: str, kafka: str, schema: str, invoices: str, parts: dict[str, str], topics: Any) -> Any:
        name = "test" if schema == "sidings" else schema
        options = {"name": name, "schema": schema, "topics": topics, "outbox": OutboxSettings(**FAST)}
        service = a_service(dsn, kafka, **options)
        for kind, topic in parts.items():
            self._part(service, kind, topic, invoices)
        return service

    def _part(self, service: Any, kind: str, topic: str, invoices: str) -> None:
        retry = Retry(wait=wait_fixed(0.3))

        @service.job(name=kind, group="key", home=topic, payload=Fee, retry=retry, transactional=True)
        async def work(job: Job[Any]) -> None:
            if job.payload.n % 10 == 3 and not self.mended:
                raise RuntimeError("the bank is away")
            await job.tx.execute("INSERT INTO run VALUES ($1, $2, $3)", job.id, job.fence.epoch, job.origin)
            await job.tx.execute(
                "INSERT INTO effect (key, number, via) VALUES ($1, $2, $3)", job.group, job.payload.n, kind
            )
            if kind == "bill":
                await service.outbox.publish(job.tx, invoices, key=job.group, value=Number(n=job.payload.n))

        @service.periodic(every=timedelta(seconds=0.5), name=f"{kind}_tick", transactional=True)
        async def tick(job: Job[Tick]) -> None:
            await job.tx.execute("INSERT INTO tick VALUES ($1, $2)", job.type, job.payload.scheduled_at)

        @service.consumer(topic, model=Number, retry=TWICE_AND_PARK, dedup=True)
        async def on_message(message: Message[Number], tx: Transaction) -> None:
            if message.value.n == 5 and not self.mended:
                raise RuntimeError("not yet")
            await record(message, tx, f"on_{kind}")
            await work.enqueue(tx, Fee(key=message.key_text, n=message.value.n))

    async def __aenter__(self) -> Self:
        for service in self.services:
            await self.stack.enter_async_context(service)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()


async def send(kafka: str, topic: str, begin: int, end: int) -> None:
    """Each message once more with its id, as a producer sends that has had no answer."""
    async with producing(kafka) as producer:
        for n in range(begin, end):
            for key in KEYS:
                for _ in range(2):
                    headers = [("sidings-id", f"{key} {n}".encode())]
                    await producer.send(topic, as_json(n), key=key.encode(), headers=headers)
        await producer.flush()


async def handled(dsn: str, schema: str, topic: str, each: int) -> None:
    """Wait until so many messages of each key have been handled, or parked."""
    for partition in range(PARTITIONS):
        end = 2 * each * sum(partition_for(key.encode(), PARTITIONS) == partition for key in KEYS)
        if end:
            query = f"SELECT next_offset FROM {schema}.consumer_offset WHERE topic = $1 AND partition = $2"

            async def reached(partition: int = partition, end: int = end, query: str = query) -> bool:
                return await value(dsn, query, topic, partition) == end

            await eventually(reached)


async def done(dsn: str, *schemas: str) -> None:
    """Wait until only ticks are left, and nothing waits in the outbox."""

    async def empty() -> bool:
        for schema in schemas:
            jobs = f"SELECT count(*) FROM {schema}.job WHERE type NOT LIKE '%tick' AND held IS DISTINCT FROM 'why'"
            if await value(dsn, jobs) or await value(dsn, f"SELECT count(*) FROM {schema}.outbox"):
                return False
        return True

    async def told() -> Any:
        return [await fetch(dsn, f'SELECT type, origin, "group", state, error FROM {s}.job_overview') for s in schemas]

    try:
        await eventually(empty, seconds=180)
    except AssertionError:
        print(*await told(), sep="\n")
        raise


async def assert_complete(dsns: list[str], kafka: str, invoices: str, count: int) -> None:
    """What was done in all databases: all of it, once, in each key's order."""
    found, ticks = defaultdict(list), defaultdict(list)
    for dsn in dsns:
        for row in await fetch(dsn, "SELECT via, key, number FROM effect ORDER BY id"):
            found[row["via"], row["key"]].append(row["number"])
        for row in await fetch(dsn, "SELECT name, at FROM tick"):
            ticks[row["name"]].append(row["at"])
    for via in ("on_tell", "tell", "on_bill", "bill"):
        for key in KEYS:
            assert found[via, key] == list(range(count)), (via, key)
    for name in ("tell_tick", "bill_tick"):
        assert len(set(ticks[name])) == len(ticks[name]), name
    sent = defaultdict(list)
    for found_record in await records(kafka, invoices):
        sent[found_record.key.decode()].append(Number.model_validate_json(found_record.value).n)
    assert {key: sent[key] for key in KEYS} == {key: list(range(count)) for key in KEYS}


def psql_dump(schema: str, former: str, new: str) -> None:
    env = clean_environment(LC_ALL="C")
    dump = [postgres_program("pg_dump"), "-n", schema, former]
    text = subprocess.run(dump, check=True, capture_output=True, text=True, env=env).stdout
    psql = [postgres_program("psql"), new, "-q", "-v", "ON_ERROR_STOP=1"]
    subprocess.run(psql, check=True, capture_output=True, text=True, input=text, env=env)


@pytest.mark.long
@pytest.mark.parametrize("own_database", [False, True])
async def test_one_service_becomes_two(
    effects: str, topic: Any, sidings_kafka: str, sidings_postgres: str, own_database
):
    rides, orders, invoices = await topic(partitions=PARTITIONS), await topic(partitions=PARTITIONS), await topic()
    names = {"orders": orders, "invoices": invoices, "{bill,": "{bill,bill_tick,"}
    async with connected(effects) as connection:
        await connection.execute(COUNTED)
    for name in (rides, orders):
        await send(sidings_kafka, name, 0, 8)
    async with Part(effects, sidings_kafka, "sidings", invoices, {"tell": rides, "bill": orders}):
        for name in (rides, orders):
            await handled(effects, "sidings", name, 8)
        await migrate(effects, service="billing", schema="billing")
        with pytest.raises(asyncpg.RaiseError, match="origins are held"):
            await perform(effects, "One service becomes two", **names)
    for name in (rides, orders):
        await send(sidings_kafka, name, 8, 12)
    async with connected(effects) as connection:
        await connection.execute(
            f"""SELECT sidings.enqueue('bill', '{{"key": "late", "n": 0}}', '{orders}/0', 'late', delay => '1 s');
                INSERT INTO sidings.job (type, origin, position, held) VALUES
                    ('bill', '{orders}/1', NULL, 'why'), ('tell', '{rides}/1', NULL, 'why');
                SELECT sidings.publish('{invoices}', 'last', '{{"n": 0}}'), sidings.publish('{rides}x', 'k', '{{}}')"""
        )
    jobs = """SELECT id, attempt, failures, position IS NULL, rank() OVER (ORDER BY position)
              FROM {} WHERE type IN ('bill', $1) ORDER BY id"""
    before = await fetch(effects, jobs.format("sidings.job"), f"message:{orders}")
    fences = dict(await fetch(effects, "SELECT origin, epoch FROM sidings.origin"))
    for _ in range(2):  # the second time there is nothing to do
        await perform(effects, "One service becomes two", **names)
    assert await fetch(effects, jobs.format("billing.job"), f"message:{orders}") == before
    assert {row["attempt"] for row in before} > {1}
    assert await value(effects, "SELECT count(*) FROM sidings.outbox") == 1
    await value(effects, "DELETE FROM sidings.outbox")
    new = effects
    if own_database:
        new = await create_database(sidings_postgres, f"billing_{token_hex(4)}")
        await effects_table(new)
        async with connected(new) as connection:
            await connection.execute(COUNTED)
            await connection.execute("SELECT setval('effect_id_seq', 100000)")
        psql_dump("billing", effects, new)
    try:
        tracker = Part(effects, sidings_kafka, "sidings", invoices, {"tell": rides}, orders)
        billing = Part(new, sidings_kafka, "billing", invoices, {"bill": orders})
        async with tracker, billing:
            for name in (rides, orders):
                await send(sidings_kafka, name, 12, 16)
            await handled(effects, "sidings", rides, 16)
            await handled(new, "billing", orders, 16)
            tracker.mended = billing.mended = True
            await done(effects, "sidings")
            await done(new, "billing")
        await assert_complete(list({effects: 0, new: 0}), sidings_kafka, invoices, 16)
        assert await value(new, "SELECT count(*) FROM effect WHERE key = 'late'") == 1
        assert await value(new, "SELECT count(*) FROM billing.job WHERE held = 'why'") == 1
        ran = [row for dsn in {effects, new} for row in await fetch(dsn, "SELECT job, fence, origin FROM run")]
        assert len({row["job"] for row in ran}) == len(ran)
        assert await value(new, "SELECT min(epoch) FROM billing.origin WHERE origin = ANY ($1)", list(fences)) >= 1
        for origin, epoch in await fetch(new, "SELECT origin, epoch FROM billing.origin"):
            assert epoch >= fences.get(origin, 0), origin
    finally:
        if own_database:
            await drop_database(sidings_postgres, new)


@pytest.mark.long
async def test_two_services_become_one(effects, topic, sidings_kafka):
    rides, orders, invoices = await topic(partitions=PARTITIONS), await topic(partitions=PARTITIONS), await topic()
    async with connected(effects) as connection:
        await connection.execute(COUNTED)
    await migrate(effects, service="billing", schema="billing")
    await value(effects, "SELECT setval('billing.job_id_seq', 1000)")  # what is tried in both has other numbers
    for name in (rides, orders):
        await send(sidings_kafka, name, 0, 8)
    tracker = Part(effects, sidings_kafka, "sidings", invoices, {"tell": rides})
    billing = Part(effects, sidings_kafka, "billing", invoices, {"bill": orders})
    async with tracker, billing:
        await handled(effects, "sidings", rides, 8)
        await handled(effects, "billing", orders, 8)
        with pytest.raises(asyncpg.RaiseError, match="origins are held"):
            await perform(effects, "Two services become one")
    for name in (rides, orders):
        await send(sidings_kafka, name, 8, 12)
    async with connected(effects) as connection:
        await connection.execute(
            f"""SELECT setval('sidings.job_id_seq', 990), setval('billing.job_id_seq', 1);
                SELECT billing.enqueue('bill', json_build_object('key', 'late', 'n', n), '{orders}/0', 'late')
                FROM generate_series(0, 100) n;
                SELECT sidings.enqueue('tell', json_build_object('key', 'late', 'n', n), '{rides}/0', 'late')
                FROM generate_series(0, 100) n;
                INSERT INTO billing.job (type, origin, position, held) VALUES ('bill', '{orders}/1', NULL, 'why');
                SELECT billing.publish('{invoices}', 'last', '{{"n": 0}}')"""
        )
    left = await value(effects, "SELECT (SELECT count(*) FROM sidings.job) + (SELECT count(*) FROM billing.job)")
    tried = "SELECT id, attempt FROM {}.job WHERE type IN ('bill', 'message:{}') AND attempt > 1 ORDER BY id"
    before = await fetch(effects, tried.format("billing", orders))
    async with connected(effects) as connection:
        await connection.execute(f"UPDATE sidings.job SET attempt = 2 WHERE id = {before[0]['id']}")
    with pytest.raises(asyncpg.UniqueViolationError, match="job_pkey"):
        await perform(effects, "Two services become one")
    await value(effects, "UPDATE sidings.job SET attempt = 1 WHERE id = $1", before[0]["id"])
    for _ in range(2):
        await perform(effects, "Two services become one")
    assert before
    assert await fetch(effects, tried.format("sidings", orders)) == before
    assert await value(effects, "SELECT count(*) FROM sidings.job") == left
    both = Part(effects, sidings_kafka, "sidings", invoices, {"tell": rides, "bill": orders})
    async with both:
        for name in (rides, orders):
            await send(sidings_kafka, name, 12, 16)
            await handled(effects, "sidings", name, 16)
        both.mended = True
        await done(effects, "sidings")
    await assert_complete([effects], sidings_kafka, invoices, 16)
    for via in ("tell", "bill"):
        told = await fetch(effects, "SELECT number FROM effect WHERE key = 'late' AND via = $1 ORDER BY id", via)
        assert [row[0] for row in told] == list(range(101)), via


async def test_directory_tables_go_over_where_two_services_become_one(database, topic, sidings_kafka):
    """Their triggers went on to write into the outbox of the service that is gone, where no relay reads."""
    name = await topic(config={"cleanup.policy": "compact"})
    await migrate(database, service="billing", schema="billing")
    async with connected(database) as connection:
        await connection.execute(block("directory-tables.md", "The table", "sql"))
        await connection.execute(
            "SELECT billing.directory_table('terminal_acquirer', $1, '{terminal_id}', 'is_active')", name
        )
        change = "INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ($1, 'a')"
        await connection.execute(change, "1")
        for _ in range(2):
            await perform(database, "Two services become one")
        await connection.execute(change, "2")
    async with relaying(database, sidings_kafka):
        await emptied(database)
        assert sorted(record.key for record in await records(sidings_kafka, name)) == [b"1", b"2"]


async def test_a_job_gets_no_number_that_has_been_anothers_where_two_services_become_one(database):
    """It had the other's attempts, and when it had failed, requeue said that this had been done, as another job."""
    await migrate(database, service="billing", schema="billing")
    columns = "job_id, epoch, enqueued_at, finished_at, executor, attempt, outcome, priority, type, origin, payload"
    given = "id, 1, enqueued_at, now(), gen_random_uuid(), 1, 'discarded', 0, type, origin, '{}'"
    ended = f"INSERT INTO sidings.job_history ({columns}) SELECT {given} FROM sidings.job"
    async with connected(database) as connection:
        await connection.execute("SELECT sidings.enqueue('tell', '{}', 'rides/0', 'a')")
        await connection.execute(ended)
        told = await connection.fetchval("DELETE FROM sidings.job RETURNING id")
        await connection.execute("SELECT sidings.requeue_job($1, 'alice')", told)
        await connection.execute("DELETE FROM sidings.job")
        assert await connection.fetchval("SELECT billing.enqueue('bill', '{}', 'orders/0', 'a')") == told
        await perform(database, "Two services become one")
        await connection.execute(ended)
        bill = await connection.fetchval("DELETE FROM sidings.job RETURNING id")
        await connection.execute("SELECT sidings.requeue_job($1, 'alice')", bill)
    assert await value(database, "SELECT type FROM sidings.job") == "bill"


LATEST = """INSERT INTO {}.job (id, type, origin, "group", policy, attempt, payload) OVERRIDING SYSTEM VALUE
            SELECT id, type, 'o/0', 'a', 1, attempt, to_json(n)
            FROM unnest($1::int[], $2::text[], $3::int[]) WITH ORDINALITY u (id, type, attempt, n) ORDER BY n DESC"""


async def numbered(connection: asyncpg.Connection, schema: str, type: str, **numbers: int) -> None:
    """Jobs of one group of policy latest, in this order, which the table has the other way round. t…: it was tried."""
    tried = [2 if name.startswith("t") else 1 for name in numbers]
    await connection.execute(LATEST.format(schema), [*numbers.values()], [type] * len(numbers), tried)
    query = "SELECT setval($1::text::regclass, greatest($2, nextval($1::text::regclass)))"
    await connection.execute(query, f"{schema}.job_id_seq", max(numbers.values()))


@pytest.mark.parametrize(
    ("tell", "bill"),
    [
        ({"first": 100}, {"older": 90, "newer": 200}),
        ({"first": 100}, {"older": 90, "newer": 95}),
        ({"first": 100}, {"older": 90, "tried": 200, "newer": 210}),
        ({"older": 3, "newer": 5, "newest": 6}, {"tried": 5}),
        ({"older": 3, "tried": 4, "newer": 5, "newest": 6}, {"tried": 5}),
    ],
    ids=["some of them", "all of them", "one is older than a tried one", "of the other one", "of it, one was tried"],
)
async def test_jobs_are_numbered_in_their_order_where_two_services_become_one(
    database: str, tell: dict[str, int], bill: dict[str, int]
) -> None:
    """The largest number is the newest one's. Only a part of them got new ones, so the newest state was superseded."""
    await migrate(database, service="billing", schema="billing")
    async with connected(database) as connection:
        await numbered(connection, "sidings", "tell", **tell)
        await numbered(connection, "billing", "bill", **bill)
        await perform(database, "Two services become one")
        for type, jobs in (("tell", tell), ("bill", bill)):
            query = "SELECT id, payload::text::int - 1 AS n FROM sidings.job WHERE type = $1 ORDER BY id"
            found = await connection.fetch(query, type)
            assert [row["n"] for row in found] == [*range(len(jobs))]
            tried = [n for n, name in enumerate(jobs) if name.startswith("t")]
            assert [found[n]["id"] for n in tried] == [[*jobs.values()][n] for n in tried]


async def test_no_two_jobs_have_one_position_where_two_services_become_one_and_their_order_stays(database):
    """Each schema numbers its own. Of two jobs at one position a read that ends between them passes one over, and later
    ones of its group ran before it."""
    await migrate(database, service="billing", schema="billing")
    async with connected(database) as connection:
        await stored(connection, "sidings", "tell", range(5))
        await stored(connection, "billing", "bill", range(5))
        before = [await in_order(connection, schema) for schema in ("sidings", "billing")]
        assert [position for position, *_ in before[0]] == [position for position, *_ in before[1]]
        await perform(database, "Two services become one")
        await stored(connection, "sidings", "tell", range(5, 6))
        found = await in_order(connection, "sidings")
    assert len({position for position, *_ in found}) == 11
    assert [job for _, *job in found if job[0] == "tell"] == [["tell", n] for n in range(6)]
    assert [job for _, *job in found if job[0] == "bill"] == [["bill", n] for n in range(5)]


async def test_what_has_come_since_one_service_became_two_goes_behind_what_is_there(database):
    """Positions were taken twice, and what was published twice with one number ended the statements."""
    await migrate(database, service="billing", schema="billing")
    sent = "SELECT convert_from(value, 'UTF8') FROM billing.outbox ORDER BY id"
    parked = """INSERT INTO {0}.outbox_parked (id, published_at, slot, topic, value, error)
                SELECT nextval('{0}.outbox_id'), now(), 0, 'invoices', '', ''"""
    async with connected(database) as connection:
        for first in (0, 10):
            for schema, begin in (("sidings", first), ("billing", first + 5)):
                await stored(connection, schema, "bill", range(begin, begin + 5))
                await connection.execute(
                    f"SELECT {schema}.publish('invoices', 'k', to_json($1::int + n)) FROM generate_series(0, 4) n",
                    begin,
                )
                await connection.execute(parked.format(schema))
                if schema == "sidings" and not first:
                    await perform(database, "One service becomes two")
        await perform(database, "One service becomes two")
        found = await in_order(connection, "billing")
        expected = [*range(10), *range(15, 20), *range(10, 15)]
        assert len({position for position, *_ in found}) == 20
        assert [n for _, _, n in found] == expected
        assert [int(row[0]) for row in await connection.fetch(sent)] == expected
        assert await connection.fetchval("SELECT count(*) FROM billing.outbox_parked") == 4


async def stored(connection: asyncpg.Connection, schema: str, kind: str, numbers: range) -> None:
    """Jobs of one group. The first ones then stand last in the table."""
    for n in numbers:
        await connection.execute(f"SELECT {schema}.enqueue($1, to_json($2::int), 'orders/0', 'a')", kind, n)
    changed = f"UPDATE {schema}.job SET priority = 1 WHERE type = $1 AND payload::text::int < $2"
    await connection.execute(changed, kind, numbers[len(numbers) // 2])


async def in_order(connection: asyncpg.Connection, schema: str) -> list[tuple[int, str, int]]:
    query = f"SELECT position, type, payload::text::int FROM {schema}.job ORDER BY position, id"
    return [tuple(row) for row in await connection.fetch(query)]


async def test_what_was_resumed_after_one_service_had_become_two_stays_so(database):
    """What the statements had copied stayed, so that all of it was paused once more where they were performed again."""
    await migrate(database, service="billing", schema="billing")
    pauses = "SELECT type, origin FROM {}.pause ORDER BY type, origin"
    async with connected(database) as connection:
        await connection.execute(
            """SELECT sidings.enqueue(type, '{}', 'orders/0', 'a') FROM unnest('{bill,tell}'::text[]) type;
               SELECT sidings.pause_jobs('alice', 'away', type => type) FROM unnest('{bill,tell}'::text[]) type;
               SELECT sidings.pause_jobs('alice', 'the bank is away', origin => 'orders/0');
               SELECT sidings.pause_topic(topic, 'alice', 'away') FROM unnest('{orders,legs}'::text[]) topic"""
        )
        await perform(database, "One service becomes two")
        assert [tuple(row) for row in await connection.fetch(pauses.format("billing"))] == [
            ("bill", None), (None, "orders/0")
        ]  # fmt: skip
        assert [tuple(row) for row in await connection.fetch(pauses.format("sidings"))] == [
            ("tell", None), (None, "orders/0")
        ]  # fmt: skip
        topics = "SELECT array_agg(topic) FROM {}.topic_pause"
        assert await connection.fetchval(topics.format("billing")) == ["orders"]
        assert await connection.fetchval(topics.format("sidings")) == ["legs"]
        await connection.execute("DELETE FROM billing.pause; DELETE FROM billing.topic_pause")
        await perform(database, "One service becomes two")
        assert await connection.fetch(pauses.format("billing")) == []
        assert await connection.fetchval(topics.format("billing")) is None
