"""A partition whose place in the log could not be found is looked at again, whatever it was that failed: nothing else
would wake who places it, and it stood still without a word."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError, KafkaError
from prometheus_client import CollectorRegistry
from sidings import PostgresUnavailable
from sidings.kafka.metrics import ConsumerMetrics
from sidings.kafka.offsets import Move, OffsetsMoved
from sidings.kafka.partition import Partition, State
from sidings.kafka.placing import Placer

from .support import eventually

TP = TopicPartition("positions", 0)
FIRST, STORED = 5, 3  # retention has deleted what is between


class Server:
    """Kafka and the stored offsets, of one partition. ends: how their answers end, by what is asked, and then well."""

    def __init__(self, ends: dict[str, list[Exception]]) -> None:
        self.ends = ends
        self.stored = STORED
        self._client: Any = SimpleNamespace(failed_at={})

    def _answer(self, what: str) -> None:
        if ends := self.ends.get(what):
            raise ends.pop(0)

    def assignment(self) -> set[TopicPartition]:
        return {TP}

    async def beginning_offsets(self, _: object) -> dict[TopicPartition, int]:
        self._answer("log")
        return {TP: FIRST}

    async def end_offsets(self, _: object) -> dict[TopicPartition, int]:
        return {TP: 9}

    async def load(self, _: object) -> dict[TopicPartition, int]:
        self._answer("load")
        return {TP: self.stored}

    async def jump(self, move: Move) -> None:
        self._answer("jump")
        self.stored = move.next

    def seek(self, *_: object) -> None: ...
    def resume(self, *_: object) -> None: ...
    def begin(self, *_: object) -> None: ...

    def resets(self, _: object) -> int:
        return 0

    def epoch(self, _: object) -> None: ...


@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
@pytest.mark.parametrize(
    "ends",
    [
        {"load": [PostgresUnavailable("away")]},
        {"jump": [KafkaError("a commit is refused")]},
        {"jump": [OffsetsMoved([TP])]},
    ],
    ids=["no offset", "refused", "moved"],
)
async def test_a_partition_that_could_not_be_placed_is_placed_later(alone, ends, monkeypatch):
    """alone: by itself, since Kafka has not said at first where the logs of all begin."""
    monkeypatch.setattr("sidings.kafka.placing._AGAIN_SECONDS", 0.01)
    away = [KafkaConnectionError("nobody leads it")] * 2 if alone else []
    server: Any = Server({"log": away} | {what: list(errors) for what, errors in ends.items()})
    partition = Partition(TP)
    tasks: list[asyncio.Task[None]] = []
    placer = Placer(
        server,
        {TP: partition},
        {},
        server,
        server,
        ConsumerMetrics("test", CollectorRegistry(), {TP.topic}),
        request_seconds=1,
        on_placed=lambda: None,
        spawn=lambda work: tasks.append(asyncio.create_task(cast(Any, work))),
    )
    tasks.append(asyncio.create_task(placer.run()))
    try:
        placer.wake()
        await eventually(lambda: partition.state is State.READY, seconds=10)
        assert partition.next_offset == FIRST
        assert not any(server.ends.values())
        partition.displace()
        placer.wake()
        await eventually(lambda: partition.state is State.READY, "it is not placed again", seconds=10)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
