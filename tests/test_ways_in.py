"""Jobs through every kind of connection: one suite that all of them pass, then what is particular to each."""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from unittest.mock import Mock

import asyncpg
import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sidings.errors import (
    EnqueueError,
    InvalidPayload,
    MissingGroup,
    MissingOrigin,
    NotInTransaction,
    SchemaMissing,
)
from sidings.jobs import Job, Registry, Retry, Transaction
from sidings.kafka import partition_for
from sidings.schema import migrate
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.util import await_only
from tenacity import wait_none

from .guide import run
from .support import ORIGIN, Ride, connected, drained, enqueue, fetch, running, value
from .ways import WAYS, Way, opened

PAGE = "enqueueing.md"
COLUMNS = 'type, origin, "group", run_at, priority, policy, payload::text, headers, position IS NULL AS delayed'


def declare(schema: str = "sidings", **options: Any) -> Any:
    registry = Registry(schema=schema)

    async def ride(job: Job[Ride]) -> None: ...

    arguments: dict[str, Any] = {"group": "transport", **options}
    return registry.job(**arguments)(ride)


# -- what all of them do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAYS)
async def test_a_job_shares_the_fate_of_the_callers_transaction(database: str, name: str):
    ride = declare()
    async with connected(database) as observer, opened(name, database) as way:
        await observer.execute("CREATE TABLE transport (id text)")
        for ending in ("ROLLBACK", "COMMIT"):
            await way.begin()
            await way.execute(f"INSERT INTO transport VALUES ('{ending}')")
            await way.enqueue(ride, Ride(transport=ending), origin=ORIGIN)
            await way.enqueue_many(ride, [Ride(transport=ending)] * 2, origin=ORIGIN)
            assert await observer.fetchval('SELECT count(*) FROM sidings.job WHERE "group" = $1', ending) == 0
            await way.end(ending)
        assert [row["group"] for row in await observer.fetch('SELECT "group" FROM sidings.job')] == ["COMMIT"] * 3
        assert await observer.fetchval("SELECT array_agg(id) FROM transport") == ["COMMIT"]
        writers = "SELECT txid::text FROM sidings.job UNION SELECT xmin::text FROM transport"
        assert len(await observer.fetch(writers)) == 1


@pytest.mark.parametrize("name", WAYS)
async def test_a_connection_in_autocommit_is_refused(database: str, name: str):
    ride = declare()
    async with opened(name, database, autocommit=True) as way:
        for attempt in (
            way.enqueue(ride, Ride(transport="a"), origin=ORIGIN),
            way.enqueue_many(ride, [Ride(transport="a")], origin=ORIGIN),
            way.enqueue_many(ride, [], origin=ORIGIN),
        ):
            with pytest.raises(NotInTransaction, match=r"transaction\(\):|atomic\(\):|without isolation_level"):
                await attempt
    assert await value(database, "SELECT count(*) FROM sidings.job") == 0


@pytest.mark.parametrize("name", [name for name in WAYS if name != "asyncpg"])
async def test_every_way_stores_what_asyncpg_stores(database: str, name: str):
    ride, alone = declare(), declare(name="alone", group=None)
    odd = "$1 %s %(p1)s :a ::b \\ ' \" ü \U0001f682 \0"
    group = odd.replace("\0", "")
    run_at = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
    for one in ("asyncpg", name):
        async with opened(one, database) as way:
            await way.begin()
            await way.enqueue(ride, Ride(transport=odd, number=7), origin="t/3", group=group, priority=-5)
            await way.enqueue(ride, Ride(transport="a"), origin="t/3", headers={"correlation_id": odd[:-1]})
            await way.enqueue(ride, Ride(transport="b"), origin="t/3", run_at=run_at)
            await way.enqueue(alone, Ride(transport=odd), origin="t/4")
            rides = [Ride(transport=group), Ride(transport="c", number=3)]
            await way.enqueue_many(ride, rides, origin="t/5", priority=9, headers={"a": "b"})
            await way.enqueue_many(alone, [Ride(transport=odd), Ride()], origin="t/6", run_at=run_at)
            each = [{"a": odd[:-1]}, None]
            await way.enqueue_many(ride, rides, origin="t/5", headers=each)
            await way.end("COMMIT")
    rows = await fetch(database, f"SELECT {COLUMNS} FROM sidings.job ORDER BY id")
    assert len(rows) == 20
    assert [dict(row) for row in rows[10:]] == [dict(row) for row in rows[:10]]


