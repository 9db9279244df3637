"""The lease thread, alone."""

import asyncio
import struct
from uuid import uuid4

from sidings.executor import ExecutorSettings, PostgresSettings
from sidings.executor.leases import LeaseEvents, LeaseThread

from .support import eventually

NOBODY = LeaseEvents(lost=lambda name, epoch: None, wanted=lambda name, generation: None)


class Held:
    """What is leased."""

    name = "t/0"
    epoch = 1
    deadline = 0.0
    timeline: str | None = None


async def test_a_renewal_may_be_asked_for_when_the_thread_has_ended() -> None:
    leases = LeaseThread(PostgresSettings(dsn="postgresql://x"), ExecutorSettings(), NOBODY, lambda: None)
    leases.renew_soon()
    leases.start()
    await eventually(lambda: leases._poke, "it runs")
    await leases.stop()
    assert leases._loop is not None
    assert leases._loop.is_closed()
    leases.renew_soon()


async def test_leases_are_tried_again_after_an_error_that_nobody_has_thought_of() -> None:
    """PgBouncer in place of Postgres, for a while: our own connections refuse it with a `ConfigurationError`."""
    asked = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        (length,) = struct.unpack("!i", await reader.readexactly(4))
        (code,) = struct.unpack("!i", (await reader.readexactly(length - 4))[:4])
        if code == 196_608:  # the start of a session; else it asks for TLS
            asked += 1
            fields = b"SFATAL\0C08P01\0Munsupported startup parameter: jit\0\0"
            writer.write(b"E" + struct.pack("!i", 4 + len(fields)) + fields)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    postgres = PostgresSettings(dsn=f"postgresql://somebody@127.0.0.1:{port}/x?sslmode=disable")
    leases = LeaseThread(postgres, ExecutorSettings(lease_seconds=0.2), NOBODY, lambda: None)
    leases.executor_id = uuid4()
    leases.hold([Held()])
    leases.start()
    try:
        await eventually(lambda: asked > 2, "it tries again")
    finally:
        await leases.stop()
        server.close()
