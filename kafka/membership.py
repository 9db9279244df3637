"""The client that joins the consumer group, and what any client has to know."""

import asyncio
import gzip
import logging
import struct
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer.fetcher import PartitionRecords
from aiokafka.errors import (
    BrokerResponseError,
    CorruptRecordException,
    GroupAuthorizationFailedError,
    InconsistentGroupProtocolError,
    InvalidSessionTimeoutError,
    KafkaConnectionError,
    KafkaError,
    OffsetMetadataTooLargeError,
    UnsupportedCodecError,
    kafka_errors,
)
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.record.control_record import ABORT_MARKER, ControlRecord

from ..waiting import done_unless_set, unless_set
from .assignor import Assignor
from .brokers import go_around_hanging_brokers, throttling, unreached
from .settings import KafkaSettings

__all__ = ["UNREADABLE", "AnyOf", "Contact", "close", "connect", "describe", "explained", "make_client", "watch"]

log = logging.getLogger("sidings.consumer")


def _undecompressed() -> type[Exception]:
    try:
        return import_module("cramjam").DecompressionError
    except ImportError:  # aiokafka decompresses without it what gzip has compressed, and refuses the rest
        return CorruptRecordException


# Of a record itself: damaged, compressed in an unknown way or so that it cannot be decompressed, or with a header whose
# name is no UTF-8. Of `getmany` and `position` only: in aiokafka 0.14 these run into struct.error and EOFError nowhere
# but where they take records apart. What its tasks run into comes out of them as a `KafkaError`.
UNREADABLE = (
    CorruptRecordException,
    UnsupportedCodecError,
    UnicodeDecodeError,
    _undecompressed(),
    gzip.BadGzipFile,  # an OSError
    zlib.error,
    struct.error,
    EOFError,
)

_REFUSALS: dict[type[BaseException], str] = {
    GroupAuthorizationFailedError: "there is no right to read this consumer group: grant READ on it",
    InconsistentGroupProtocolError: "the group has a member whose assignor is not 'sticky', such as a consumer that "
    "this service takes over from: end it, or give KafkaSettings.group another name",
    InvalidSessionTimeoutError: "KafkaSettings.session_seconds must lie between the brokers' "
    "group.min.session.timeout.ms and group.max.session.timeout.ms",
    OffsetMetadataTooLargeError: "beside an offset stand its topic's id and its leader's epoch: the brokers' "
    "offset.metadata.max.bytes must let them, 4096 is its default",
}


class GroupMaxSizeReachedError(BrokerResponseError):
    """aiokafka 0.14 does not know it, and hands on no more of it than its `repr`."""

    errno = 81
    message = "GROUP_MAX_SIZE_REACHED"
    description = "the group has as many members as brokers let it have: raise group.max.size, or run fewer instances"

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.description}"


kafka_errors[GroupMaxSizeReachedError.errno] = GroupMaxSizeReachedError


def _contains_abort_marker(_records: object, batch: Iterator[Any]) -> bool:
    """Compaction takes a marker away, and leaves its batch, empty, where the producer's epoch stands nowhere else.
    aiokafka 0.14 takes that for a mistake, and reads no further."""
    marker = next(batch, None)
    return marker is not None and ControlRecord.parse(marker.key) == ABORT_MARKER


PartitionRecords._contains_abort_marker = _contains_abort_marker  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]

_CLOSE_SECONDS = 5.0
_END_SECONDS = 2.0
_LOOK_SECONDS = 1.0
_LOST_SECONDS = 60.0  # without any of the brokers that a client knows
_closing: set[asyncio.Task[None]] = set()  # an event loop itself does not keep its tasks
_NOTHING = TopicPartition("", 0)  # to be polled for: no records come of it
# Never leave the group for want of polls: while Postgres is away nothing is polled, and no other member could do
# better. A consumer that hangs is the health check's business.
_NO_POLL_LIMIT_MS = 2**31 - 1


