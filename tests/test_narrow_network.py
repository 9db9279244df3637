"""A slow network: reads of large payloads that cannot be answered in time ask for less, and a start takes its time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

import pytest
from pydantic import BaseModel
from sidings.executor import Executor, ExecutorSettings, PostgresSettings
from sidings.jobs import Job, Registry

from .support import drained, enqueue

BYTES, JOBS = 100_000, 120
PIECE, PAUSE = 65_536, 0.01  # at most 6.5 MB/s


class Large(BaseModel):
    number: int
    group: str
    text: str


@asynccontextmanager
async def narrow(dsn: str, delay: float = 0.0) -> AsyncIterator[str]:
    """The DSN of the same server behind a network that is slow in the direction of the client. delay: seconds until
    what a client sends arrives."""
    parts = urlsplit(dsn)
    streams: list[asyncio.StreamWriter] = []

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, delay: float, pause: float) -> None:
        with suppress(ConnectionError):
            while piece := await source.read(PIECE):
                await asyncio.sleep(delay)
                target.write(piece)
                await target.drain()
                await asyncio.sleep(pause)
        target.close()

    async def serve(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        upward, server = await asyncio.open_connection(parts.hostname, parts.port)
        streams.extend((target, server))
        await asyncio.gather(pump(source, server, delay, 0.0), pump(upward, target, 0.0, PAUSE))

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    user = parts.netloc.rpartition("@")[0]
    try:
        yield urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{port}"))
    finally:
        listener.close()
        for stream in streams:
            stream.close()


@pytest.mark.long
@pytest.mark.parametrize("groups", [0, 1])
async def test_payloads_that_do_not_come_through_in_time_are_read_by_fewer(
    database: str, monkeypatch: pytest.MonkeyPatch, groups: int
):
    """The first read asked for 256 jobs whatever their size, was given up after `call_seconds`, and asked again for as
    many; no job of any origin ran."""
    monkeypatch.setattr("sidings.executor.link._MOST_PATIENCE", 1)  # more time would do as well
    registry, ran = Registry(), list[int]()

    @registry.job(group="group" if groups else None)
    async def large(job: Job[Large]) -> None:
        ran.append(job.payload.number)

    payloads = [Large(number=n, group="g", text="x" * BYTES) for n in range(JOBS)]
    await enqueue(database, large, payloads[: JOBS // 2], origin="t/0")
    await enqueue(database, large, payloads[JOBS // 2 :], origin="t/1")
    async with narrow(database) as slow:
        settings = PostgresSettings(dsn=slow, call_seconds=1.0)
        executor = Executor("test", registry, settings, ExecutorSettings(shutdown_seconds=2.0))
        await executor.start()
        try:
            executor.assign(["t/0", "t/1"], 1)
            await drained(database)
        finally:
            await executor.stop()
    assert sorted(ran) == list(range(JOBS))
    for half in ([n for n in ran if n < JOBS // 2], [n for n in ran if n >= JOBS // 2]):
        assert not groups or half == sorted(half)


async def test_a_start_has_time_for_each_of_its_statements(database: str):
    """The look at the schema had `call_seconds` for all of its statements, so that a service could never start where
    each took a fraction of that."""
    registry, ran = Registry(), list[int]()

    @registry.job()
    async def small(job: Job[Large]) -> None:
        ran.append(job.payload.number)

    await enqueue(database, small, [Large(number=1, group="g", text="")], origin="t/0")
    async with narrow(database, delay=0.05) as slow:
        executor = Executor("test", registry, PostgresSettings(dsn=slow, call_seconds=0.4), ExecutorSettings())
        await executor.start()
        try:
            executor.assign(["t/0"], 1)
            await drained(database)
        finally:
            await executor.stop()
    assert ran == [1]
