"""Where host names are looked up."""

import asyncio
import socket
import threading

from sidings import Job, StaticAssignment
from sidings.service.lookups import look_up_apart

from .consumer_support import a_service
from .support import ORIGIN, SECONDS, Ride, connected, enqueue, eventually


async def test_a_service_connects_again_while_handlers_keep_the_threads_of_asyncio(database: str):
    """A look-up of the server's name needs one; without it the executor held its origin and ran nothing."""
    service = a_service(database.replace("127.0.0.1", "localhost"), assignment=StaticAssignment([ORIGIN]))
    gate, ran = threading.Event(), asyncio.Event()

    @service.job()
    async def ride(job: Job[Ride]) -> None:
        ran.set()

    async with service:
        await service.executor.settled(SECONDS)
        calls = [asyncio.create_task(asyncio.to_thread(gate.wait, SECONDS)) for _ in range(64)]
        try:
            async with connected(database) as person:
                await person.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            await enqueue(database, ride, [Ride()])
            await eventually(ran.is_set, "the job to run", seconds=5)
        finally:
            gate.set()
            await asyncio.gather(*calls)


async def test_a_loop_gets_its_threads_once_and_what_it_asks_for():
    """Each service that starts in it would leave threads behind, and what connects be given addresses for datagrams."""
    look_up_apart()
    loop = asyncio.get_running_loop()
    first = loop.getaddrinfo
    look_up_apart()
    assert loop.getaddrinfo is first
    [found] = await loop.getaddrinfo("127.0.0.1", 80, type=socket.SOCK_STREAM)
    assert found[1] is socket.SOCK_STREAM
    assert found[4] == ("127.0.0.1", 80)
