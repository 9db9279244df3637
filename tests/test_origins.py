"""The origin of a key: in Python, in SQL and in Kafka it is the same."""

import asyncio
import subprocess
import sys
import zlib
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.partitioner import murmur2
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from sidings import Job, KafkaSettings, Message, Service, Transaction
from sidings.devstack.fixtures import TopicFactory
from sidings.errors import ConfigurationError, EnqueueError, MissingOrigin
from sidings.executor import PostgresSettings
from sidings.jobs import Registry
from sidings.kafka import Topics, partition_for
from sidings.schema.refusals import refused_settings

from .guide import run
from .outbox_support import arrived, records, relay_process
from .support import SECONDS, Ride, a_role, connected, eventually, fetch, value
from .ways import WAYS, opened

# From org.apache.kafka.common.utils.UtilsTest.
MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
KNOWN = "INSERT INTO sidings.topic (topic, partitions, partitioner) VALUES ('positions', 12, 'murmur2')"


async def test_murmur2_in_sql_gives_kafkas_own_vectors(database: str):
    async with connected(database) as connection:
        for data, signed in MURMUR2.items():
            assert await connection.fetchval("SELECT sidings.murmur2($1)", data) == signed % 2**32


def test_murmur2_in_python_gives_kafkas_own_vectors():
    for data, signed in MURMUR2.items():
        assert partition_for(data, 2**31 - 1) == (signed & 0x7FFFFFFF) % (2**31 - 1)


async def test_crc32_in_sql_gives_the_check_value_of_its_definition(database: str):
    assert await value(database, "SELECT sidings.crc32('123456789')") == 0xCBF43926 == zlib.crc32(b"123456789")


async def test_python_and_sql_choose_the_same_partition_for_any_key(database: str):
    pairs: list[tuple[bytes, int, Any]] = []

    @given(
        key=st.binary(max_size=70),
        partitions=st.integers(1, 2**31 - 1),
        partitioner=st.sampled_from(["murmur2", "crc32"]),
    )
    @settings(max_examples=500, database=None)
    def collect(key: bytes, partitions: int, partitioner: str) -> None:
        pairs.append((key, partitions, partitioner))

    collect()
    pairs += [
        (bytes([n]) * size, 7, kind) for n in (0, 127, 128, 255) for size in range(9) for kind in ("murmur2", "crc32")
    ]
    async with connected(database) as connection:
        query = "SELECT sidings.partition_for(k, p, h) FROM unnest($1::bytea[], $2::int[], $3::text[]) u (k, p, h)"
        rows = await connection.fetch(query, *map(list, zip(*pairs, strict=True)))
    wrong = [(pair, row[0]) for pair, row in zip(pairs, rows, strict=True) if row[0] != partition_for(*pair)]
    assert wrong == []


async def test_a_topic_that_nobody_has_seen_is_refused_with_what_to_do(database: str):
    async with connected(database) as connection:
        with pytest.raises(
            asyncpg.InvalidParameterValueError, match="partitions of the topic 'positions' are not"
        ) as caught:
            await connection.fetchval("SELECT sidings.origin_for('a', 'positions')")
        assert "topics=" in str(caught.value.hint)
        with pytest.raises(asyncpg.InvalidParameterValueError, match="needs a key"):
            await connection.fetchval("SELECT sidings.origin_for(NULL, 'positions')")
    topics = Topics(PostgresSettings(dsn=database), {})
    await topics.load()
    with pytest.raises(MissingOrigin, match=r"'positions' are not known yet \(known: none\).*topics="):
        topics.origin_for("a", "positions")
    await topics.close()


