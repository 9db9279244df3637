"""One instance of a stateless service in a process of its own, to be killed:
`python stateless_worker.py BOOTSTRAP TOPIC RESULTS DEAD`.

Each message leaves a result; one in ten fails the first time, and each multiple of 50 for good.
"""

import asyncio
import logging
import random
import sys

from pydantic import BaseModel
from sidings import KafkaSettings, Message, Retry, Service
from tenacity import stop_after_attempt, wait_fixed


class Number(BaseModel):
    n: int


def a_worker(bootstrap: str, topic: str, results: str, dead: str) -> Service:
    kafka = KafkaSettings(
        bootstrap=bootstrap, session_seconds=2, rebalance_seconds=5, fetch_seconds=0.05, max_records=50
    )
    service = Service("test", kafka=kafka)
    failed: set[int] = set()
    retry = Retry(wait=wait_fixed(0.02), stop=stop_after_attempt(2))

    @service.consumer(topic, stateless=True, concurrency=4, retry=retry, dead_letter=dead)
    async def handle(message: Message[Number]) -> None:
        n = message.value.n
        await asyncio.sleep(random.uniform(0, 0.01))
        if n % 50 == 0 or (n % 10 == 0 and n not in failed):
            failed.add(n)
            raise ValueError("not yet")
        await service.producer.send(results, key=message.key, value=message.value)

    return service


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(a_worker(*sys.argv[1:]).run())