def make_client(
    settings: KafkaSettings, group_id: str, seen: dict[str, Any] | None = None, *, unread: Collection[str] = ()
) -> AIOKafkaConsumer:
    """A client that has not connected yet. Positions are ours to set, and offsets ours to commit. seen: what one client
    was told of the topics, for the next one. unread: topics that it joins only for the jobs of their partitions."""
    # A class of its own, see there. Sticky: an origin that stays where it is needs neither a drain nor a new lease.
    assignor = type("Sticky", (Assignor,), {"unread": frozenset(unread)})
    client = AIOKafkaConsumer(
        **settings.consumer_options(),
        group_id=group_id,
        enable_auto_commit=False,
        auto_offset_reset="none",
        max_poll_interval_ms=_NO_POLL_LIMIT_MS,
        partition_assignment_strategy=[assignor],
    )
    inner: Any = client._client  # pyright: ignore[reportPrivateUsage]
    there = set[str]()  # at some time; one that is not any more was deleted

    def remember(cluster: Any) -> None:
        there.update(cluster.topics())

    inner.cluster.add_listener(remember)
    go_around_hanging_brokers(
        inner, session_seconds=settings.session_seconds, wanted=lambda: inner._topics - there, seen=seen
    )
    return client


async def connect(client: AIOKafkaConsumer, stopping: asyncio.Event, seconds: float) -> None:
    """Connect, unless `stopping` is set first. Raises `KafkaError`, `OSError` (`TimeoutError` is one)."""
    try:
        async with asyncio.timeout(seconds):
            await unless_set(stopping, client.start())
    except TimeoutError:
        raise TimeoutError(f"Kafka did not answer within {seconds} s") from None


async def describe(client: Any, topics: Collection[str]) -> Any:
    """A broker's answer about these topics alone: with all of a cluster it takes a second to read that of thousands.
    Where brokers make topics that are asked for, this makes none. client: a consumer, or one for administration.

    Raises `KafkaError`.
    """
    inner: Any = client._client  # aiokafka lets nobody else send on its connections
    return await inner.send(inner.get_random_node(), MetadataRequest(list(topics), False))


def explained(error: BaseException) -> BaseException:
    """The same, with what to do about it where the group refuses its member: aiokafka tells the error's name alone."""
    what = _REFUSALS.get(type(error))
    return error if what is None else type(error)(": ".join([*map(str, error.args), what]))


class AnyOf(TopicPartition):
    """To be polled for instead of `partitions`, all of which it equals. aiokafka compares each partition that has
    messages with each name, one after another: with a thousand of both that takes longer than all else together. (To
    name none means all, also those that a rebalance brings while the poll waits.) It has no hash: a client that looked
    names up in a set would find none of them, and read nothing, without a word."""

    _partitions: frozenset[TopicPartition]

    def __new__(cls, partitions: Iterable[TopicPartition]) -> Self:
        name = super().__new__(cls, "any of several", -1)
        name._partitions = frozenset(partitions)
        return name

    def __eq__(self, other: object) -> bool:
        return other in self._partitions

    def __ne__(self, other: object) -> bool:
        return other not in self._partitions

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Contact:
    """Notices that a client has lost its cluster: it asks the brokers that it has met for ever, and the addresses that
    it was given only at its start. All brokers may have got others meanwhile. And that one of its tasks has ended, over
    an error that aiokafka does not expect: nobody is told, and nothing more is fetched, or known of the cluster."""

    def __init__(self, client: AIOKafkaConsumer) -> None:
        self.lost_since: float | None = None  # `time.monotonic`
        self._client: Any = client

    @property
    def throttling(self) -> str:
        """As `brokers.throttling`."""
        return throttling(self._client._client)

    def unled(self, tps: Iterable[TopicPartition]) -> list[str]:
        """Those of these partitions that nobody leads, as far as the client knows. Any thread may ask."""
        leader = self._client._client.cluster.leader_for_partition
        return [f"{tp.topic}/{tp.partition}" for tp in tps if leader(tp) == -1]

    def silence(self, tps: Iterable[TopicPartition]) -> str:
        """Why Kafka says nothing about these partitions, where that is known: the end of a sentence. Any thread may
        ask."""
        if why := self.throttling:
            return why
        if unled := self.unled(tps := list(tps)):
            return f": nobody leads {', '.join(unled[:5])}"
        client = self._client._client
        return unreached(client, {client.cluster.leader_for_partition(tp) for tp in tps})

    def unheard(self) -> float:
        """For how many seconds the group's coordinator has not answered, if that is more than a session: it may have
        given our partitions to others, and cannot tell us. Any thread may ask."""
        inner = self._client._client
        if inner.heard_at is None or (seconds := time.monotonic() - inner.heard_at) <= inner.session_seconds:
            return 0.0
        return seconds

    @property
    def unreached(self) -> str:
        """As `brokers.unreached`."""
        return unreached(self._client._client)

    def check(self) -> None:
        """To be called every second or so. Raises `KafkaError` when the client has to be made anew."""
        for task in (self._client._fetcher._fetch_task, self._client._client._sync_task):
            if task is not None and task.done():
                error = None if task.cancelled() else task.exception()
                raise KafkaError(f"a task of the client has ended: {error!r}")
        cluster = self._client._client.cluster  # aiokafka 0.14 says nowhere in public that it has found no broker
        if cluster._last_refresh_ms == cluster._last_successful_refresh_ms or self._client._client.throttled:
            # A broker that throttles has said when it answers; what was on its way to it then is not answered in time.
            self.lost_since = None
            return
        if self.lost_since is None:
            self.lost_since = time.monotonic()
        elif time.monotonic() - self.lost_since > _LOST_SECONDS:
            raise KafkaConnectionError(f"none of the brokers that it knows has answered for {_LOST_SECONDS:.0f} s")
        self._client._client.force_metadata_update()  # by itself it asks again when its metadata are too old, no sooner


