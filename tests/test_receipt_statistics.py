"""A receipt of a message, where a person has reset the statistics by which a crash of Postgres is told."""

import pytest

from .outbox_support import publishing
from .support import fetch


@pytest.mark.parametrize("kind", ["bgwriter", "archiver"])
async def test_statistics_that_were_reset_are_no_crash(database: str, kind: str) -> None:
    """`published` said that Postgres had crashed, and that nobody knew of a message that was acknowledged."""
    async with publishing(database) as (outbox, connection):
        async with connection.transaction():
            receipt = await outbox.publish(connection, "etas", key="a", value=b"kept")
        await connection.execute("SELECT pg_stat_reset_shared($1)", kind)
        await connection.execute("DELETE FROM sidings.outbox")  # as a relay does, once Kafka has it
        await outbox.published(receipt, timeout=10)
        assert not await fetch(database, "SELECT id FROM sidings.outbox_parked")
