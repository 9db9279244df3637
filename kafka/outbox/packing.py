"""Rows of the outbox become batches of Kafka records."""

import random
import struct
from collections.abc import Sequence
from typing import Any

from aiokafka.partitioner import murmur2  # pyright: ignore[reportUnknownVariableType]

from .backlog import Row
from .message import headers_from_text

__all__ = ["MESSAGE_ID", "Packer"]

MESSAGE_ID = "sidings-id"  # a repeat of a message carries the same id

_REMEMBERED = 100_000  # hashes of keys; aiokafka's murmur2 is Python, and keys come again


class Packer:
    """Chooses partitions as Kafka's own clients do, and fills batches. service: stands in the message ids."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._hashes: dict[bytes, int] = {}

    def partition_of(self, key: bytes | None, partitions: Sequence[int]) -> int:
        """The partition of a key; any one without."""
        if key is None:
            return random.choice(partitions)
        hashed = self._hashes.get(key)
        if hashed is None:
            hashed = self._hashes[key] = int(murmur2(key)) & 0x7FFFFFFF
        return partitions[hashed % len(partitions)]

    def by_partition(self, rows: Sequence[Row], partitions: Sequence[int]) -> dict[int, list[Row]]:
        """The rows of each partition, in order. Those without a key go to one partition, another for each batch."""
        groups: dict[int, list[Row]] = {}
        keyless = random.choice(partitions)
        if len(self._hashes) > _REMEMBERED:
            self._hashes.clear()
        for row in rows:
            key = row.key if row.partition_key is None else row.partition_key
            partition = keyless if key is None else self.partition_of(key, partitions)
            group = groups.get(partition)
            if group is None:
                groups[partition] = [row]
            else:
                group.append(row)
        return groups

    def pack(self, batch: Any, rows: Sequence[Row]) -> tuple[list[Row], list[tuple[Row, str]]]:
        """Append `rows` to `batch` until it is full. Returns those that are in it, and those that cannot be, with the
        reason."""
        packed: list[Row] = []
        bad: list[tuple[Row, str]] = []
        append = batch.append
        prefix = f"{self._service}:"
        for row in rows:
            name = (MESSAGE_ID, f"{prefix}{row.id:x}.{row.published_us:x}".encode())
            try:
                headers = [name] if row.headers is None else [*headers_from_text(row.headers), name]
                added = append(timestamp=row.timestamp_ms, key=row.key, value=row.value, headers=headers)
            except (TypeError, ValueError, OverflowError, struct.error) as error:
                bad.append((row, f"it cannot be encoded: {error!r}"))
                continue
            if added is None:
                break
            packed.append(row)
        return packed, bad
