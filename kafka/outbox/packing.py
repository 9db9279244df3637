"""Rows of the outbox become batches of Kafka records."""

import random
import struct
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from ..topics import Partitioner, key_hash
from .backlog import Row, order_key_of
from .message import headers_from_text

__all__ = ["MESSAGE_ID", "Packed", "Packer"]

MESSAGE_ID = "sidings-id"  # a repeat of a message carries the same id

_INFINITE = 2**63 - 1  # what read.sql makes of an infinite timestamp
_REMEMBERED = 100_000  # hashes of keys; aiokafka's murmur2 is Python, and keys come again
_LONG_KEY = 200  # bytes; longer ones are not remembered: they may have megabytes


@dataclass(slots=True)
class Packed:
    """A batch for one partition. all_rows: what was to go into it; rows: what is in it; bad: what cannot be sent, with
    the reason; rest: what had no room."""

    batch: Any
    all_rows: list[Row]
    rows: list[Row]
    bad: list[tuple[Row, str]]
    rest: list[Row]


class Packer:
    """Chooses partitions as Kafka's own clients do, and fills batches.

    service: stands in the message ids. partitioners: as `KafkaSettings` has them. most: messages of a batch. max_bytes:
    of a value, a key or headers; a request beyond the broker's own limit would only break the connection, again and
    again, and a long key takes the event loop.
    """

    def __init__(
        self,
        service: str,
        partitioners: Mapping[str, Partitioner],
        *,
        most: int = sys.maxsize,
        max_bytes: int = sys.maxsize,
    ) -> None:
        self._most = most
        self._id = f"{service}:".encode().replace(b"%", b"%%") + b"%x.%x"
        self._max_bytes = max_bytes
        self._partitioners = partitioners
        self._hashes: dict[Partitioner, _Hashes] = {
            "murmur2": _Hashes("murmur2", max_bytes),
            "crc32": _Hashes("crc32", max_bytes),
        }

    def partition_of(self, topic: str, key: bytes | None, partitions: Sequence[int]) -> int:
        """The partition of a key; any one without."""
        if key is None:
            return random.choice(partitions)
        return partitions[self._hashes_of(topic)[key] % len(partitions)]

    def by_partition(
        self,
        topic: str,
        rows: Sequence[Row],
        partitions: Sequence[int],
        avoided: Collection[int] = (),
        *,
        spread: bool = False,
    ) -> dict[int, list[Row]]:
        """The rows of each partition, in order. Those without a key go to one partition, another for each batch; not to
        one that is avoided, if there is another. spread: to all of these."""
        count, hashes = len(partitions), self._hashes_of(topic)
        groups: list[list[Row]] = [[] for _ in partitions]
        open = [group for group, partition in zip(groups, partitions, strict=True) if partition not in avoided]
        keyless = cycle(random.sample(open or groups, len(open or groups) if spread else 1))
        for row in rows:
            key = row[2] if row[3] is None else row[3]  # `order_key_of`, without a call for each
            (next(keyless) if key is None else groups[hashes[key] % count]).append(row)
        return {partition: group for partition, group in zip(partitions, groups, strict=True) if group}

    def goes_to(self, topic: str, some: Collection[int], partitions: Sequence[int]) -> Callable[[Row], bool]:
        """Whether a message's key takes it to one of some partitions."""

        def goes(row: Row) -> bool:
            key = order_key_of(row)
            return key is not None and self.partition_of(topic, key, partitions) in some

        return goes

    def pack(self, batch: Any, rows: list[Row], *, as_of_now: bool = False) -> Packed:
        """Append `rows` to `batch` until it is full. as_of_now: those that have no timestamp of their own get the time
        of now, not that of their publication. Only where Kafka has refused that: of a time that lies far behind, as
        where this machine's clock is wrong, its retention drops them at once."""
        all_rows, bad = rows, list[tuple[Row, str]]()
        rows, rest = rows[: self._most], rows[self._most :]
        # Its own `append` takes as long again: it hands keywords on, and asks for serialisers that we have none of.
        append, message_id, limit = batch._builder.append, self._id, self._max_bytes
        now_ms, count = int(time.time() * 1000), 0
        for index, row in enumerate(rows):
            id, _, key, partition_key, value, text, timestamp_ms, published_us = row
            if (
                (value is not None and len(value) > limit)
                or (key is not None and len(key) > limit)
                or (text is not None and len(text) > limit)
                or (partition_key is not None and len(partition_key) > limit)
            ):
                bad.append((row, f"it has {_sizes(row)}, one of them more than max_message_bytes={limit}"))
                continue
            headers = [(MESSAGE_ID, message_id % (id, published_us))]
            if timestamp_ms is None:
                timestamp_ms = now_ms if as_of_now else published_us // 1000
            elif timestamp_ms == _INFINITE:
                bad.append((row, "its timestamp is infinite"))
                continue
            try:
                if text is not None:
                    headers = [*headers_from_text(text), *headers]
                added = append(count, timestamp_ms, key, value, headers)
            except (TypeError, ValueError, OverflowError, RecursionError, struct.error) as error:
                bad.append((row, f"it cannot be encoded: {error!r}"))
                continue
            if added is None:
                rows, rest = rows[:index], rows[index:] + rest
                break
            count += 1
        batch._relative_offset = count
        if bad:
            unfit = {row[:2] for row, _ in bad}  # one id may stand in two slots
            rows = [row for row in rows if row[:2] not in unfit]
        return Packed(batch, all_rows, rows, bad, rest)

    def _hashes_of(self, topic: str) -> "_Hashes":
        return self._hashes[self._partitioners.get(topic, "murmur2")]


class _Hashes(dict[bytes, int]):
    """Those of keys, by one kind of hash."""

    def __init__(self, partitioner: Partitioner, max_bytes: int) -> None:
        super().__init__()
        self._partitioner: Partitioner = partitioner
        self._max_bytes = max_bytes
        self._last_long: tuple[bytes | None, int] = (None, 0)  # each part asks whether a message is its own

    def __missing__(self, key: bytes) -> int:
        if len(key) > self._max_bytes:
            return 0  # wherever it is, it is not sent
        if key is self._last_long[0]:
            return self._last_long[1]
        hashed = key_hash(key, self._partitioner)
        if len(key) <= _LONG_KEY:
            if len(self) >= _REMEMBERED:
                self.clear()
            self[key] = hashed
        else:
            self._last_long = key, hashed
        return hashed


def _sizes(row: Row) -> str:
    key, partition_key, value, headers = (len(x or "") for x in row[2:6])
    return f"a value of {value} bytes, a key of {key}, headers of {headers}, a partition key of {partition_key}"
