"""Messages through every kind of connection: one suite that all of them pass."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel
from sidings.errors import NotInTransaction
from sidings.executor import PostgresSettings
from sidings.jobs import Transaction
from sidings.kafka.outbox import InvalidMessage, Outbox, OutboxSettings, RolledBack

from .outbox_support import records, relaying
from .support import connected, fetch, value
from .ways import WAYS, opened


class Eta(BaseModel):
    transport: str


@pytest.fixture
async def outbox(database: str) -> AsyncIterator[Outbox]:
    outbox = Outbox(PostgresSettings(dsn=database), OutboxSettings(routes={"clicks": "direct"}))
    yield outbox
    await outbox.close()


@pytest.mark.parametrize("name", WAYS)
async def test_a_message_shares_the_fate_of_the_callers_transaction(database: str, outbox: Outbox, name: str):
    async with connected(database) as observer, opened(name, database) as way:
        await observer.execute("CREATE TABLE transport (id text)")
        receipts = {}
        for ending in ("ROLLBACK", "COMMIT"):
            await way.begin()
            await way.execute(f"INSERT INTO transport VALUES ('{ending}')")
            receipts[ending] = await way.publish(outbox, "etas", key=ending, value=b"x")
            await way.publish_many(outbox, "etas", [(ending, b"y"), (ending, None)])
            assert await observer.fetchval("SELECT count(*) FROM sidings.outbox WHERE key = $1", ending.encode()) == 0
            await way.end(ending)
        rows = await observer.fetch("SELECT key, value FROM sidings.outbox ORDER BY id")
        assert [tuple(row) for row in rows] == [(b"COMMIT", b"x"), (b"COMMIT", b"y"), (b"COMMIT", None)]
        writers = "SELECT txid::text FROM sidings.outbox UNION SELECT xmin::text FROM transport"
        assert len(await observer.fetch(writers)) == 1
        with pytest.raises(RolledBack):
            await outbox.published(receipts["ROLLBACK"], timeout=10)


@pytest.mark.parametrize("name", WAYS)
async def test_a_connection_in_autocommit_is_refused(database: str, outbox: Outbox, name: str):
    async with opened(name, database, autocommit=True) as way:
        for attempt in (
            way.publish(outbox, "etas", key="a", value=b"x"),
            way.publish_many(outbox, "etas", [("a", b"x")]),
            way.publish_many(outbox, "etas", []),
        ):
            with pytest.raises(NotInTransaction, match=r"the message could not .*(call publish|without isolation)"):
                await attempt
    assert await value(database, "SELECT count(*) FROM sidings.outbox") == 0


@pytest.mark.parametrize("name", [name for name in WAYS if name != "asyncpg"])
async def test_every_way_stores_what_asyncpg_stores(database: str, outbox: Outbox, name: str):
    odd = "$1 %s %(p1)s :a ::b \\ ' \" ü \U0001f682"
    stamp = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
    headers = [("h", odd), ("h", b"\xff\x00"), ("none", None)]
    for one in ("asyncpg", name):
        async with opened(one, database) as way:
            await way.begin()
            await way.publish(outbox, "etas", key=odd, value=Eta(transport=odd), headers=headers, timestamp=stamp)
            await way.publish(outbox, "etas", key=b"\xff\x00%s", value=None, partition_key=odd)
            await way.publish(outbox, "etas", value=b"\xff\x00' %s")
            await way.publish_many(outbox, "etas", [(odd, Eta(transport=odd)), (None, b"\xff\x00"), ("k", None)])
            await way.publish_many(outbox, "etas", [(None, b"a"), (None, b"b")])
            await way.publish_many(outbox, "etas", [])
            own = [("a", b"x"), (None, b"y", headers), ("b", None, {"own": odd})]
            await way.publish_many(outbox, "etas", own)
            await way.publish_many(outbox, "etas", own, headers={"shared": odd})
            await way.publish_many(outbox, "etas", [("a", b"x"), ("b", None)], headers=headers)
            await way.end("COMMIT")
    columns = "slot, topic, key, value, headers::text, partition_key, stamped_at"
    rows = [tuple(row) for row in await fetch(database, f"SELECT {columns} FROM sidings.outbox ORDER BY id")]
    assert len(rows) == 32
    assert rows[16:] == rows[:16]


@pytest.mark.parametrize("name", WAYS)
async def test_what_is_refused_leaves_the_transaction_usable(database: str, outbox: Outbox, name: str):
    async with opened(name, database) as way:
        await way.begin()
        for options in ({"value": None}, {"value": "text"}, {"key": "a", "headers": {"a": 1}}):
            with pytest.raises(InvalidMessage):
                await way.publish(outbox, "etas", **options)
        if way.synchronous:
            with pytest.raises(InvalidMessage, match="the route of 'clicks' is direct"):
                await way.publish(outbox, "clicks", key="a", value=b"x")
        await way.publish(outbox, "etas", key="a", value=b"x")
        await way.end("COMMIT")
    assert await value(database, "SELECT count(*) FROM sidings.outbox") == 1


async def test_a_receipt_of_any_way_can_be_waited_for(database: str, outbox: Outbox, sidings_kafka: str, topic):
    etas = await topic("etas")
    async with relaying(database, sidings_kafka):
        for name in ("psycopg sync", "sqlalchemy asyncpg AsyncSession", "django"):
            async with opened(name, database) as way:
                await way.begin()
                receipt = await way.publish(outbox, etas, key="a", value=name.encode())
                await way.end("COMMIT")
            await outbox.published(receipt, timeout=20)
    assert len(await records(sidings_kafka, etas)) == 3


async def test_the_wrong_call_for_a_connection_says_which_is_right(database: str, outbox: Outbox):
    anything: Any = outbox
    async with connected(database) as connection:
        with pytest.raises(InvalidMessage, match="is asynchronous: call `await publish"):
            anything.publish_sync(connection, "etas", key="a", value=b"x")
    async with opened("psycopg sync", database) as way:
        with pytest.raises(InvalidMessage, match="is synchronous: call publish_sync or publish_many_sync"):
            await anything.publish(way.connection, "etas", key="a", value=b"x")
    with pytest.raises(InvalidMessage, match="a message cannot be stored through builtins"):
        await anything.publish(object(), "etas", key="a", value=b"x")
    with pytest.raises(NotInTransaction, match="tx=None"):
        await anything.publish(None, "etas", key="a", value=b"x")


async def test_a_transaction_notes_that_it_has_published(database: str, outbox: Outbox):
    async with connected(database) as connection, connection.transaction():
        tx = Transaction(connection)
        await outbox.publish_many(tx, "etas", [])
        assert not tx.published
        await outbox.publish(tx, "etas", key="a", value=b"x")
        assert tx.published
