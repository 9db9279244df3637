"""A service whose event loop runs in a thread that is not the main one."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sidings import ConfigurationError, OutboxSettings, StaticAssignment

from .consumer_support import a_service
from .directory_support import COMPACTED
from .outbox_support import records
from .support import ORIGIN, SECONDS, eventually


async def test_a_service_is_stopped_from_another_thread(database: str):
    service = a_service(database, assignment=StaticAssignment([ORIGIN]))
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            asyncio.run(service.run(), debug=True)  # which complains where another thread touches the loop
            ended.append(None)
        except BaseException as error:  # told in the test's own thread
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    await eventually(lambda: ORIGIN in service.executor.held, "the service to run")
    service.stop()
    await asyncio.to_thread(thread.join, SECONDS)
    assert ended == [None]


async def test_a_cancellation_from_outside_names_the_program_that_ends_before_its_service(
    database: str, sidings_kafka: str, topic: Any, caplog: pytest.LogCaptureFixture
):
    async with a_service(database, sidings_kafka, topics=[await topic("positions")]) as service:
        await eventually(lambda: service.executor.held, "the service to run")
        for task in asyncio.all_tasks():
            if task.get_name() == "sidings LagCommitter.run":
                task.cancel()
        await eventually(lambda: "as `asyncio.run` ends while the service runs" in caplog.text, "the log to tell")


async def test_a_transaction_of_another_event_loop_is_refused_and_spoils_no_connection(database: str):
    """What came out was asyncio's error about a future, and a connection that the service's next handler waited for in
    vain, for 5 s."""
    service = a_service(database, assignment=StaticAssignment([ORIGIN]))
    loops: list[asyncio.AbstractEventLoop] = []

    async def live() -> None:
        loops.append(asyncio.get_running_loop())
        await service.run()

    async def one() -> int:
        async with service.transaction() as tx:
            return await tx.fetchval("SELECT 1")

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    await eventually(lambda: ORIGIN in service.executor.held, "the service to run")
    with pytest.raises(ConfigurationError, match="event loop"):
        await one()
    assert await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(one(), loops[0])) == 1
    service.stop()
    await asyncio.to_thread(thread.join, SECONDS)


async def in_another_loop(call: Callable[[], Awaitable[object]]) -> None:
    """As a handler that is a plain function would have it, in its thread."""

    async def elsewhere() -> None:
        async with asyncio.timeout(10):
            await call()

    with pytest.raises(ConfigurationError, match="event loop"):
        await asyncio.to_thread(asyncio.run, elsewhere())


async def test_the_producer_is_the_services_also_where_another_event_loop_sends_first(
    database: str, topic: Any, sidings_kafka: str
):
    """It belonged to whoever sent first: the service itself was refused, until its restart."""
    etas = await topic("etas")
    async with a_service(database, kafka=sidings_kafka) as service:
        await in_another_loop(lambda: service.producer.send(etas, key="k", value=b"1"))
        await service.producer.send(etas, key="k", value=b"2")
    assert [record.value for record in await records(sidings_kafka, etas)] == [b"2"]


async def test_the_outbox_is_not_asked_in_another_event_loop(database: str, topic: Any, sidings_kafka: str):
    """It answered there. The service was then told that the event loop was closed, and ended with that as its error."""
    etas = await topic("etas")
    async with a_service(database, kafka=sidings_kafka) as service:
        async with service.transaction() as tx:
            receipt = await service.outbox.publish(tx, etas, value=b"1")
        await in_another_loop(lambda: service.outbox.published(receipt, timeout=SECONDS))
        await in_another_loop(lambda: service.outbox.parked())
        await service.outbox.published(receipt, timeout=SECONDS)
    assert await service.outbox.parked() == []  # without the service any may ask
    await service.outbox.close()


async def test_what_another_event_loop_asks_before_the_start_spoils_nothing(
    database: str, topic: Any, sidings_kafka: str
):
    """As a script that sends something first. The service's first message was not sent, and it was told that the event
    loop is closed by the outbox; so was a second `asyncio.run` without a service."""
    etas = await topic("etas")
    service = a_service(database, kafka=sidings_kafka, outbox=OutboxSettings(delivery_seconds=5))
    await asyncio.to_thread(asyncio.run, service.producer.send(etas, key="k", value=b"1"))
    for _ in range(2):
        assert await asyncio.to_thread(asyncio.run, service.outbox.parked()) == []
    async with service:
        await service.producer.send(etas, key="k", value=b"2")
        assert await service.outbox.parked() == []
    assert [record.value for record in await records(sidings_kafka, etas)] == [b"1", b"2"]


async def test_a_directory_is_not_waited_for_in_another_event_loop(topic: Any, sidings_kafka: str):
    """Its connection to Kafka broke: the answers were taken for those to other questions."""
    terminals = await topic("terminals", config=COMPACTED)
    service = a_service(None, kafka=sidings_kafka)
    directory = service.directory(terminals, model=dict)
    async with service:
        await directory.wait_ready(SECONDS)
        for call in (directory.wait_until, directory.end_offsets, directory.wait_ready):
            await in_another_loop(call)
        await directory.wait_until(timeout=SECONDS)


@pytest.mark.parametrize("where", ["the same event loop", "another thread"])
async def test_a_second_start_beside_the_first_is_refused_and_the_first_goes_on(database: str, where: str):
    """Both came half-way. The executor was stopped for both of them, and the first went on without it, for ever."""
    service = a_service(database, assignment=StaticAssignment([ORIGIN]))
    first = asyncio.create_task(service.run())
    await asyncio.sleep(0)
    again = service.run() if where == "the same event loop" else asyncio.to_thread(asyncio.run, service.run())
    with pytest.raises(ConfigurationError, match="started before"):
        await again
    assert service._loop is asyncio.get_running_loop(), "a stop from another thread would not wake it"
    await eventually(lambda: ORIGIN in service.executor.held, "the first to run")
    assert service.problems() == []
    await asyncio.to_thread(service.stop)
    await asyncio.wait_for(first, SECONDS)
