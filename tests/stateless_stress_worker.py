"""One instance of a stateless service: `python stateless_stress_worker.py BOOTSTRAP JOURNAL`.

What a message does is told by its number. JOURNAL gets a line when a handler starts, and one when it is done.
"""

import asyncio
import json
import logging
import os
import random
import sys
from typing import Any

from sidings import Discard, KafkaSettings, Message, Retry, Service, Snooze
from tenacity import stop_after_attempt, wait_fixed


def a_worker(bootstrap: str, journal: str) -> Service:
    kafka = KafkaSettings(
        bootstrap=bootstrap,
        session_seconds=2,
        rebalance_seconds=4,
        request_seconds=6,
        fetch_seconds=0.05,
        metadata_seconds=1,
        max_records=20,
    )
    service = Service("test", kafka=kafka)
    file = os.open(journal, os.O_APPEND | os.O_WRONLY)
    once: set[tuple[str, int, int, str]] = set()

    def note(event: str, message: Message[Any]) -> None:
        os.write(file, (json.dumps([event, message.topic, message.partition, message.offset]) + "\n").encode())

    def first(message: Message[Any], what: str) -> bool:
        mark = (message.topic, message.partition, message.offset, what)
        return mark not in once and (once.add(mark) or True)

    async def handle(message: Message[Any]) -> None:
        n = message.value["n"]
        note("start", message)
        await asyncio.sleep(random.choice([0, 0, 0.001, 0.01, 0.05]))
        if n % 23 == 3 and first(message, "again"):
            raise ValueError("not yet")
        if n % 97 == 5:
            raise ValueError("never")
        if n % 59 == 4 and first(message, "snooze"):
            raise Snooze(0.3)
        if n % 151 == 7 and first(message, "slow"):
            await asyncio.sleep(10)
        if n % 211 == 8 and first(message, "cancelled"):
            raise asyncio.CancelledError
        note("end", message)
        if n % 71 == 2:
            raise Discard("it is done, too")

    retry = Retry(wait=wait_fixed(0.05), stop=stop_after_attempt(3))
    for topic, concurrency in (("one", 1), ("many", 5)):
        service.consumer(
            topic, model=dict, stateless=True, concurrency=concurrency, dead_letter="dead", timeout=1.5, retry=retry
        )(handle)
    return service


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(a_worker(*sys.argv[1:]).run())
