"""Parked messages of a directory table that are released: the last one is what the table says now."""

from secrets import token_hex
from typing import Any

import pytest
from sidings.devstack.topics import create_topic, delete_topics
from sidings.kafka.directory import Directory

from .directory_support import COMPACTED, quick
from .guide import block
from .outbox_support import emptied, publishing, records, relaying
from .support import SECONDS, connected, eventually, value

PARKED = "SELECT count(*) FROM sidings.outbox_parked"


@pytest.mark.long
@pytest.mark.parametrize("change", ["acquirer_id = 'b'", "is_active = false"])
async def test_a_row_that_was_parked_and_is_released_does_not_stay_the_last_one(
    database: str, sidings_kafka: str, change: str
) -> None:
    """The topic was missing for longer than the relay's patience."""
    name = f"terminals-{token_hex(4)}"

    async def settled() -> bool:
        """What is in doubt is so no longer than until now."""
        await db.execute("UPDATE sidings.directory_doubt SET (since, due_at) = (now() - (due_at - since), now())")
        return not await value(database, "SELECT count(*) FROM sidings.directory_doubt")

    async with (
        connected(database) as db,
        relaying(database, sidings_kafka, topic_patience_seconds=0.5),
        publishing(database) as (outbox, _),
    ):
        await db.execute(block("directory-tables.md", "The table", "sql"))
        await db.execute(
            f"SELECT sidings.directory_table('terminal_acquirer', '{name}', '{{terminal_id}}', 'is_active')"
        )
        await db.execute("INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ('t1', 'a')")
        await eventually(lambda: value(database, PARKED), "the row is parked")
        await create_topic(sidings_kafka, name, partitions=1, config=COMPACTED)
        try:
            await db.execute(f"UPDATE terminal_acquirer SET {change}")
            await emptied(database)
            await eventually(settled, "nothing is in doubt any more")
            await emptied(database)
            newest = (await records(sidings_kafka, name))[-1].value
            assert len(await outbox.release(name, actor="alice")) == 1
            assert not await value(database, PARKED)
            await eventually(settled, "all has been put right")
            await emptied(database)
            assert (await records(sidings_kafka, name))[-1].value == newest
            async with Directory(name, kafka=quick(sidings_kafka), model=dict[str, Any]) as directory:
                await directory.wait_until(timeout=SECONDS)
                now = directory.get("t1")
                assert (now and now["acquirer_id"]) == ("b" if "'b'" in change else None)
        finally:
            await delete_topics(sidings_kafka, [name])
