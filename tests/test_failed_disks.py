"""A broker of whose disks one has failed goes on with the others, and what was on it has another leader."""

from typing import Any

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaStorageError
from aiokafka.protocol.fetch import FetchRequest
from sidings import Message

from .consumer_support import Number, produce
from .support import eventually
from .test_stateless import a_service


class Disk:
    """Nothing is read from it, once it has failed, until the client has asked who leads what now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failed = False
        self.refused: list[AIOKafkaClient] = []
        self._moved: set[AIOKafkaClient] = set()
        self._send, self._update = AIOKafkaClient.send, AIOKafkaClient._metadata_update
        disk = self

        async def send(client: AIOKafkaClient, node: Any, request: Any, **options: Any) -> Any:
            answer: Any = await disk._send(client, node, request, **options)
            if isinstance(request, FetchRequest) and disk.failed and client not in disk._moved:
                disk.refused.append(client)
                for _, partitions in answer.topics:
                    partitions[:] = [(one[0], KafkaStorageError.errno, *one[2:-1], b"") for one in partitions]
            return answer

        async def update(client: AIOKafkaClient, *arguments: Any) -> bool:
            if client in disk.refused:
                disk._moved.add(client)
            return await disk._update(client, *arguments)

        monkeypatch.setattr(AIOKafkaClient, "send", send)
        monkeypatch.setattr(AIOKafkaClient, "_metadata_update", update)


async def test_what_was_on_a_disk_that_has_failed_is_read_from_its_next_leader(
    topic, sidings_kafka, monkeypatch, caplog
):
    """By a consumer and by a directory. The broker answers, so that nothing else makes them ask who leads it."""
    name, handled = await topic(), list[int]()
    disk = Disk(monkeypatch)
    service = a_service(sidings_kafka, metadata_seconds=3_600.0)

    @service.consumer(name, stateless=True, dead_letter=f"{name}.dlq")
    async def handle(message: Message[Number]) -> None:
        handled.append(message.value.n)

    directory = service.directory(name, model=Number)
    async with service:
        await produce(sidings_kafka, name, [0])
        await eventually(lambda: handled == [0] and directory["k"].n == 0)
        disk.failed = True
        await produce(sidings_kafka, name, [1])
        await eventually(lambda: handled == [0, 1] and directory["k"].n == 1)
    assert len({*disk.refused}) == 2
    assert len(disk.refused) < 20, "it is not asked again and again at once"
    assert "Unexpected error" not in caplog.text
    assert f"lets nothing be read of some partitions, trying again: {name}/0 ([Error 56] Kafka" in caplog.text
