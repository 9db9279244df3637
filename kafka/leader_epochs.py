"""Whether a log still holds what was read of it: after an unclean leader election, or where a broker has lost what it
had not written to its disk, it has been cut off, and may have grown past the reader's offset since.

Each leader of a partition has an epoch, which stands in the batches of records that it has appended. It only grows. Who
has read up to an offset, the last of it in epoch e, asks a leader of a later epoch where e ends in its log (KIP-320):
if that is before the offset, the log was cut off there. Where the epoch is the same, nothing can have been cut. Where
what comes next is of an earlier epoch, it is another log, or the leader is one of before.

aiokafka 0.14 neither hands out epochs nor asks; both stands here, between it and its connections.
"""

import asyncio
import logging
import struct
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IncompatibleBrokerVersion, KafkaConnectionError, OffsetOutOfRangeError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.types import Array, Int16, Int32, Int64, Schema, String

__all__ = ["LeaderEpochs", "ask_epoch_ends"]

log = logging.getLogger("sidings.consumer")

_HEADER = struct.Struct(">qiib")  # of a batch: first offset, length of what follows, leader's epoch, format
_LENGTH_ENDS = 12
_FORMAT = 2  # since Kafka 0.11; batches of before have no epoch
_TEXT = String("utf-8")


class _EpochEndsResponse(Response):
    API_KEY = 23  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    API_VERSION = 3  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            Array(
                ("topic", _TEXT),
                (
                    "partitions",
                    Array(("error_code", Int16), ("partition", Int32), ("leader_epoch", Int32), ("end_offset", Int64)),
                ),
            ),
        ),
    )


class _EpochEndsRequestV3(RequestStruct):
    API_KEY = 23
    API_VERSION = 3
    RESPONSE_TYPE = _EpochEndsResponse
    SCHEMA = Schema(
        ("replica_id", Int32),
        (
            "topics",
            Array(
                ("topic", _TEXT),
                ("partitions", Array(("partition", Int32), ("current_leader_epoch", Int32), ("leader_epoch", Int32))),
            ),
        ),
    )


class _EpochEndsRequest(Request[_EpochEndsRequestV3]):
    """Where these epochs end in the leader's log: OffsetForLeaderEpoch, for which the right to read a topic is enough
    since version 3 (Kafka 2.3)."""

    API_KEY = 23

    def __init__(self, epochs: Mapping[TopicPartition, int]) -> None:
        self._topics: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for tp, epoch in epochs.items():
            self._topics[tp.topic].append((tp.partition, -1, epoch))

    def build(self, request_struct_class: type[_EpochEndsRequestV3]) -> _EpochEndsRequestV3:
        return request_struct_class(-1, list(self._topics.items()))