@pytest.mark.parametrize("name", WAYS)
async def test_a_delayed_job_gets_no_position(database: str, name: str):
    ride = declare()
    async with opened(name, database) as way:
        await way.begin()
        await way.enqueue(ride, Ride(transport="a"), origin=ORIGIN, delay=90)
        await way.enqueue_many(ride, [Ride(transport="b")], origin=ORIGIN, delay=timedelta(seconds=90))
        await way.enqueue(ride, Ride(transport="c"), origin=ORIGIN, delay=0)
        await way.end("COMMIT")
    rows = await fetch(database, "SELECT position, run_at - enqueued_at AS delay FROM sidings.job ORDER BY id")
    assert [row["position"] is None for row in rows] == [True, True, False]
    assert all(abs(row["delay"].total_seconds() - 90) < 5 for row in rows[:2])
    assert rows[2]["delay"] is None


@pytest.mark.parametrize("name", WAYS)
async def test_ids_are_returned_in_the_order_of_the_payloads(database: str, name: str):
    ride = declare()
    async with opened(name, database) as way:
        await way.begin()
        first = await way.enqueue(ride, Ride(transport="a"), origin=ORIGIN)
        ids = await way.enqueue_many(ride, [Ride(transport=str(n)) for n in range(50)], origin=ORIGIN)
        assert await way.enqueue_many(ride, [], origin=ORIGIN) == []
        await way.end("COMMIT")
    rows = await fetch(database, 'SELECT id, "group" FROM sidings.job ORDER BY position')
    assert [tuple(row) for row in rows] == [(first, "a"), *zip(ids, map(str, range(50)), strict=True)]


@pytest.mark.parametrize("name", WAYS)
async def test_what_is_refused_leaves_the_transaction_usable(database: str, name: str):
    ride = declare()
    async with opened(name, database) as way:
        await way.begin()
        refused = [
            (InvalidPayload, {"number": "no number"}, {"origin": ORIGIN}),
            (MissingOrigin, Ride(transport="a"), {}),
            (MissingGroup, Ride(), {"origin": ORIGIN}),
            (EnqueueError, Ride(transport="a"), {"origin": ORIGIN, "delay": 1, "run_at": datetime.now(UTC)}),
            (EnqueueError, Ride(transport="a\x1f"), {"origin": ORIGIN}),
            (EnqueueError, Ride(transport="a"), {"origin": ORIGIN, "headers": {"a": "\ud800"}}),
            (EnqueueError, Ride(transport="a"), {"origin": ORIGIN, "priority": 101}),
        ]
        for error, payload, options in refused:
            with pytest.raises(error):
                await way.enqueue(ride, payload, **options)
            if "group" not in options:
                with pytest.raises(error):
                    await way.enqueue_many(ride, [payload], **options)
        await way.enqueue(ride, Ride(transport="good"), origin=ORIGIN)
        await way.end("COMMIT")
    assert [row["group"] for row in await fetch(database, 'SELECT "group" FROM sidings.job')] == ["good"]


