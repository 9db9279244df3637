"""Places partitions: after each rebalance, reading goes on at the stored offset (aiokafka forgets its positions)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, Protocol, cast
from uuid import UUID

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError, TopicAuthorizationFailedError

from ..errors import OffsetOutOfRange, OffsetUnknown, PostgresUnavailable
from ..executor import Backoff
from ..outage import Outage
from ..waiting import set_within
from .brokers import unreached
from .leader_epochs import LeaderEpochs, ask_epoch_ends
from .metrics import ConsumerMetrics
from .offsets import Move, OffsetsMoved
from .partition import Partition, State
from .stateless_offsets import committed_of, committed_stateless
from .subscription import Subscription
from .topic_ids import ask_topics, is_another
from .topics import Topics

__all__ = ["Offsets", "Placer", "StoredOffsets"]

Offsets = Mapping[TopicPartition, int]

log = logging.getLogger("sidings.consumer")

_EARLY_SECONDS = 0.5  # how often to look again at one that may not be placed yet
_EARLY = "not every instance knows yet how many partitions their topic has (sidings.topic)"
_AGAIN_SECONDS = 1.0
_TOGETHER_SECONDS = 5.0  # for an answer about all partitions, before each is asked for by itself
# Instead of where a log was cut off: a leader that has got so far does not know the epoch, and is to be asked again.
_ONCE = -2
_EARLIEST = "at the earliest message"
_UNKNOWN = "at the earliest message, as the group has no offset"
_REFUSED_SECONDS = 10.0  # how often to look again at one whose offset is not of its log, or that may not be seen


class StoredOffsets(Protocol):
    """Where the offsets are stored: ``consumer_offset``, or the consumer group's in Kafka."""

    how_to_set: str  # what an operator has to do, for messages about offsets that do not fit
    how_to_delete: str
    how_to_move: str  # with the places {topic}, {partition} and {offset}

    async def load(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The stored offsets; a partition that has none is absent."""
        ...

    async def create(self, starts: Mapping[TopicPartition, int]) -> None:
        """Store where to start."""
        ...

    async def jump(self, move: Move) -> None:
        """Move one offset on its own."""
        ...

    def lost(self, partition: TopicPartition) -> bool:
        """Whether a failover has lost the stored offset, as the last `load` has found."""
        ...

    def resets(self, partition: TopicPartition) -> int:
        """How often a person had reset the offset when it was loaded."""
        ...

    def topic_id(self, partition: TopicPartition) -> UUID | None:
        """The id of the topic that the offset belonged to when it was loaded, None where it is not known."""
        ...

    def epoch(self, partition: TopicPartition) -> int | None:
        """The leader's epoch of the record before the offset that was loaded, None where it is not known."""
        ...


class _NoAnswer(Exception):
    """Kafka does not say where the logs of these partitions begin and end."""


class Placer:
    """Gives each new partition its place in the log, in the background, until it has one.

    spawn: starts a task that ends with the consumer. adopt: stores which topics the offsets belong to, where that is
    not known; None where a topic's offsets go when it is deleted.
    """

    def __init__(
        self,
        client: AIOKafkaConsumer,
        partitions: Mapping[TopicPartition, Partition],
        subscriptions: Mapping[str, Subscription[object]],
        offsets: StoredOffsets,
        epochs: LeaderEpochs,
        metrics: ConsumerMetrics,
        *,
        request_seconds: float,
        on_placed: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        topics: Topics | None = None,
        adopt: Callable[[Mapping[TopicPartition, UUID]], Awaitable[None]] | None = None,
    ) -> None:
        self._client = client
        self._partitions = partitions
        self._subscriptions = subscriptions
        self._offsets = offsets
        self._epochs = epochs
        self._metrics = metrics
        self._request_seconds = request_seconds
        self._on_placed = on_placed
        self._spawn = spawn
        self._topics = topics
        self._adopt = adopt
        self._wanted = asyncio.Event()
        self._alone: set[Partition] = set()

    def wake(self) -> None:
        """Some partition has to be placed."""
        self._wanted.set()

    async def run(self) -> None:
        """Place partitions for ever. Raises `OffsetUnknown` where the subscription's start asks for that."""
        backoff, outage = Backoff(), Outage(log, "partitions could not be placed yet")
        while True:
            await self._wait()
            waiting = {tp: partition for tp, partition in self._waiting().items() if not self._tell_early(partition)}
            try:
                await self._place_all(waiting, min(self._request_seconds, _TOGETHER_SECONDS))
                backoff.reset()
                outage.over()
            except _NoAnswer as error:
                log.warning(
                    "Kafka gives no answer about %s partitions together, asking for each: %s", len(waiting), error
                )
                for partition in waiting.values():
                    self._alone.add(partition)
                    self._spawn(self._place_alone(partition))
            except (PostgresUnavailable, asyncpg.PostgresError, OffsetsMoved, KafkaError, TimeoutError) as error:
                outage.failed(repr(error))
                self._wanted.set()
                await backoff.sleep()

    async def _place_alone(self, partition: Partition) -> None:
        """A partition that nobody leads has no answer until somebody does; it must not keep the others waiting."""
        tp = partition.tp
        seconds = min(self._request_seconds, _TOGETHER_SECONDS)  # until it is told of
        try:
            while self._partitions.get(tp) is partition:
                try:
                    await self._place_all({tp: partition}, seconds)
                    return
                except _NoAnswer as error:
                    if not partition.reason:
                        log.warning("%s: Kafka does not say where its log begins and ends: %s", partition.origin, error)
                    partition.reason = f"Kafka does not say where their logs begin and end: {error}"
                    seconds = self._request_seconds
                    unseen = isinstance(error.__cause__, TopicAuthorizationFailedError)
                    await asyncio.sleep(_REFUSED_SECONDS if unseen else _AGAIN_SECONDS)
        except (PostgresUnavailable, asyncpg.PostgresError, OffsetsMoved, KafkaError, TimeoutError) as error:
            log.warning("%s could not be placed yet, trying again: %r", partition.origin, error)
        finally:
            self._alone.discard(partition)
            self._wanted.set()

    async def _wait(self) -> None:
        waiting = self._waiting()
        seconds = _REFUSED_SECONDS if any(p.state is State.REFUSED for p in waiting.values()) else None
        if any(partition.reason == _EARLY or self._early(tp) for tp, partition in waiting.items()):
            seconds = _EARLY_SECONDS
        await set_within(self._wanted, seconds)
        self._wanted.clear()

    def _tell_early(self, partition: Partition, told: int = 0) -> bool:
        """`_early`, and a health check gets to know it."""
        early = self._early(partition.tp, told)
        if partition.state is State.UNPLACED and early != (partition.reason == _EARLY):
            partition.reason = _EARLY if early else ""
        return early

    def _early(self, tp: TopicPartition, told: int = 0) -> bool:
        """A partition of a topic that is not known yet, or is not known to have been made anew with fewer, or one that
        was added a moment ago: keys of it may have jobs elsewhere, and not everybody knows that. told: how many the
        topic has, where Kafka has just said so; else what the client's metadata say counts."""
        if self._topics is None:
            return False
        count = told or len(self._client.partitions_for_topic(tp.topic) or ())
        return not self._topics.covers(tp) or (count > 0 and self._topics.has_shrunk(tp.topic, count))

    def _waiting(self) -> dict[TopicPartition, Partition]:
        """Only what this client has: of one that has come after another the partitions are known from before."""
        assigned = self._client.assignment()
        return {
            tp: partition
            for tp, partition in self._partitions.items()
            if tp in assigned and partition.state in (State.UNPLACED, State.REFUSED) and partition not in self._alone
        }

    async def _place_all(self, waiting: Mapping[TopicPartition, Partition], seconds: float) -> None:
        """Raises `_NoAnswer` where Kafka has not said in time where all these logs begin and end."""
        if not waiting:
            return
        try:
            async with asyncio.timeout(seconds):
                first = cast(Offsets, await self._client.beginning_offsets(list(waiting)))
                end = cast(Offsets, await self._client.end_offsets(list(waiting)))
                told = {} if self._adopt is None else await ask_topics(self._client, waiting)
        except (KafkaError, TimeoutError) as error:
            inner: Any = self._client
            raise _NoAnswer(f"{error!r}{unreached(inner._client)}") from error
        ids = {tp: told[tp.topic][0] for tp in waiting if tp.topic in told}
        counts = {tp: told[tp.topic][1] for tp in ids}
        waiting = {tp: each for tp, each in waiting.items() if not self._tell_early(each, counts.get(tp, 0))}
        stored = await self._offsets.load(waiting.keys())
        failed: Exception | None = None  # of one topic, perhaps: it stops no other
        if missing := waiting.keys() - stored.keys():
            starts, where = await self._starts(missing, first, end, ids)
            try:
                await self._offsets.create(starts)
            except (KafkaError, TimeoutError) as error:
                failed = error
            stored = await self._offsets.load(waiting.keys())
            self._tell_starts({tp: its for tp, its in where.items() if stored.get(tp) == starts[tp]})
        made_anew = await self._compare(ids, stored)
        known = {tp: ids[tp] for tp in stored if tp in ids and tp not in made_anew}
        if known and (refusal := await self._pass_stateless(known, stored)) is not None:
            failed = refusal
        for tp in waiting.keys() & stored.keys():  # a row may have been deleted this very moment
            if tp in made_anew:
                self._refuse_another(waiting[tp], stored[tp])
            else:
                try:
                    await self._place(waiting[tp], stored[tp], first[tp], end[tp])
                except (KafkaError, TimeoutError) as error:
                    failed = error
        if waiting.keys() - stored.keys():
            self._wanted.set()
        self._on_placed()
        if failed is not None:
            raise failed

    async def _compare(
        self, ids: Mapping[TopicPartition, UUID], stored: Collection[TopicPartition]
    ) -> set[TopicPartition]:
        """The partitions whose stored offset belongs to another topic of the same name."""
        if self._adopt is None:
            return set()
        known = {tp: self._offsets.topic_id(tp) for tp in stored}
        if new := {tp: ids[tp] for tp, id in known.items() if id is None and tp in ids}:
            await self._adopt(new)
        return {tp for tp, id in known.items() if is_another(id, ids.get(tp))}

    async def _pass_stateless(
        self, ids: Mapping[TopicPartition, UUID], stored: dict[TopicPartition, int]
    ) -> Exception | None:
        """Move the stored offsets on where a stateless consumer of the group has handled what follows. Not where a
        person has set one meanwhile, beside which no epoch stands, nor where that one began further on, as at the end
        of the log, or where Postgres was set back since: nobody has handled what lies between. Then Kafka is told of
        them before anything is handled, or what the stateless one has committed would count again after a reset that
        is yet to come. Returns why it does not take those of a topic, which are not in `stored` then."""
        async with asyncio.timeout(self._request_seconds):
            found = await committed_stateless(self._client, ids)
            for tp, (offset, epoch, began) in found.items():
                if began <= stored[tp] < offset and self._offsets.epoch(tp) is not None:
                    self._epochs.begin(tp, offset, epoch)  # it is stored with the offset
                    await self._offsets.jump(Move(tp, stored[tp], offset))
                    log.warning(
                        "%s/%s: offsets %s to %s were handled by a stateless consumer of this group: going on at %s",
                        *(tp.topic, tp.partition, stored[tp], offset - 1, offset),
                    )
        if found:
            stored |= await self._offsets.load(found)
        refusal: Exception | None = None
        for topic in {tp.topic for tp in found}:
            theirs = {tp: stored[tp] for tp in found if tp.topic == topic}
            try:
                async with asyncio.timeout(min(self._request_seconds, _TOGETHER_SECONDS)):
                    await self._client.commit(theirs)
            except (KafkaError, TimeoutError) as error:
                refusal = error
                for tp in theirs:
                    del stored[tp]
        return refusal

    async def _starts(
        self,
        missing: Collection[TopicPartition],
        first: Offsets,
        end: Offsets,
        ids: Mapping[TopicPartition, UUID],
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, str]]:
        """Where partitions without a stored offset start, as their subscription says, and the words for it. Where a
        failover has lost it, and so all effects since it was made: where we began, or at the earliest message if that
        was the start."""
        starts: dict[TopicPartition, int] = {}
        where: dict[TopicPartition, str] = {}
        at_end = {tp.topic for tp in missing if self._subscriptions[tp.topic].start == "latest"}
        in_group = [tp for tp in missing if self._subscriptions[tp.topic].start == "committed"]
        asked = at_end.union(tp.topic for tp in in_group)
        begun = set[str]() if self._topics is None else await self._topics.begun(asked)
        committed: Mapping[TopicPartition, int | None] = {}
        if in_group:
            async with asyncio.timeout(self._request_seconds):
                committed = await committed_of(self._client, in_group, ids)
        for tp in missing:
            partition = self._partitions.get(tp)
            if partition is not None and partition.began is not None and self._offsets.lost(tp):
                starts[tp] = partition.began
                if self._subscriptions[tp.topic].start == "earliest":  # so did who had it before us
                    starts[tp] = min(partition.began, first[tp])
                log.warning("%s: a failover has lost its stored offset: from %s on again", partition.origin, starts[tp])
                continue
            added = tp.topic in begun and self._topics is not None and self._topics.was_added(tp)
            match self._subscriptions[tp.topic].start:
                case "earliest":
                    starts[tp], where[tp] = first[tp], _EARLIEST
                case "latest":  # of a partition that was added since, all is new
                    starts[tp], where[tp] = (first[tp], _EARLIEST) if added else (end[tp], "at the end of the log")
                case "committed" if (offset := committed.get(tp)) is not None:
                    starts[tp], where[tp] = offset, "at the group's offset"
                case "committed":
                    starts[tp] = first[tp]
                    where[tp] = _EARLIEST if added or tp in committed else _UNKNOWN
                case "fail":
                    raise OffsetUnknown(
                        f"no offset is stored for {tp.topic}/{tp.partition}, and its consumer says start='fail': give "
                        f"another start, or {self._offsets.how_to_set}"
                    )
        # At once also of those that others place: to them, what was added before this consumer came would be new.
        new = [topic for topic in at_end - begun if self._topics is not None and self._topics.has_grown(topic)]
        there = [TopicPartition(topic, n) for topic in new for n in self._client.partitions_for_topic(topic) or ()]
        if others := [tp for tp in there if tp not in starts]:
            async with asyncio.timeout(self._request_seconds):
                starts |= cast(Offsets, await self._client.end_offsets(others))
        return starts, where

    def _tell_starts(self, where: Mapping[TopicPartition, str]) -> None:
        """How much is handled again where a service takes over from another consumer depends on nothing else."""
        for topic, words in sorted({(tp.topic, words) for tp, words in where.items()}):
            theirs = ", ".join(str(tp.partition) for tp in sorted(where) if (tp.topic, where[tp]) == (topic, words))
            if words == _UNKNOWN:
                inner: Any = self._client  # aiokafka 0.14 tells the group's name in no public way
                log.warning(
                    "%s: the consumer group %r has no offset for partitions %s: start='committed' begins %s, and all "
                    "that they still have is handled. If an earlier consumer has handled it, its group is another one "
                    "(KafkaSettings.group), or its offsets have expired; to go on from where it was, %s",
                    *(topic, inner._group_id, theirs, _EARLIEST),
                    self._offsets.how_to_move.format(topic=topic, partition="PARTITION", offset="OFFSET"),
                )
            else:
                start = self._subscriptions[topic].start
                log.info(
                    "%s: no offset was stored for partitions %s: they begin %s (start=%r)", topic, theirs, words, start
                )

    async def _place(self, partition: Partition, stored: int, first: int, end: int) -> None:
        tp = partition.tp
        place = stored, self._offsets.resets(tp)
        if partition.outside == stored >= first:
            partition.beyond = place
        partition.outside = None
        # Kafka's word counts, not `end`: there the first open transaction begins, and whoever has committed the offset
        # without regard to transactions, as most clients do, may have read further.
        held = place != partition.beyond or await self._holds(partition, stored, end)
        if self._partitions.get(tp) is not partition:
            return  # assigned anew meanwhile
        if not held:
            self._refuse_beyond(partition, stored, end)
            return
        if stored < first:
            self._epochs.begin(tp, first, None)
            await self._jump(partition, stored, first)
            stored = first
        else:
            self._epochs.begin(tp, stored, self._offsets.epoch(tp))
        try:
            self._client.seek(tp, stored)
            self._client.resume(tp)
        except IllegalStateError:
            return  # revoked meanwhile
        former, id = partition.topic_id, self._offsets.topic_id(tp)
        partition.topic_id = id or former
        partition.place(stored, anew=is_another(former, id))

    async def _jump(self, partition: Partition, stored: int, first: int) -> None:
        """Never silently: these messages were deleted before they were handled. Going on is all that is left."""
        await self._offsets.jump(Move(partition.tp, stored, first))
        self._metrics.missed(partition.tp.topic, first - stored)
        log.error(
            "%s: offsets %s to %s were deleted (retention) before this service has read them; going on at %s",
            *(partition.origin, stored, first - 1, first),
        )

    async def _holds(self, partition: Partition, stored: int, end: int) -> bool:
        """Whether the log holds all that was read, although a leader has refused the offset: that one was behind, and
        knew no such epoch. Once one that was not has told of a cut, no later answer counts: the log grows, and where
        Kafka was set back, the same epochs come again."""
        tp, epoch, former = partition.tp, self._offsets.epoch(partition.tp), self._epochs.cut(partition.tp)
        if epoch is None or former not in (None, _ONCE):
            return False
        try:
            async with asyncio.timeout(min(self._request_seconds, _TOGETHER_SECONDS)):
                cut = (await ask_epoch_ends(self._client, {tp: epoch})).get(tp)
        except (KafkaError, TimeoutError):
            return False
        if cut is None:
            return False
        if cut >= stored:
            log.warning(
                "%s: a broker that was behind has refused the offset %s; going on there", partition.origin, stored
            )
            return True
        if cut >= 0:
            self._epochs.found_cut(tp, cut)
        elif end >= stored:  # who is behind has not got so far; but `end` may be another leader's
            self._epochs.found_cut(tp, _ONCE if former is None else cut)
        return False

    def _refuse_beyond(self, partition: Partition, stored: int, end: int) -> None:
        tp = partition.tp
        cut = self._epochs.cut(tp)
        if cut is not None and 0 <= cut < stored:  # what it has got since begins there, be it longer than before or not
            self._refuse(
                partition,
                f"the log was cut off at {cut}, before the stored offset {stored}, as after an unclean leader election",
                f"What it has got since, from {cut} to {end}, was not handled: to do so, "
                + self._offsets.how_to_move.format(topic=tp.topic, partition=tp.partition, offset=cut),
            )
            return
        where = "lies beyond the end of the log" if stored > end else "lay beyond the end of the log, which has grown"
        why = f"the stored offset {stored} {where} ({end})"
        if self._offsets.epoch(tp) is None:
            self._refuse_former(partition, f"{why}, as after the topic was deleted and made anew")
        elif cut in (None, _ONCE):
            inner: Any = self._client
            inner._client.force_metadata_update()  # another broker may lead by now
            self._refuse(
                partition,
                f"{why}, and its leader does not say whether it was cut off: it is behind, as one that the other "
                "brokers do not reach, or Kafka was set back",
                "It goes on by itself when a leader has what was read (else: docs/operations.md, Kafka is set back)",
            )
        else:
            self._refuse_former(partition, f"{why}, as after Kafka was set back to a snapshot")

    def _refuse_another(self, partition: Partition, stored: int) -> None:
        self._refuse_former(
            partition,
            f"the stored offset {stored} belongs to another topic of this name: it was deleted and made anew, or the "
            "cluster is another one (where all offsets there are the same: docs/operations.md, Another Kafka)",
        )

    def _refuse_former(self, partition: Partition, why: str) -> None:
        """The offset is one of another log."""
        delete = f"Where that is meant, {self._offsets.how_to_delete}"
        self._refuse(partition, why, f"{delete}; it then starts as its consumer's start= says")

    def _refuse(self, partition: Partition, why: str, remedy: str) -> None:
        """Until a person has moved the offset: what a new log, or one that was cut off, has got up to it has not been
        handled, so that going on there when it has grown would lose it without a word."""
        error = OffsetOutOfRange(f"{partition.origin}: {why}: nothing of it is consumed. {remedy}")
        if partition.state is not State.REFUSED:
            log.error("%s", error)
        partition.enter(State.REFUSED, str(error))