async def ask_epoch_ends(client: AIOKafkaConsumer, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Where each epoch ends in its partition's log; of old brokers nothing. Raises `KafkaError`."""
    inner: Any = client._client  # pyright: ignore[reportPrivateUsage]  # aiokafka lets nobody else send on its connections
    leaders: dict[int, dict[TopicPartition, int]] = defaultdict(dict)
    for tp, epoch in epochs.items():
        leaders[inner.cluster.leader_for_partition(tp)][tp] = epoch
    ends: dict[TopicPartition, int] = {}
    for leader, theirs in leaders.items():
        if leader in (None, -1):
            raise KafkaConnectionError(f"nobody leads {', '.join(f'{tp.topic}/{tp.partition}' for tp in theirs)}")
        for tp, (error, end) in (await _ask(inner.send, leader, theirs)).items():
            if error:
                raise for_code(error)(f"{tp.topic}/{tp.partition}")
            ends[tp] = end
    return ends


async def _ask(
    send: Callable[[int, _EpochEndsRequest], Awaitable[Any]], node: int, epochs: Mapping[TopicPartition, int]
) -> dict[TopicPartition, tuple[int, int]]:
    """The code of an error, or 0, and where the epoch ends."""
    try:
        response = await send(node, _EpochEndsRequest(epochs))
    except (IncompatibleBrokerVersion, NotImplementedError) as error:  # older than 2.3, or so new that it is gone
        log.debug("nobody tells here where epochs end: %r", error)
        return {}
    return {
        TopicPartition(topic, partition): (error, end)
        for topic, partitions in response.topics
        for error, partition, _, end in partitions
    }


class _Read(NamedTuple):
    """What was read of one partition without a seek: from which offsets on in which epochs; both only grow."""

    starts: list[int]
    epochs: list[int]

    def before(self, offset: int) -> int | None:
        """The epoch of the record before `offset`."""
        index = bisect_left(self.starts, offset)
        return self.epochs[index - 1] if index else None

    def add(self, start: int, epoch: int) -> None:
        """A batch was read. One that comes late, of a former leader, does not take back what a later one has told."""
        first = bisect_right(self.starts, start)
        if first and self.epochs[first - 1] >= epoch:
            return
        last = first
        while last < len(self.epochs) and self.epochs[last] <= epoch:
            last += 1
        self.starts[first:last] = [start]
        self.epochs[first:last] = [epoch]


class _Doubt(NamedTuple):
    """Up to which offset was read, the epoch of the record before it, and that of what comes next."""

    offset: int
    epoch: int
    following: int


class LeaderEpochs:
    """Knows the epochs of what `client` has read since `begin`, and lets it read on only in a log that still holds
    that: else aiokafka is told that its offset is out of the log's range, as it would be had the log not grown again.
    cuts: where logs were found to be cut off, by a client before, too.
    """

    def __init__(self, client: AIOKafkaConsumer, cuts: dict[TopicPartition, int]) -> None:
        connections: Any = client._client  # pyright: ignore[reportPrivateUsage]  # nobody else sees what comes in
        self._send = connections.send
        connections.send = self._send_and_look
        self._read: dict[TopicPartition, _Read] = {}
        self._cuts = cuts

    def begin(self, tp: TopicPartition, offset: int, epoch: int | None) -> None:
        """To be called at each seek. epoch: of the record before `offset`, which was handled; None: not known."""
        self._cuts.pop(tp, None)
        if epoch is None:
            self._read[tp] = _Read([], [])
        elif self.before(tp, offset) != epoch:  # else aiokafka takes what is just being fetched, if it is from `offset`
            self._read[tp] = _Read([offset - 1], [epoch])

    def before(self, tp: TopicPartition, offset: int) -> int | None:
        """The epoch of the record before `offset`, up to which was read since `begin`; None where it is not known."""
        read = self._read.get(tp)
        return None if read is None else read.before(offset)

    def cut(self, tp: TopicPartition) -> int | None:
        """Where the log was cut off, if it was found to be since `begin`; negative where nobody knows."""
        return self._cuts.get(tp)

    def found_cut(self, tp: TopicPartition, offset: int) -> None:
        """The log was found to be cut off there."""
        self._cuts[tp] = offset

    async def _send_and_look(self, node: int, request: Any, **options: Any) -> Any:
        if not isinstance(request, FetchRequest):
            return await self._send(node, request, **options)
        read = self._read.copy()
        response = await self._send(node, request, **options)
        batches: dict[TopicPartition, list[tuple[int, int]]] = {}
        for topic, partitions in response.topics:
            for answer in partitions:
                if answer[-1] and not answer[1] and (tp := TopicPartition(topic, answer[0])) in read:
                    batches[tp] = _batches(answer[-1])
                    await asyncio.sleep(0)  # a megabyte of small batches takes 5 ms
        if not batches:
            return response
        positions = {TopicPartition(topic, at[0]): at[1] for topic, partitions in request.topics for at in partitions}
        refused = await self._verify(node, self._doubts(read, positions, batches))
        for tp, found in batches.items():
            if tp not in refused:
                for start, epoch in found:  # where it was sought since, nobody looks there any more
                    read[tp].add(start, epoch)
        if refused:
            _replace(response, refused)
        return response

    def _doubts(
        self,
        read: Mapping[TopicPartition, _Read],
        positions: Mapping[TopicPartition, int],
        batches: Mapping[TopicPartition, list[tuple[int, int]]],
    ) -> dict[TopicPartition, _Doubt]:
        """Where what comes next is of another epoch than what was read."""
        doubts: dict[TopicPartition, _Doubt] = {}
        for tp, found in batches.items():
            epoch = read[tp].before(positions[tp])
            if found and epoch is not None and found[0][1] != epoch and self._read.get(tp) is read[tp]:
                doubts[tp] = _Doubt(positions[tp], epoch, found[0][1])
        return doubts

    async def _verify(self, node: int, doubts: Mapping[TopicPartition, _Doubt]) -> dict[TopicPartition, int]:
        """The partitions of which nothing may be read on, each with the code of the error that says so."""
        if not doubts:
            return {}
        refused: dict[TopicPartition, int] = {}
        ends = await _ask(self._send, node, {tp: doubt.epoch for tp, doubt in doubts.items()})
        for tp, (error, end) in ends.items():
            offset, epoch, following = doubts[tp]
            if error:
                log.warning("%s/%s: its leader does not say where epoch %s ends: %s", *tp, epoch, for_code(error))
                refused[tp] = error
            elif end < 0:  # it knows no such epoch: it was deposed, or Kafka was set back; whoever places it asks again
                refused[tp] = OffsetOutOfRangeError.errno
            elif following < epoch:  # it has an epoch of that number further on: not the one that was read
                refused[tp] = OffsetOutOfRangeError.errno
                self._cuts[tp] = -1
            elif end < offset:
                if self._cuts.get(tp) != end:
                    log.error("%s/%s: the log was cut off at %s, and had been read up to %s", *tp, end, offset)
                refused[tp] = OffsetOutOfRangeError.errno
                self._cuts[tp] = end
        return refused


def _batches(records: bytes) -> list[tuple[int, int]]:
    """The first offset and the epoch of each batch that begins another epoch."""
    found: list[tuple[int, int]] = []
    at, last, size = 0, -1, len(records)
    while at + _HEADER.size <= size:
        start, length, epoch, form = _HEADER.unpack_from(records, at)
        if length <= 0:
            break  # damaged: whoever reads the records says so
        if form == _FORMAT and epoch > last:
            found.append((start, epoch))
            last = epoch
        at += _LENGTH_ENDS + length
    return found


def _replace(response: Any, refused: Mapping[TopicPartition, int]) -> None:
    """These partitions' answers become errors."""
    for topic, partitions in response.topics:
        for index, answer in enumerate(partitions):
            if (tp := TopicPartition(topic, answer[0])) in refused:
                partitions[index] = (answer[0], refused[tp], *answer[2:-1], b"")