@pytest.mark.parametrize("name", WAYS)
async def test_an_empty_group_is_refused_for_a_type_without_groups_too(database: str, name: str):
    alone, grouped = declare(name="alone", group=None), declare()
    async with opened(name, database) as way:
        await way.begin()
        for options in ({}, {"delay": 60}, {"unique_key": "k"}):
            with pytest.raises(EnqueueError, match="the group of the job 'alone' is empty: give the key") as raised:
                await way.enqueue(alone, Ride(), origin=ORIGIN, group="", **options)
            assert not isinstance(raised.value, MissingGroup)  # its type needs no group
        with pytest.raises(MissingGroup, match="fill that field"):
            await way.enqueue(grouped, Ride(transport="a"), origin=ORIGIN, group="")
        await way.enqueue(alone, Ride(), origin=ORIGIN, group=None)
        await way.enqueue(alone, Ride(), origin=ORIGIN)
        await way.enqueue(alone, Ride(), origin=ORIGIN, group="a")
        await way.enqueue_many(alone, [Ride(), Ride()], origin=ORIGIN)
        await way.end("COMMIT")
    rows = await fetch(database, 'SELECT "group" FROM sidings.job ORDER BY id')
    assert [row["group"] for row in rows] == [None, None, "a", None, None]


@pytest.mark.parametrize("name", WAYS)
async def test_every_way_uses_the_schema_of_its_registry(empty_database: str, name: str):
    await migrate(empty_database, service="test", schema="elsewhere")
    async with opened(name, empty_database) as way:
        await way.begin()
        await way.enqueue(declare("elsewhere"), Ride(transport="a"), origin=ORIGIN)
        await way.end("COMMIT")
    assert await value(empty_database, "SELECT count(*) FROM elsewhere.job") == 1


# -- what is particular to each -----------------------------------------------------------------------------------


class Traced:
    """A connection as tools wrap it that trace queries: by a proxy that passes for an instance of its class."""

    def __init__(self, wrapped: Any) -> None:
        self.__dict__["wrapped"] = wrapped

    @property
    def __class__(self) -> type:
        return self.__dict__["wrapped"].__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["wrapped"], name)

    def __setattr__(self, name: str, to: Any) -> None:
        setattr(self.__dict__["wrapped"], name, to)


@pytest.mark.parametrize("name", WAYS)
async def test_a_connection_in_a_proxy_is_known_by_what_it_stands_for(database: str, name: str):
    ride = declare()
    async with opened(name, database) as way:
        await way.begin()
        traced = Way(Traced(way.connection), way.pool)
        await traced.enqueue(ride, Ride(transport="a"), origin=ORIGIN)
        await traced.enqueue_many(ride, [Ride(transport="a")] * 2, origin=ORIGIN)
        await way.end("COMMIT")
    async with opened(name, database, autocommit=True) as way:
        with pytest.raises(NotInTransaction):
            await Way(Traced(way.connection), way.pool).enqueue(ride, Ride(transport="a"), origin=ORIGIN)
    assert await value(database, "SELECT count(*) FROM sidings.job") == 3


async def test_codecs_of_the_callers_connection_do_not_change_what_is_stored(database: str):
    ride = declare()
    async with connected(database) as connection:
        for kind in ("json", "jsonb"):
            await connection.set_type_codec(kind, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        async with connection.transaction():
            await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN, headers={"a": "b"})
            await ride.enqueue_many(connection, [Ride(transport="a")], origin=ORIGIN, headers={"a": "b"})
    rows = await fetch(database, "SELECT payload ->> 'transport' AS transport, headers ->> 'a' AS a FROM sidings.job")
    assert [tuple(row) for row in rows] == [("a", "b")] * 2


async def test_psycopg_in_autocommit_is_accepted_inside_a_transaction(database: str):
    ride = declare()
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        async with connection.transaction():
            await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
        async with connection.transaction(force_rollback=True):
            await ride.enqueue(connection, Ride(transport="b"), origin=ORIGIN)
    with psycopg.connect(database, autocommit=True) as sync, sync.transaction():
        ride.enqueue_sync(sync, Ride(transport="c"), origin=ORIGIN)
    assert [row[0] for row in await fetch(database, 'SELECT "group" FROM sidings.job ORDER BY id')] == ["a", "c"]