async def test_a_relay_alone_that_does_not_know_the_partitioners_ends_and_says_so(
    database: str, sidings_kafka: str, monkeypatch: pytest.MonkeyPatch
):
    """Else it would send a key to one partition, and the service's own relay to another."""
    async with connected(database) as connection:
        await connection.execute(f"{KNOWN}; {KNOWN.replace('positions', 'etas').replace('murmur2', 'crc32')}")

    async def alone(dsn: str) -> subprocess.CompletedProcess[str]:
        options = ("--service", "test", "--postgres", dsn, "--kafka", sidings_kafka)
        command = (sys.executable, "-m", "sidings.kafka.outbox", *options)
        return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=SECONDS)

    async with a_role(database) as (role, dsn), connected(database) as connection:
        await connection.execute(f"REVOKE SELECT ON sidings.topic FROM {role}")
        ended = await alone(dsn)
    assert ended.returncode == 1
    assert "has to know how its service chooses partitions: permission denied for table topic" in ended.stderr
    ended = await alone(database)
    assert ended.returncode == 1
    assert "set SIDINGS_KAFKA_PARTITIONERS" in ended.stderr
    assert ended.stderr.rstrip().endswith('{"etas": "crc32"}')
    monkeypatch.setenv("SIDINGS_KAFKA_PARTITIONERS", '{"etas": "crc32"}')
    async with relay_process(database, sidings_kafka) as relay:
        assert await relay.terminate() == 0


async def test_a_process_that_only_enqueues_learns_of_added_partitions(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The counts were read once: it went by the former one until its restart."""
    monkeypatch.setattr("sidings.kafka.topics._LOAD_SECONDS", 0.02)
    service = Service("test", postgres=database, kafka="127.0.0.1:1", prometheus=None)
    await fetch(database, "INSERT INTO sidings.topic (topic, partitions) VALUES ('positions', 1)")
    before = asyncio.all_tasks()
    async with service.connected():
        assert service.origin_for("a", "positions") == "positions/0"
        await fetch(database, "UPDATE sidings.topic SET partitions = 24, former = '{1}'")
        grown = f"positions/{partition_for(b'a', 24)}"
        await eventually(lambda: service.origin_for("a", "positions") == grown)
    assert asyncio.all_tasks() == before
    assert caplog.messages == []


async def test_a_process_that_only_enqueues_says_when_it_learns_of_nothing_any_more(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As where Postgres moves behind a PgBouncer that the settings do not tell of."""
    monkeypatch.setattr("sidings.kafka.topics._LOAD_SECONDS", 0.02)
    service = Service("test", postgres=database, kafka="127.0.0.1:1", prometheus=None)

    async def refuse(*_: object, **__: object) -> None:
        told = refused_settings(asyncpg.ProtocolViolationError("unsupported startup parameter: jit"))
        assert told is not None
        raise told

    async with service.connected():
        monkeypatch.setattr("sidings.executor.link.connect_any", refuse)
        await fetch(
            database, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'sidings'"
        )
        await eventually(lambda: any("partition counts are not read any more" in told for told in caplog.messages))
        async with service.transaction() as tx:
            await tx.execute("SELECT")
    assert [r.levelname for r in caplog.records if "DSN leads to PgBouncer" in r.getMessage()] == ["CRITICAL"]


@pytest.mark.parametrize("why", ["takes no connections", "has a table locked"])
async def test_a_relay_alone_waits_for_the_partitioners(
    sidings_postgres: str, database: str, sidings_kafka: str, why: str
):
    """It ended with a traceback, as during a migration or while its database was renamed."""
    options, name = ("--service", "test", "--postgres", database, "--kafka", sidings_kafka), database.rpartition("/")[2]
    command, pipe = (sys.executable, "-m", "sidings.kafka.outbox", *options), asyncio.subprocess.PIPE
    async with connected(sidings_postgres) as elsewhere, connected(database) as locking:
        if why == "has a table locked":
            await locking.execute("BEGIN; LOCK TABLE sidings.topic")
        else:
            await elsewhere.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        relays = [await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe) for _ in range(2)]
        try:
            for relay in relays:
                assert relay.stderr is not None
                line = await asyncio.wait_for(relay.stderr.readline(), SECONDS)
                assert b"the service's partitioners could not be read, trying again: " in line
            relays[0].terminate()
            assert await asyncio.wait_for(relays[0].wait(), SECONDS) == 0
            await locking.execute("ROLLBACK")
            await elsewhere.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            assert relays[1].stdout is not None
            assert b"started" in await asyncio.wait_for(relays[1].stdout.readline(), SECONDS)
            relays[1].terminate()
            assert await asyncio.wait_for(relays[1].wait(), SECONDS) == 0
        finally:
            await elsewhere.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
            for relay in relays:
                if relay.returncode is None:
                    relay.kill()
                await relay.communicate()


