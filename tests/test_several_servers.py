"""A DSN that names several servers: one that does not answer keeps nobody from the one that does."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sidings import PostgresUnavailable, StaticAssignment
from sidings.executor import PostgresSettings, connect
from sidings.jobs import Job, Registry
from sidings.schema import migrate
from sidings.spark_analytics.history.archive import archive

from .consumer_support import a_service
from .faulty_proxy import proxied
from .support import ORIGIN, Ride, drained, enqueue, eventually, running


def named_first(address: str, dsn: str) -> str:
    """`dsn` with another server in front of its own."""
    parts = urlsplit(dsn)
    account, _, server = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{account}@{address},{server}", query="target_session_attrs=primary").geturl()


@pytest.fixture
def hanging(database: str) -> Iterator[str]:
    """The DSN of the test's database, and in front of it a server that accepts connections and says nothing, as one
    whose machine stands still; or is gone, without a word to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield named_first(f"127.0.0.1:{silent.getsockname()[1]}", database)


@pytest.mark.long
async def test_a_service_reaches_the_server_that_answers(hanging: str, database: str) -> None:
    ran: list[int] = []
    settings = PostgresSettings(dsn=hanging, connect_seconds=2.0)
    service = a_service(settings, assignment=StaticAssignment([ORIGIN]), executor={"lease_seconds": 15.0})

    @service.job(transactional=True)
    async def ride(job: Job[Ride]) -> None:
        ran.append(job.payload.number)

    async with service:
        async with service.transaction() as tx:
            await ride.enqueue(tx, Ride(number=1), origin=ORIGIN)
        await drained(database)
        await eventually(lambda: service.problems() == [], service.problems)
    assert ran == [1]


@pytest.mark.chaos
async def test_one_that_falls_silent_in_the_midst_of_work_is_left_for_the_next(database: str) -> None:
    registry, ran = Registry(), list[int]()

    @registry.job(transactional=True)
    async def ride(job: Job[Ride]) -> None:
        ran.append(job.payload.number)

    async with proxied(database) as proxy:
        address = proxy.dsn.rpartition("@")[2].partition("/")[0]
        async with running(named_first(address, database), registry):
            await enqueue(database, ride, [Ride(number=1)])
            await drained(database)
            proxy.silence()
            await enqueue(database, ride, [Ride(number=2)])
            await drained(database)
    assert ran == [1, 2]


@pytest.mark.long
async def test_commands_reach_the_server_that_answers(hanging: str, tmp_path: Path) -> None:
    assert await migrate(hanging, service="test") == []
    assert await asyncio.to_thread(archive, hanging, tmp_path / "archive") == 0


async def test_of_several_that_are_no_good_the_error_is_the_last_one_s(hanging: str) -> None:
    with pytest.raises(PostgresUnavailable, match="TargetServerAttributeNotMatched"):
        await connect(PostgresSettings(dsn=hanging.replace("=primary", "=standby"), connect_seconds=2.0))


@asynccontextmanager
async def slow(dsn: str, seconds: float) -> AsyncIterator[str]:
    """The address of a server that is `dsn`'s, and takes so long to answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        there, back = await asyncio.open_connection(parts.hostname, parts.port)

        async def passed_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                target.write(data)
            target.close()

        await asyncio.gather(passed_on(reader, back), passed_on(there, writer))

    parts = urlsplit(dsn)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"


async def test_one_that_is_slow_has_all_of_the_time_where_the_others_are_no_good(database: str) -> None:
    """As where hundreds connect at once after a failover. It had its share, each time, and was never reached."""
    async with slow(database, 2.5) as address:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            own, other = urlsplit(database).port, nobody.getsockname()[1]
            dsn = named_first(address, database).replace(f":{own}/", f":{other}/")
            connection = await connect(PostgresSettings(dsn=dsn, connect_seconds=4.5))
            assert await connection.fetchval("SELECT 1") == 1
            await connection.close()
