"""A consumer of a cluster whose brokers die, under producers whose transactions commit or abort: what was committed
takes effect once, and nothing else does."""

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from sidings import Message, Transaction
from sidings.devstack.errors import DevstackError
from sidings.devstack.topics import create_topic

from .consumer_support import Number, a_service, as_json, numbers, record
from .support import SECONDS, eventually, value

PARTITIONS = 6
SETTINGS = {
    "fetch_seconds": 0.05,
    "session_seconds": 6,
    "rebalance_seconds": 4,
    "request_seconds": 8,
    "max_records": 50,
}


class Sent:
    """Numbers by what became of their transactions; of some nobody knows."""

    def __init__(self) -> None:
        self.committed: set[int] = set()
        self.aborted: set[int] = set()
        self.unknown: set[int] = set()
        self.enough = asyncio.Event()

    async def flow(self, bootstrap: str, producer_number: int) -> None:
        """Transactions of five messages over all partitions; each third one is aborted."""
        producer, turn = None, 0
        while not self.enough.is_set():
            turn += 1
            batch = [producer_number * 1_000_000 + turn * 10 + n for n in range(5)]
            try:
                async with asyncio.timeout(SECONDS):
                    if producer is None:
                        options: dict[str, Any] = {
                            "transactional_id": f"flow-{producer_number}",
                            "request_timeout_ms": 8_000,
                        }
                        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, **options)
                        await producer.start()
                    await producer.begin_transaction()
                    for number in batch:
                        await producer.send_and_wait("positions", as_json(number), partition=number % PARTITIONS)
                    if turn % 3 == 0:
                        await producer.abort_transaction()
                        self.aborted.update(batch)
                    else:
                        self.unknown.update(batch)
                        await producer.commit_transaction()
                        self.unknown.difference_update(batch)
                        self.committed.update(batch)
            except (KafkaError, OSError, AssertionError):  # its successor's first act aborts what is open
                await self._stop(producer)
                producer = None
        await self._stop(producer)

    async def _stop(self, producer: AIOKafkaProducer | None) -> None:
        if producer is not None:
            with contextlib.suppress(KafkaError, OSError, AssertionError):
                async with asyncio.timeout(5):
                    await producer.stop()


@pytest.mark.chaos
@pytest.mark.timeout(400)
async def test_what_was_committed_takes_effect_once_while_brokers_are_killed_and_paused(effects, own_kafka):
    kafka = await asyncio.to_thread(own_kafka, brokers=3)
    replicated = {"replicas": 3, "config": {"min.insync.replicas": "2"}}
    await create_topic(kafka.bootstrap, "positions", partitions=PARTITIONS, **replicated)
    sent, calls = Sent(), Counter[str]()

    def an_instance() -> Any:
        service = a_service(effects, kafka.bootstrap, settings=SETTINGS)

        @service.consumer("positions")
        async def handle(message: Message[Number], tx: Transaction) -> None:
            await record(message, tx)
            calls["handled"] += 1
            if calls["handled"] % 97 == 0:
                raise ValueError("now and then")

        return service

    async def all_there() -> bool:
        return sent.committed <= set(await numbers(effects))

    flows = [asyncio.create_task(sent.flow(kafka.bootstrap, number)) for number in (1, 2)]
    async with an_instance():
        for turn, node in enumerate((1, 2, 3)):
            async with an_instance():  # and leaves again
                before = len(sent.committed)
                broker = kafka.broker(node)
                await asyncio.to_thread(broker.kill if turn % 2 else broker.pause)
                await eventually(lambda: len(sent.committed) > before + 50, seconds=3 * SECONDS)  # noqa: B023
                with contextlib.suppress(DevstackError):  # a busy machine: the other two serve
                    await asyncio.to_thread(broker.start if turn % 2 else broker.resume)
        sent.enough.set()
        await asyncio.gather(*flows)
        await eventually(all_there, seconds=3 * SECONDS)
    found = await numbers(effects)
    assert len(found) == len(set(found))
    assert set(found) <= sent.committed | sent.unknown
    assert sent.aborted
    assert await value(effects, 'SELECT count(DISTINCT (partition, "offset")) FROM effect') == len(found)