@pytest.mark.parametrize("partitioner", ["murmur2", "crc32"])
async def test_the_origin_is_that_of_the_topics_partitioner_over_its_partitions(database: str, partitioner: Any):
    topics = Topics(PostgresSettings(dsn=database), {})
    async with connected(database) as connection:
        await connection.execute(KNOWN.replace("murmur2", partitioner))
        await topics.load()
        for key in ("a", "transport-17", "ключ"):
            expected = f"positions/{partition_for(key.encode(), 12, partitioner)}"
            assert topics.origin_for(key, "positions") == topics.origin_for(key.encode(), "positions") == expected
            assert await connection.fetchval("SELECT sidings.origin_for($1, 'positions')", key) == expected
    wrong: Any
    for wrong in (17, UUID(int=17), None):  # the length of a number was asked for
        with pytest.raises(EnqueueError, match=f"origin_for.*{wrong}.*: give the key as its messages have it: str or"):
            topics.origin_for(wrong, "positions")
    await topics.close()


async def test_a_service_remembers_partitions_and_agrees_with_aiokafkas_producer(
    database: str, sidings_kafka: str, topic: TopicFactory
):
    name, home = await topic("positions", partitions=7), await topic("transports", partitions=3)
    service = Service(
        "test",
        postgres=database,
        kafka=KafkaSettings(bootstrap=sidings_kafka, partitioners={home: "crc32"}),
        topics=[name],
        prometheus=CollectorRegistry(),
    )

    @service.job(group="transport", home=home)
    async def ride(job: Job[Ride]) -> None:
        seen.append((job.origin, job.payload.transport))

    seen: list[tuple[str, str]] = []
    with pytest.raises(MissingOrigin, match="must be running"):
        service.origin_for("a", name)
    async with asyncio.timeout(SECONDS), service:
        rows = "SELECT topic, partitions, partitioner FROM sidings.topic ORDER BY partitions"
        stored = await eventually(lambda: fetch(database, rows), "the topics are remembered")
        assert [tuple(row) for row in stored] == [(home, 3, "crc32"), (name, 7, "murmur2")]
        async with AIOKafkaProducer(bootstrap_servers=sidings_kafka) as producer:
            for n in range(30):
                sent = await producer.send_and_wait(name, b"x", key=f"transport-{n}".encode())
                assert service.origin_for(f"transport-{n}", name) == f"{name}/{sent.partition}"
        async with service.transaction() as tx:  # nobody consumes the home, but its jobs run
            await ride.enqueue(tx, Ride(transport="a"))
        await eventually(lambda: seen, "the job at home runs")
    assert seen == [(f"{home}/{zlib.crc32(b'a') % 3}", "a")]


@pytest.mark.parametrize("partitioner", ["murmur2", "crc32"])
async def test_outbox_producer_and_dead_letters_send_a_key_to_the_partition_that_is_its_origin(
    database: str, sidings_kafka: str, topic: TopicFactory, partitioner: Any
):
    """They hashed every key as Java does: in a topic of other producers it was in another partition than theirs, so one
    group ran in two origins at once."""
    name, source = await topic("positions", partitions=7), await topic("transports")
    service = Service(
        "test",
        postgres=database,
        kafka=KafkaSettings(bootstrap=sidings_kafka, partitioners={name: partitioner}),
        topics=[name],
        prometheus=CollectorRegistry(),
    )

    @service.consumer(source, stateless=True, dead_letter=name)
    async def handle(message: Message[Ride]) -> None: ...

    keys = [f"transport-{n}" for n in range(30)]
    async with asyncio.timeout(SECONDS), service:
        await eventually(lambda: value(database, "SELECT true FROM sidings.topic WHERE topic = $1", name))
        async with service.transaction() as tx:
            await service.outbox.publish_many(tx, name, [(key, b"outbox") for key in keys])
            receipt = await service.outbox.publish(tx, name, key="x", partition_key="transport-1", value=b"partition")
        await service.outbox.published(receipt)
        for key in keys:
            await service.producer.send(name, key=key, value=b"producer")
            await service.producer.send(source, key=key, value=b"letter")

        async def all_have_arrived() -> bool:
            return await arrived(sidings_kafka, name) == 3 * len(keys) + 1

        await eventually(all_have_arrived)
        origins = {key.encode(): service.origin_for(key, name) for key in keys}
    hashes = {key: zlib.crc32(key) if partitioner == "crc32" else murmur2(key) & 0x7FFFFFFF for key in origins}
    assert origins == {key: f"{name}/{hashed % 7}" for key, hashed in hashes.items()}
    found = [(record.key, record.value, f"{name}/{record.partition}") for record in await records(sidings_kafka, name)]
    assert (b"x", b"partition", origins[b"transport-1"]) in found
    for way in (b"outbox", b"producer", b"letter"):
        assert {key: origin for key, sent, origin in found if sent == way} == origins, way