async def test_cursors_and_rows_of_the_callers_choice_make_no_difference_with_psycopg(database: str):
    ride = declare()
    async with await psycopg.AsyncConnection.connect(database) as connection:
        connection.cursor_factory, connection.row_factory = psycopg.AsyncRawCursor, cast(Any, dict_row)
        assert isinstance(await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN), int)
    with psycopg.connect(database) as sync:
        sync.cursor_factory, sync.row_factory = psycopg.RawCursor, cast(Any, dict_row)
        assert len(ride.enqueue_many_sync(sync, [Ride(transport="a")] * 2, origin=ORIGIN)) == 2
    assert await value(database, "SELECT count(*) FROM sidings.job") == 3


async def test_psycopgs_pipeline_stores_jobs_too(database: str):
    ride = declare()
    async with await psycopg.AsyncConnection.connect(database) as connection, connection.pipeline():
        await connection.execute("CREATE TEMP TABLE t ()")
        await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
    assert await value(database, "SELECT count(*) FROM sidings.job") == 1


async def test_psycopgs_pipeline_in_autocommit_is_refused_also_while_statements_are_under_way(database: str):
    ride = declare()
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection, connection.pipeline():
        await connection.execute("SELECT")
        with pytest.raises(NotInTransaction):
            await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
        async with connection.transaction():
            await connection.execute("SELECT")
            await ride.enqueue(connection, Ride(transport="b"), origin=ORIGIN)
    with psycopg.connect(database, autocommit=True) as sync, sync.pipeline():
        sync.execute("SELECT")
        with pytest.raises(NotInTransaction):
            ride.enqueue_sync(sync, Ride(transport="c"), origin=ORIGIN)
        with sync.transaction():
            sync.execute("SELECT")
            ride.enqueue_sync(sync, Ride(transport="d"), origin=ORIGIN)
    assert [row[0] for row in await fetch(database, 'SELECT "group" FROM sidings.job ORDER BY id')] == ["b", "d"]


class Base(DeclarativeBase):
    pass


class Transport(Base):
    __tablename__ = "transport"
    id: Mapped[str] = mapped_column(primary_key=True)
    eta: Mapped[datetime | None] = mapped_column(sqlalchemy.DateTime(timezone=True))


CREATE = "CREATE TABLE transport (id text PRIMARY KEY, eta timestamptz); INSERT INTO transport VALUES ('t-1')"
ROW_IS_LOCKED = "SELECT count(*) = 0 FROM (SELECT FROM transport FOR UPDATE SKIP LOCKED) free"


def urls(dsn: str) -> str:
    return dsn.replace("postgresql://", "postgresql+psycopg://")


@pytest.mark.parametrize("autoflush", [True, False])
async def test_a_session_writes_its_changes_before_the_job_so_that_the_row_is_locked(database: str, autoflush: bool):
    ride = declare()
    engine, sync_engine = create_async_engine(urls(database)), sqlalchemy.create_engine(urls(database))
    async with connected(database) as observer:
        await observer.execute(CREATE)
        async with AsyncSession(engine, autoflush=autoflush) as session:
            (await session.get_one(Transport, "t-1")).eta = datetime.now(UTC)
            await ride.enqueue(session, Ride(transport="a"), origin=ORIGIN)
            assert await observer.fetchval(ROW_IS_LOCKED) is autoflush
            await session.commit()
        with Session(sync_engine, autoflush=autoflush) as session:
            session.get_one(Transport, "t-1").eta = datetime.now(UTC)
            ride.enqueue_sync(session, Ride(transport="a"), origin=ORIGIN)
            assert await observer.fetchval(ROW_IS_LOCKED) is autoflush
            session.commit()
    await engine.dispose()
    sync_engine.dispose()


