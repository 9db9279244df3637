"""A receipt of a message that a crash of Postgres has taken: its ids are handed out again."""

import os
import signal

import pytest
from sidings import PostgresUnavailable
from sidings.devstack.databases import create_database, ensure_template
from sidings.devstack.fixtures import ServerDirectory
from sidings.devstack.postgres import Postgres

from .outbox_support import publishing
from .support import SECONDS, answers, connected, eventually, value


async def test_a_message_that_a_crash_has_taken_does_not_pass_for_acknowledged(
    sidings_server_directory: ServerDirectory,
) -> None:
    """The crash comes before the COMMIT: its transaction id goes to another one, which commits."""
    settings = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB"}  # WAL reaches the disk with commits only
    mortal = Postgres(sidings_server_directory("mortal-receipts"), settings=settings)
    try:
        mortal.start()
        template = await ensure_template(mortal.dsn, service="test")
        dsn = await create_database(mortal.dsn, "mortal", template=template)
        async with publishing(dsn) as (outbox, connection), connected(dsn) as bystander:
            await connection.execute("BEGIN")
            receipt = await outbox.publish(connection, "etas", key="a", value=b"lost")
            os.kill(await connection.fetchval("SELECT pg_backend_pid()"), signal.SIGKILL)
            await eventually(bystander.is_closed, "the server to end all that it has")
            await eventually(lambda: answers(dsn), "the server to answer")
            async with connected(dsn) as other:
                assert await other.fetchval("SELECT pg_current_xact_id()::text::bigint") <= receipt.txid, (
                    "the crash has taken no transaction id back: the test has shown nothing"
                )
                while await other.fetchval("SELECT pg_current_xact_id()::text::bigint") <= receipt.txid:
                    pass
            assert not await value(dsn, "SELECT count(*) FROM sidings.outbox"), "the message is lost"
            with pytest.raises(PostgresUnavailable, match="whether it was kept is not known"):
                await outbox.published(receipt, timeout=SECONDS)
    finally:
        mortal.remove()