async def test_while_partition_counts_cannot_be_written_health_says_that_they_are_waited_for(
    database: str, sidings_kafka: str, topic: TopicFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.5)
    name, handled = await topic("positions"), asyncio.Event()
    service = Service("test", postgres=database, kafka=sidings_kafka, prometheus=None)

    @service.consumer(name, model=bytes)
    async def handle(message: Message[bytes], tx: Transaction) -> None:
        handled.set()

    async with AIOKafkaProducer(bootstrap_servers=sidings_kafka) as producer:
        await producer.send_and_wait(name, b"x")
    async with connected(database) as admin:
        transaction = admin.transaction()
        await transaction.start()
        await admin.execute("LOCK sidings.topic IN SHARE MODE")  # it can be read, and not written
        async with service:
            await eventually(lambda: "sidings.topic" in str(service.problems()), service.problems)
            assert not handled.is_set()
            await transaction.rollback()
            async with asyncio.timeout(SECONDS):
                await handled.wait()
            await eventually(lambda: service.problems() == [], service.problems)


async def test_the_first_message_of_all_can_have_a_job_at_home(database: str, sidings_kafka: str, topic: TopicFactory):
    """It failed once, and was told of as a failure: nobody had written down yet how many partitions the topic has."""
    name, home = await topic("positions"), await topic("transports", partitions=3)
    service = Service("test", postgres=database, kafka=sidings_kafka, prometheus=None)
    calls, enqueued = 0, asyncio.Event()

    @service.job(group="transport", home=home)
    async def ride(job: Job[Ride]) -> None: ...

    @service.consumer(name, model=bytes)
    async def handle(message: Message[bytes], tx: Transaction) -> None:
        nonlocal calls
        calls += 1
        await ride.enqueue(tx, Ride(transport="a"))
        enqueued.set()

    async with AIOKafkaProducer(bootstrap_servers=sidings_kafka) as producer:
        await producer.send_and_wait(name, b"x")
    async with asyncio.timeout(SECONDS), service:
        await enqueued.wait()
    assert calls == 1


# -- home ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAYS)
async def test_jobs_of_a_type_with_a_home_go_where_their_groups_belong(database: str, name: str):
    ride = Registry().job(name="ride", group="transport", home="positions", payload=Ride)(lambda job: None)
    keys = [f"t-{n}" for n in range(20)]
    async with opened(name, database) as way:
        await way.begin()
        with pytest.raises(MissingOrigin, match=r"home in 'positions'.*not known yet.*topics="):
            await way.enqueue(ride, Ride(transport="t-0"))
        with pytest.raises(MissingOrigin, match=r"home in 'positions'"):
            await way.enqueue_many(ride, [Ride(transport="t-0")])
        with pytest.raises(MissingOrigin, match=r"home in 'positions'"):
            await way.enqueue(ride, Ride(transport="t-0"), unique_key="u")
        await way.execute(KNOWN)  # the transaction is still usable
        ids = [await way.enqueue(ride, Ride(transport="t-0"))]
        ids += await way.enqueue_many(ride, [Ride(transport=key) for key in keys])
        ids += [await way.enqueue(ride, Ride(transport="t-0"), origin="elsewhere/0")]
        ids += [await way.enqueue(ride, Ride(transport="t-0"), delay=60)]
        assert await way.enqueue_many(ride, []) == []
        await way.end("COMMIT")
    rows = await fetch(database, 'SELECT id, "group", origin, position FROM sidings.job ORDER BY id')
    assert [row["id"] for row in rows] == ids
    home = {key: f"positions/{partition_for(key.encode(), 12)}" for key in keys}
    assert len(set(home.values())) > 5
    expected = [home["t-0"], *home.values(), "elsewhere/0", home["t-0"]]
    assert [row["origin"] for row in rows] == expected
    assert [row["position"] is None for row in rows] == [False] * 22 + [True]