async def watch(client: AIOKafkaConsumer, contact: Contact) -> NoReturn:
    """Raise the `KafkaError` that keeps the client out of its group, once there is one. aiokafka tells it to whoever
    polls, and does not ask the group again before that; between assignments, and of full partitions, nobody polls."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        contact.check()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):  # it waits for an assignment, and a lost cluster gives none
                await client.getmany(_NOTHING, timeout_ms=0)


async def close(client: AIOKafkaConsumer) -> None:
    """Leave the group and close the connections; what fails is only logged. Where this is cancelled no answer is waited
    for, and where it is again, as by a scope of anyio's at each turn of the loop, what is left ends by itself."""
    hurry = asyncio.Event()
    closing = asyncio.create_task(_close(client, hurry), name="sidings closing a Kafka client")
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)
    try:
        await asyncio.wait([closing])
    except asyncio.CancelledError:
        hurry.set()
        await asyncio.wait([closing])
        raise
    if not closing.cancelled():
        closing.result()


async def _close(client: AIOKafkaConsumer, hurry: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            if await done_unless_set(hurry, client.stop()):
                return
    except Exception as error:  # noqa: BLE001 - also what has ended one of its tasks
        log.warning("the Kafka client was not closed in good order: %r", error)
    except asyncio.CancelledError:
        # Hardly for us: aiokafka 0.14 cancels its fetches and awaits them, and one that waits to be tried again, as is
        # usual where Kafka is away, comes out as cancelled.
        pass
    await _end(client)


async def _end(client: AIOKafkaConsumer) -> None:
    """End what a `stop` that was not answered has left. aiokafka 0.14 waits for the answer first, does the rest after
    it, and nothing when it is called again: its tasks would go on fetching, one more set with each new connection."""
    parts: Any = client
    coordinator = parts._coordinator
    for name in ("_coordination_task", "_heartbeat_task", "_commit_refresh_task"):
        task: asyncio.Task[object] | None = getattr(coordinator, name, None)
        if task is not None:
            task.cancel()
    if (fetching := getattr(parts._fetcher, "_fetch_task", None)) is not None:  # it would begin new ones
        fetching.cancel()
        await asyncio.wait([fetching])
    pending: set[asyncio.Task[object]] = getattr(parts._fetcher, "_pending_tasks", set[asyncio.Task[object]]())
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    pending.clear()
    if (synchronizer := parts._client._sync_task) is not None and synchronizer.done():
        parts._client._sync_task = None  # to close the connections, it would be awaited first, and raise what ended it
    for part in (parts._fetcher, parts._client):
        try:
            async with asyncio.timeout(_END_SECONDS):
                if part is not None:
                    await part.close()
        except (KafkaError, OSError) as error:
            log.debug("while ending a Kafka client: %r", error)
