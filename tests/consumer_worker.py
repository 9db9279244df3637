"""One instance of a service in a process of its own, to be killed: `python consumer_worker.py DSN BOOTSTRAP TOPIC`.

Each message leaves a row in `effect` and a transactional job, which leaves another; one message in ten fails the first
time, and one in fifty until it is parked.
"""

import asyncio
import logging
import sys

from pydantic import BaseModel
from sidings import ExecutorSettings, Job, KafkaSettings, Message, Retry, Service, Transaction
from tenacity import stop_after_attempt, wait_fixed

INSERT = 'INSERT INTO effect (topic, partition, "offset", key, number, via) VALUES ($1, $2, $3, $4, $5, $6)'


class Number(BaseModel):
    n: int


class Seen(BaseModel):
    topic: str
    partition: int
    offset: int
    key: str
    n: int


def a_worker(dsn: str, bootstrap: str, topic: str) -> Service:
    kafka = KafkaSettings(
        bootstrap=bootstrap, session_seconds=2, rebalance_seconds=5, fetch_seconds=0.05, max_records=50
    )
    service = Service("test", postgres=dsn, kafka=kafka, executor=ExecutorSettings(lease_seconds=2))
    failed: set[int] = set()

    @service.job(group="key", transactional=True)
    async def follow_up(job: Job[Seen]) -> None:
        seen = job.payload
        await job.tx.execute(INSERT, seen.topic, seen.partition, seen.offset, seen.key, seen.n, "job")

    @service.consumer(topic, retry=Retry(wait=wait_fixed(0.02), stop=stop_after_attempt(2)))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        seen = Seen(
            topic=topic,
            partition=message.partition,
            offset=message.offset,
            key=message.key_text or "",
            n=message.value.n,
        )
        await tx.execute(INSERT, seen.topic, seen.partition, seen.offset, seen.key, seen.n, "message")
        await follow_up.enqueue(tx, seen)
        parked = asyncio.current_task().get_name() == "sidings worker"  # type: ignore[union-attr]
        if not parked and (seen.n % 50 == 0 or (seen.n % 10 == 0 and seen.n not in failed)):
            failed.add(seen.n)
            raise ValueError("not yet")

    return service


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(a_worker(*sys.argv[1:]).run())