FORGOTTEN = """
    CREATE FUNCTION forget() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF NEW."group" = 't-1' THEN
            DELETE FROM sidings.topic;
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER forget BEFORE INSERT ON sidings.job FOR EACH ROW EXECUTE FUNCTION forget()
"""


@pytest.mark.parametrize(
    ("name", "headers"), [*((name, None) for name in WAYS), ("Transaction", None), ("asyncpg", [None] * 5)]
)
async def test_where_the_home_is_forgotten_meanwhile_none_of_many_jobs_is_stored(database: str, name: str, headers):
    """Those before it were, and their ids were all that came back."""
    ride = Registry().job(name="ride", group="transport", home="positions", payload=Ride)(lambda job: None)
    rides = [Ride(transport=f"t-{n}") for n in range(5)]
    async with connected(database) as connection:
        await connection.execute(f"{KNOWN}; {FORGOTTEN}")
    async with opened("asyncpg" if name == "Transaction" else name, database) as way:
        await way.begin()
        if name == "Transaction":
            way.connection = Transaction(way.connection)
        with pytest.raises(MissingOrigin, match=r"'positions'.*sidings\.topic.*roll the transaction back"):
            await way.enqueue_many(ride, rides, headers=headers)
        if name == "Transaction":
            way.connection = way.connection.connection
        await way.end("COMMIT")  # of one who goes on all the same
    assert await fetch(database, "SELECT id FROM sidings.job") == []
    assert await value(database, "SELECT count(*) FROM sidings.topic") == 1


async def test_a_row_that_a_trigger_refuses_is_not_taken_for_a_missing_home(database: str):
    ride = Registry().job(name="ride", group="transport", home="positions", payload=Ride)(lambda job: None)
    async with connected(database) as connection:
        await connection.execute(KNOWN)
        await connection.execute("ALTER TABLE sidings.job ADD origin_of text NOT NULL")
        with pytest.raises(asyncpg.NotNullViolationError, match="origin_of"):
            async with connection.transaction():
                await ride.enqueue_many(connection, [Ride(transport="a")])


async def test_executors_of_the_home_are_told(database: str):
    registry = Registry()
    ride = registry.job(name="ride", group="transport", home="positions", payload=Ride)(lambda job: None)
    async with connected(database) as connection, connection.transaction():
        await connection.execute(KNOWN)
        tx = Transaction(connection)
        await ride.enqueue(tx, Ride(transport="a"))
        await ride.enqueue_many(tx, [Ride(transport="b"), Ride(transport="c")])
        assert tx.enqueued.keys() == {f"positions/{partition_for(key, 12)}" for key in (b"a", b"b", b"c")}


def test_a_home_without_a_group_is_refused():
    with pytest.raises(ConfigurationError, match=r"home='positions' needs .* group="):
        Registry().job(name="ride", home="positions", payload=Ride)(lambda job: None)


async def test_the_example_of_the_guide_stores_a_job_in_its_keys_origin(database: str):
    delivered = run("enqueueing.md", "", "Which origin")["delivered"]
    async with connected(database) as connection:
        await connection.execute(KNOWN)
    async with Service("test", postgres=database, prometheus=CollectorRegistry()) as service:
        await delivered(service, "t-1", datetime.now(UTC))
    assert await value(database, "SELECT origin FROM sidings.job") == f"positions/{partition_for(b't-1', 12)}"
