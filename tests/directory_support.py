"""What the tests of directories share: a model, topics with rows in them, a directory with quick settings."""

import json
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel
from sidings import Directory, KafkaSettings

from .consumer_support import producing

COMPACTED = {"cleanup.policy": "compact"}


class Acquirer(BaseModel):
    """A row of the background's directory, in camelCase or snake_case."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    terminal_id: str
    acquirer_id: str


def row(terminal: str, acquirer: str = "a", **more: Any) -> bytes:
    """The JSON of a row."""
    return json.dumps({"terminalId": terminal, "acquirerId": acquirer, **more}).encode()


def quick(kafka: str, **settings: Any) -> KafkaSettings:
    """Settings that notice things soon."""
    return KafkaSettings(bootstrap=kafka, **{"fetch_seconds": 0.05, "metadata_seconds": 1.0} | settings)


def a_directory(topic: str, kafka: str | KafkaSettings, **options: Any) -> Directory[Any]:
    """A directory of acquirers, with a registry of its own."""
    settings = quick(kafka) if isinstance(kafka, str) else kafka
    defaults: dict[str, Any] = {} if "decoder" in options else {"model": Acquirer}
    return Directory(topic, kafka=settings, **defaults | {"prometheus": CollectorRegistry(), **options})


async def put(kafka: str, topic: str, rows: Mapping[str, bytes | None], *, partition: int = 0) -> None:
    """Send rows, each under its key; None: a tombstone."""
    async with producing(kafka) as producer:
        for key, value in rows.items():
            await producer.send_and_wait(topic, value, key=key.encode(), partition=partition)