@pytest.mark.parametrize("scoped", [False, True], ids=["session", "scoped"])
@pytest.mark.parametrize("event", ["before_flush", "after_flush", "after_flush_postexec"])
async def test_a_job_may_be_stored_while_its_session_is_flushed(database: str, event: str, scoped: bool):
    """There SQLAlchemy refuses another flush, and the caller's transaction was lost."""
    ride = declare()
    engine, sync_engine = create_async_engine(urls(database)), sqlalchemy.create_engine(urls(database))
    await fetch(database, "CREATE TABLE transport (id text PRIMARY KEY, eta timestamptz)")
    session = AsyncSession(engine)
    given: Any = async_scoped_session(lambda: session, scopefunc=lambda: 1) if scoped else session

    def flushed(*_: object) -> None:
        await_only(ride.enqueue(given, Ride(transport="async"), origin=ORIGIN))

    sqlalchemy.event.listen(session.sync_session, event, flushed)
    session.add(Transport(id="async"))
    await session.commit()
    await session.close()
    await engine.dispose()
    with Session(sync_engine) as sync:
        given_sync: Any = scoped_session(lambda: sync) if scoped else sync

        def flushed_sync(*_: object) -> None:
            ride.enqueue_sync(given_sync, Ride(transport="sync"), origin=ORIGIN)

        sqlalchemy.event.listen(sync, event, flushed_sync)
        sync.add(Transport(id="sync"))
        sync.commit()
    sync_engine.dispose()
    for query in ('SELECT "group" FROM sidings.job ORDER BY id', "SELECT id FROM transport ORDER BY id"):
        assert [row[0] for row in await fetch(database, query)] == ["async", "sync"]


def test_a_mock_of_a_session_ends():
    """Whatever it is asked for it has, also what it stands for: the look for the plain session never ended."""
    ride = declare()
    with pytest.raises(EnqueueError):
        ride.enqueue_sync(Mock(spec=scoped_session), Ride(transport="a"), origin=ORIGIN)


async def test_scoped_sessions_and_run_sync_are_accepted(database: str):
    ride = declare()
    engine, sync_engine = create_async_engine(urls(database)), sqlalchemy.create_engine(urls(database))
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
    await ride.enqueue(scoped, Ride(transport="async scoped"), origin=ORIGIN)
    await scoped.commit()
    await scoped.remove()
    registry = scoped_session(sessionmaker(sync_engine))
    ride.enqueue_sync(registry, Ride(transport="scoped"), origin=ORIGIN)
    registry.commit()
    registry.remove()
    asyncpg_engine = create_async_engine(database.replace("postgresql://", "postgresql+asyncpg://"))
    async with AsyncSession(asyncpg_engine) as session:
        await session.run_sync(lambda inner: ride.enqueue_sync(inner, Ride(transport="run_sync"), origin=ORIGIN))
        await session.commit()
    await engine.dispose()
    await asyncpg_engine.dispose()
    sync_engine.dispose()
    groups = [row[0] for row in await fetch(database, 'SELECT "group" FROM sidings.job ORDER BY id')]
    assert groups == ["async scoped", "scoped", "run_sync"]


async def test_a_session_of_several_engines_gives_the_connection_that_the_guide_asks_it_for(
    database: str, empty_database: str
):
    ride = declare()
    leader, follower = (create_async_engine(urls(dsn)) for dsn in (database, empty_database))

    class Routed(Session):
        def get_bind(self, mapper: Any = None, **_: Any) -> Any:  # as in SQLAlchemy's own guide
            return (leader if self._flushing else follower).sync_engine

    await fetch(database, "CREATE TABLE transport (id text PRIMARY KEY, eta timestamptz)")
    async with AsyncSession(sync_session_class=Routed) as session:
        with pytest.raises(SchemaMissing):
            await ride.enqueue(session, Ride(transport="a"), origin=ORIGIN)
    async with AsyncSession(sync_session_class=Routed) as session:
        session.add(Transport(id="t-1"))
        await session.flush()
        connection = await session.connection(bind_arguments={"bind": leader.sync_engine})
        await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
        await session.commit()
    await leader.dispose()
    await follower.dispose()
    writers = "SELECT txid::text FROM sidings.job UNION SELECT xmin::text FROM transport"
    assert len(await fetch(database, writers)) == 1
    for table in ("sidings.job", "transport"):
        assert await value(database, f"SELECT count(*) FROM {table}") == 1


