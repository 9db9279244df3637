"""The algorithm of the Deimos database backend, written in Python from its article, for comparison.

A table of messages and a table of topics that serves as a lock. A sender finds the topics that have messages, locks
one, sends batches of up to 1,000 by id and waits for all acknowledgements, deletes the batch, refreshes its lock, goes
on until a batch is not full, unlocks, and sleeps half a second when it has been through all topics.
"""

import asyncio
from collections.abc import Sequence
from uuid import uuid4

import asyncpg
from aiokafka import AIOKafkaProducer

__all__ = ["TABLES", "Deimos"]

TABLES = """
CREATE TABLE kafka_messages (
    id bigserial PRIMARY KEY, topic text NOT NULL, message bytea, key text, partition_key text,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ON kafka_messages (topic, id);
CREATE TABLE kafka_topic_info (
    topic text PRIMARY KEY, locked_by text, locked_at timestamptz, error boolean NOT NULL DEFAULT false,
    retries int NOT NULL DEFAULT 0
);
"""

_PAUSE_SECONDS = 0.5


class Deimos:
    """One sender. `sent` counts messages."""

    def __init__(self, dsn: str, kafka: str) -> None:
        self.sent = 0
        self.ready = asyncio.Event()
        self._dsn = dsn
        self._kafka = kafka
        self._id = str(uuid4())

    async def run(self, begin: asyncio.Event | None = None, topics: Sequence[str] = ()) -> None:
        """Send for ever. begin: connected, and knowing `topics`, it waits for this before it begins; `ready` says that
        it does."""
        connection = await asyncpg.connect(self._dsn)
        producer = AIOKafkaProducer(bootstrap_servers=self._kafka, acks="all", max_batch_size=512 * 1024)
        await producer.start()
        for topic in topics:
            await producer.partitions_for(topic)
        self.ready.set()
        try:
            if begin is not None:
                await begin.wait()
            while True:
                waiting = await connection.fetch("SELECT DISTINCT topic FROM kafka_messages")
                for row in waiting:
                    await self._topic(connection, producer, row["topic"])
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            await producer.stop()
            await connection.close()

    async def _topic(self, connection: asyncpg.Connection, producer: AIOKafkaProducer, topic: str) -> None:
        await connection.execute("INSERT INTO kafka_topic_info (topic) VALUES ($1) ON CONFLICT DO NOTHING", topic)
        locked = await connection.execute(
            "UPDATE kafka_topic_info SET locked_by = $1, locked_at = now(), error = false WHERE topic = $2 AND "
            "((locked_by IS NULL AND NOT error) OR locked_at < now() - interval '1 minute')",
            self._id,
            topic,
        )
        if locked != "UPDATE 1":
            return
        while True:
            rows = await connection.fetch(
                "SELECT id, message, key, partition_key FROM kafka_messages WHERE topic = $1 ORDER BY id LIMIT 1000",
                topic,
            )
            if rows:
                await self._send(producer, topic, rows)
                await connection.execute("DELETE FROM kafka_messages WHERE id = ANY ($1)", [row["id"] for row in rows])
                await connection.execute("UPDATE kafka_topic_info SET locked_at = now() WHERE topic = $1", topic)
                self.sent += len(rows)
            if len(rows) < 1000:
                break
        await connection.execute(
            "UPDATE kafka_topic_info SET locked_by = NULL, locked_at = NULL, error = false, retries = 0 "
            "WHERE topic = $1",
            topic,
        )

    async def _send(self, producer: AIOKafkaProducer, topic: str, rows: Sequence[asyncpg.Record]) -> None:
        futures = [await producer.send(topic, value=row["message"], key=row["key"].encode()) for row in rows]
        await asyncio.gather(*futures)
