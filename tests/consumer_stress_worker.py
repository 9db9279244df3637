"""One instance of a service with consumers of every kind: `python consumer_stress_worker.py DSN BOOTSTRAP FLAG`.

What a message does is told by its number; see `behave`. FLAG: a file; without it, some messages cannot be decoded.
"""

import asyncio
import contextlib
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

import asyncpg
from sidings import (
    Discard,
    ExecutorSettings,
    KafkaSettings,
    Message,
    PostgresSettings,
    Retry,
    Service,
    Snooze,
    Transaction,
)
from tenacity import stop_after_attempt, wait_fixed

INSERT = """
    INSERT INTO effect (topic, partition, "offset", key, number, via, epoch)
    SELECT $1, $2, $3, $4, $5, $6, (SELECT resets FROM sidings.consumer_offset WHERE topic = $1 AND partition = $2)
"""
RETRY = Retry(wait=wait_fixed(0.05), stop=stop_after_attempt(3))


def a_worker(dsn: str, bootstrap: str, flag: str) -> Service:
    kafka = KafkaSettings(
        bootstrap=bootstrap,
        session_seconds=2,
        rebalance_seconds=5,
        request_seconds=8,
        fetch_seconds=0.05,
        metadata_seconds=1,
        max_records=40,
    )
    postgres = PostgresSettings(dsn=dsn, call_seconds=3.0, connect_seconds=3.0)
    service = Service(
        "test", postgres=postgres, kafka=kafka, executor=ExecutorSettings(lease_seconds=2, shutdown_seconds=2)
    )
    once: set[tuple[str, int, str]] = set()

    def first(message: Message[Any], what: str) -> bool:
        mark = (message.topic, message.value["n"], what)
        if mark in once:
            return False
        once.add(mark)
        return True

    def parked() -> bool:
        return asyncio.current_task().get_name() == "sidings worker"

    async def behave(message: Message[Any], tx: Transaction) -> None:
        n = message.value["n"]
        via = "job" if parked() else "message"
        await tx.execute(INSERT, message.topic, message.partition, message.offset, message.key, n, via)
        if n % 47 == 3 and (not parked() or first(message, "job")):
            raise ValueError("not in the main line")
        if n % 29 == 5 and first(message, "again"):
            raise ValueError("not yet")
        if n % 211 == 7 and first(message, "slow"):
            await asyncio.sleep(30)
        if n % 61 == 1 and first(message, "swallow"):
            with contextlib.suppress(asyncpg.PostgresError):
                await tx.execute("SELECT 1 / 0")
        if n % 71 == 2:
            raise Discard("nothing")
        if n % 37 == 4 and first(message, "snooze"):
            raise Snooze(0.2)
        if random.random() < 0.002:
            raise RuntimeError("at random")

    def decode(message: Message[Any]) -> Any:
        value = json.loads(message.value)
        if value["n"] % 41 == 9 and not Path(flag).exists():
            raise ValueError("not decodable yet")
        if value["n"] % 43 == 10:
            raise ValueError("never")
        return value

    async def one(message: Message[Any], tx: Transaction) -> None:
        await behave(message, tx)

    async def many(messages: list[Message[Any]], tx: Transaction) -> None:
        for message in messages:
            await behave(message, tx)

    common: dict[str, Any] = {"retry": RETRY, "timeout": 1.0}
    service.consumer("plain", decoder=decode, dedup="sidings-id", **common)(one)
    service.consumer("lists", decoder=decode, batch=15, **common)(many)
    service.consumer("isolated", decoder=decode, isolate=True, dedup="sidings-id", timeout=1.0)(one)
    service.consumer("grows", decoder=decode, max_waiting=30, **common)(one)
    typed = service.topic("typed", type_header="t", **common)
    typed.on("one", decoder=decode)(one)
    typed.on("many", decoder=decode, batch=10)(many)
    typed.on(None, decoder=decode)(one)
    return service


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(a_worker(*sys.argv[1:]).run())