async def test_autocommit_of_one_sqlalchemy_connection_is_noticed(database: str):
    ride = declare()
    engine, sync_engine = create_async_engine(urls(database)), sqlalchemy.create_engine(urls(database))
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(NotInTransaction):
            await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
    with (
        sync_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(NotInTransaction),
    ):
        ride.enqueue_sync(connection, Ride(transport="a"), origin=ORIGIN)
    with sync_engine.connect() as connection:  # the pool's connection is itself again
        ride.enqueue_sync(connection, Ride(transport="a"), origin=ORIGIN)
    await engine.dispose()
    sync_engine.dispose()


@pytest.mark.parametrize("options", [{"stream_results": True}, {"yield_per": 500}], ids=str)
async def test_a_stream_of_results_does_not_hinder_a_job(database: str, options: dict[str, Any]):
    ride = declare()
    engine = sqlalchemy.create_engine(urls(database), execution_options=options)
    with engine.begin() as connection:
        ride.enqueue_sync(connection, Ride(transport="a"), origin=ORIGIN)
    engine.dispose()
    for url in (urls(database), database.replace("postgresql://", "postgresql+asyncpg://")):
        async_engine = create_async_engine(url, execution_options=options)
        async with async_engine.begin() as connection:
            await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
        await async_engine.dispose()
    assert await value(database, "SELECT count(*) FROM sidings.job") == 3


def test_another_database_is_refused():
    refused = pytest.raises(EnqueueError, match=r"sqlite.*postgresql\+psycopg")
    with sqlalchemy.create_engine("sqlite://").connect() as connection, refused:
        declare().enqueue_sync(connection, Ride(transport="a"), origin=ORIGIN)


async def test_what_is_no_connection_is_refused_and_what_is_accepted_is_named(database: str):
    ride = declare()
    async with asyncpg.create_pool(database, min_size=0) as pool:
        with pytest.raises(EnqueueError, match=r"asyncpg.pool.Pool: give a connection of asyncpg, psycopg 3 .*SQLAl"):
            await ride.enqueue(pool, Ride(transport="a"), origin=ORIGIN)
    with pytest.raises(EnqueueError, match=r"builtins.NoneType: give a connection of psycopg 3 .*django.db.connection"):
        ride.enqueue_sync(None, Ride(transport="a"), origin=ORIGIN)


async def test_a_synchronous_connection_is_sent_to_the_synchronous_call_and_the_other_way_round(database: str):
    ride = declare()
    refused = pytest.raises(EnqueueError, match=r"psycopg\.Connection is synchronous: call enqueue_sync")
    with psycopg.connect(database) as connection, refused:
        await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
    async with connected(database) as connection:
        with pytest.raises(EnqueueError, match=r"asyncpg\.Connection is asynchronous: call `await enqueue"):
            ride.enqueue_sync(connection, Ride(transport="a"), origin=ORIGIN)


async def test_a_registry_enqueues_by_name_in_synchronous_code_too(database: str):
    registry = Registry()
    registry.job(name="ride", group="transport", payload=Ride)(lambda job: None)
    with psycopg.connect(database) as connection:
        registry.enqueue_sync(connection, "ride", Ride(transport="a"), origin=ORIGIN)
    assert await value(database, "SELECT type FROM sidings.job") == "ride"


def test_none_of_the_libraries_is_imported_with_sidings():
    script = "import sys, sidings; print({'psycopg', 'sqlalchemy', 'django'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


# -- the guide ----------------------------------------------------------------------------------------------------

ETA = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)


class Opener:
    """Stands for a running service."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    def transaction(self) -> Any:
        @asynccontextmanager
        async def opened():
            async with self._connection.transaction():
                yield Transaction(self._connection)

        return opened()


GUIDES = {
    "In a service": "asyncpg",
    "asyncpg": "asyncpg",
    "psycopg 3": "psycopg",
    "psycopg 3, synchronous": "psycopg sync",
    "SQLAlchemy": "sqlalchemy asyncpg AsyncSession",
    "SQLAlchemy, synchronous": "sqlalchemy psycopg Session",
    "Django": "django",
}


@pytest.mark.parametrize("heading", GUIDES)
async def test_the_examples_of_the_guide_change_the_row_and_store_the_job(database: str, heading: str):
    async with connected(database) as observer, opened(GUIDES[heading], database) as way:
        await observer.execute(f"{CREATE}; INSERT INTO sidings.topic (topic, partitions) VALUES ('transports', 24)")
        eta_changed = run(PAGE, "", heading, Transport=Transport)["eta_changed"]
        arguments: list[Any] = [way.connection, "t-1", ETA]
        if heading == "In a service":
            arguments[0] = Opener(way.connection)
        elif heading == "Django":
            del arguments[0]
        await way.do(lambda: eta_changed(*arguments))
        assert await observer.fetchval("SELECT eta FROM transport") == ETA
        [job] = await observer.fetch('SELECT type, origin, "group", payload FROM sidings.job')
    assert tuple(job)[:3] == ("send_eta", f"transports/{partition_for(b't-1', 24)}", "t-1")


@pytest.mark.parametrize("heading", [heading for heading in GUIDES if heading.startswith("SQLAlchemy")])
async def test_the_last_job_of_the_guides_sessions_tells_what_the_row_says(database: str, heading: str):
    """SQLAlchemy updates, and so locks, nothing where an object has the value already: another writer's job came before
    one that told the value of before."""
    locked: list[bool] = []
    async with connected(database) as observer, opened(GUIDES[heading], database) as way:
        await observer.execute(f"{CREATE}; INSERT INTO sidings.topic (topic, partitions) VALUES ('transports', 24)")
        eta_changed = run(PAGE, "", heading, Transport=Transport)["eta_changed"]
        await way.do(lambda: eta_changed(way.connection, "t-1", ETA))
        loaded = await way.do(lambda: way.connection.get_one(Transport, "t-1"))
        await run(PAGE, "", "asyncpg")["eta_changed"](observer, "t-1", ETA + timedelta(hours=2))
        await way.do(lambda: eta_changed(way.connection, "t-1", ETA))
        last = await observer.fetchval("SELECT payload ->> 'eta' FROM sidings.job ORDER BY position DESC LIMIT 1")
        assert datetime.fromisoformat(last) == await observer.fetchval("SELECT eta FROM transport")
        assert loaded in way.connection

        def committing(_: object) -> None:
            with psycopg.connect(database) as other:
                locked.extend(row[0] for row in other.execute(ROW_IS_LOCKED))

        session: Any = getattr(way.connection, "sync_session", way.connection)
        sqlalchemy.event.listen(session, "before_commit", committing)
        await way.do(lambda: eta_changed(way.connection, "t-1", ETA))
    assert locked == [True]


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_retry_does_not_commit_what_the_attempt_before_has_left_in_a_scoped_session(database: str, kind: str):
    """Its thread, or task, is that of all jobs of a worker: the account was charged twice."""
    registry = Registry()
    engine, sync_engine = create_async_engine(urls(database)), sqlalchemy.create_engine(urls(database))
    async_session = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    session = scoped_session(sessionmaker(sync_engine))
    page = run(PAGE, "Scoped sessions in handlers", async_session=async_session, session=session)
    charge = sqlalchemy.text("UPDATE account SET charged = charged + 1")
    await fetch(database, "CREATE TABLE account AS SELECT 0 AS charged")

    async def handle(job: Job[Ride]) -> None:
        await async_session.execute(charge)
        if job.attempt == 1:
            raise ValueError
        await async_session.commit()

    def handle_plain(job: Job[Ride]) -> None:
        session.execute(charge)
        if job.attempt == 1:
            raise ValueError
        session.commit()

    registry.middleware.append(page["end_session"])
    handler: Any = handle if kind == "async" else page["ends_session"](handle_plain)
    ride = registry.job(name="ride", retry=Retry(wait=wait_none()))(handler)
    await enqueue(database, ride, [Ride()])
    async with running(database, registry, concurrency=1):
        await drained(database)
    await engine.dispose()
    sync_engine.dispose()
    assert await value(database, "SELECT charged FROM account") == 1
