"""What a consumer shows of itself: why it is not well, and the figures that are states."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

from aiokafka import AIOKafkaConsumer, TopicPartition

from ..outage import Outage
from .backlog import Backlog
from .fetch_loop import FetchLoop
from .membership import Contact
from .metrics import Figures
from .partition import Partition, State

__all__ = ["Vitals"]

log = logging.getLogger("sidings.consumer")

_UNREACHABLE_SECONDS = 15.0  # without Kafka, or without the stored offsets, before the health check complains
_STEADY_SECONDS = 5.0  # an assignment that lasts so long without an error shows that the connection is sound
_ENDS_SECONDS = 5.0  # between questions where logs end of which nothing is read
_UNREAD = (State.ASIDE, State.REFUSED, State.FULL)
_STUCK_SECONDS = 60.0  # without a turn of a loop, an answer of Kafka, the end of a rebalance


class Vitals:
    """Keeps since when something is not as it should be. topics: those that are consumed; joined: these, and those that
    are joined for their jobs; partitions: gives those of `topics` that are assigned now; paused: the topics that a
    person has paused. `problems` and `figures` may be asked by any thread."""

    def __init__(
        self,
        topics: Collection[str],
        joined: Collection[str],
        partitions: Callable[[], list[Partition]],
        paused: Container[str] = (),
    ) -> None:
        self.rebalancing_since: float | None = time.monotonic()
        self._assigned_since: float | None = None  # of this connection
        self._topics = topics
        self._joined = joined
        self._connected_since: float | None = None
        self._partitions = partitions
        self._paused = paused
        self._client: AIOKafkaConsumer | None = None
        self._loops: Sequence[FetchLoop] = ()
        self._backlog: Backlog | None = None
        self._contact: Contact | None = None
        self._ends: Mapping[TopicPartition, int] = {}  # of what is not read
        self._unconnected_since: float | None = time.monotonic()
        self._failing_since: float | None = None  # connections break again and again
        self._trouble = "it has not connected yet"
        self._error: BaseException | None = None  # the last that ended a connection before there was an assignment

    def begin(self) -> None:
        """The consumer begins to run, perhaps long after it was made: before that nothing was to be expected of it."""
        self.rebalancing_since = self._unconnected_since = time.monotonic()

    def connected(
        self, client: AIOKafkaConsumer, loops: Sequence[FetchLoop], backlog: Backlog | None, contact: Contact
    ) -> None:
        """There is a connection, and these work with it."""
        self._client, self._loops, self._backlog, self._contact = client, loops, backlog, contact
        self._unconnected_since = None
        self._connected_since = time.monotonic()

    def disconnected(self, error: BaseException | None = None) -> None:
        """The client is given up, because of `error`. What was assigned to it is not its successor's yet."""
        self._client, self._loops = None, ()
        self.rebalance_begins()
        lost_since = time.monotonic() if self._contact is None else self._contact.lost_since or time.monotonic()
        self._contact = None
        if self._unconnected_since is None:
            self._unconnected_since = lost_since
        if error is not None:
            self._trouble = repr(error)
            self._error = error
            if self._failing_since is None or self._steady:
                self._failing_since = lost_since
            self._assigned_since = None

    def rebalance_begins(self) -> None:
        """Partitions have been revoked."""
        if self.rebalancing_since is None:
            self.rebalancing_since = time.monotonic()

    def rebalance_ends(self) -> None:
        """Partitions have been assigned."""
        self.rebalancing_since = None
        self._error = None
        if self._assigned_since is None:
            self._assigned_since = time.monotonic()

    @property
    def _steady(self) -> bool:
        return _age(self._assigned_since) > _STEADY_SECONDS

    async def watch_ends(self, client: AIOKafkaConsumer) -> NoReturn:
        """Ask where the logs end of which nothing is read: of these nobody tells the client, and the lag would stay. Of
        those that nobody leads the log is told: the client does not."""
        unled, outage = list[str](), Outage(log, "what nobody leads could not be read")
        while True:
            await asyncio.sleep(_ENDS_SECONDS)
            before, contact = unled, self._contact
            unled = [] if contact is None else contact.unled(partition.tp for partition in self._partitions())
            if lasting := [origin for origin in unled if origin in before]:  # and no election
                outage.failed(", ".join(lasting[:5]))
            elif not unled:
                outage.over()
            led: defaultdict[object, list[TopicPartition]] = defaultdict(list)  # by each broker; of one nobody may hear
            for partition in self._partitions():
                if partition.state in _UNREAD or partition.put_off or partition.tp.topic in self._paused:
                    led[cast(Any, client)._client.cluster.leader_for_partition(partition.tp)].append(partition.tp)
            told = await asyncio.gather(*(self._ends_of(client, tps) for tps in led.values()))
            self._ends = {tp: end for ends in told for tp, end in ends.items()}

    async def _ends_of(self, client: AIOKafkaConsumer, tps: list[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Where they end; as they did before, where nobody says so in time."""
        try:
            async with asyncio.timeout(_ENDS_SECONDS):
                return cast(Mapping[TopicPartition, int], await client.end_offsets(tps))
        except Exception:  # noqa: BLE001 - whatever it is: it shows elsewhere, and nothing depends on this
            return {tp: self._ends[tp] for tp in tps if tp in self._ends}

    def missing_topics(self) -> list[str]:
        """Which topics Kafka does not tell us of, and what to do about it. Any thread may ask."""
        if (client := self._client) is None:
            return []
        refused = cast(Any, client)._client.cluster.unauthorized_topics
        missing = [t for t in self._joined if client.partitions_for_topic(t) is None and t not in refused]
        unseen = [t for t in self._joined if t in refused]
        found = [f"there is no topic {', '.join(missing)}: create it"] if missing else []
        if unseen:
            found.append(f"there is no right to see the topic {', '.join(unseen)}: grant READ or DESCRIBE on it")
        return found

    def problems(self) -> list[str]:
        """What a health check should complain about; empty when all is well."""
        if _age(self._unconnected_since) > _UNREACHABLE_SECONDS:
            return [f"the consumer has no connection to Kafka: {self._trouble}"]
        found: list[str] = []
        lost = 0.0 if (contact := self._contact) is None else _age(contact.lost_since)
        if lost > _UNREACHABLE_SECONDS:
            where = "" if contact is None else contact.unreached
            found.append(f"none of the brokers that the consumer knows has answered for {lost:.0f} s{where}")
        elif contact and self.rebalancing_since is None and (unheard := contact.unheard()) > _UNREACHABLE_SECONDS:
            found.append(
                f"the group's coordinator has not answered for {unheard:.0f} s: others may have the partitions that "
                f"this instance goes on with{contact.throttling or contact.unreached}"
            )
        if not self._steady and _age(self._failing_since) > _UNREACHABLE_SECONDS:
            found.append(f"the connection to Kafka breaks again and again: {self._trouble}")
        if (rebalancing := _age(self.rebalancing_since)) > _STUCK_SECONDS:
            why = "" if self._error is None else f"; the last error: {self._error!r}"
            found.append(f"the group has been rebalancing for {rebalancing:.0f} s{why}")
        if _age(self._connected_since) > _UNREACHABLE_SECONDS:
            found += self.missing_topics()
        stuck = [loop for loop in self._loops if _age(loop.turned_at) > _STUCK_SECONDS]
        found += [f"the consumer of {loop.topic!r} is stuck for {_age(loop.turned_at):.0f} s" for loop in stuck]
        partitions = self._partitions()
        put_off = {p.tp.topic for p in partitions if p.put_off}  # for hours perhaps, without a try
        found += [
            f"the consumer of {loop.topic!r} has got no further for {outage.seconds():.0f} s: {outage.error}"
            for loop in self._loops
            if loop.topic not in self._paused  # else nothing is tried
            for outage in loop.outages
            if outage.seconds() > _UNREACHABLE_SECONDS
            and (
                _age(outage.failed_at) < _STUCK_SECONDS  # else it has no more
                or (outage is loop.put_off and loop.topic in put_off)
            )
        ]
        unplaced = [p for p in partitions if p.state is State.UNPLACED and _age(p.since) > _UNREACHABLE_SECONDS]
        if unplaced:
            why = next((p.reason for p in unplaced if p.reason), "their stored offsets could not be read")
            some = ", ".join(p.origin for p in unplaced[:5])
            found.append(f"{len(unplaced)} partitions ({some}) have no place to read from yet: {why}")
        found += [problem for p in partitions if (problem := p.problem()) is not None]
        if (uncounted := self._uncounted(partitions)) is not None:
            found.append(uncounted)
        read = [p for p in partitions if p.state is State.READY and p.tp.topic not in self._paused]
        silent = [p for p in read if _silence(p) > _STUCK_SECONDS]
        if silent and lost <= _UNREACHABLE_SECONDS:
            why = "" if contact is None else contact.silence(p.tp for p in silent)
            some = ", ".join(p.origin for p in silent[:5])
            found.append(f"Kafka has not answered for {_STUCK_SECONDS:.0f} s about {some}{why}")
        return found

    def _uncounted(self, partitions: list[Partition]) -> str | None:
        """Partitions that are paused for their jobs go on when few are left, which nobody can know meanwhile."""
        outage = None if self._backlog is None else self._backlog.outage
        full = [p.origin for p in partitions if p.state is State.FULL]
        if outage is None or not full or outage.seconds() <= _UNREACHABLE_SECONDS:
            return None
        return f"{', '.join(full[:5])}: paused, and the jobs that wait could not be counted: {outage.error}"

    def figures(self) -> Iterator[Figures]:
        """The gauges."""
        paused: dict[tuple[str, int | None], float] = dict.fromkeys(((topic, None) for topic in self._topics), 0.0)
        stalled, oldest, full, stopped = dict(paused), dict(paused), dict(paused), dict(paused)
        lag: dict[tuple[str, int | None], float] = {}
        for partition in self._partitions():
            topic, number = partition.tp
            if (since := partition.failing_since) is not None:
                paused[topic, None] += 1
                stalled[topic, None] = max(stalled[topic, None], _age(since))
            begun = min(list(partition.calls.values()), default=None)
            oldest[topic, None] = max(oldest[topic, None], _age(begun))
            full[topic, None] += partition.state is State.FULL
            stopped[topic, None] += partition.problem() is not None
            if (end := self._highwater(partition.tp)) is not None and partition.next_offset >= 0:
                lag[topic, number] = max(0, end - partition.next_offset)
        yield "sidings_consumer_paused_partitions", "Partitions held up by a message that fails.", paused
        yield "sidings_consumer_stalled_seconds", "How long the longest of them has been paused.", stalled
        yield "sidings_consumer_oldest_call_seconds", "How long the oldest call of a handler has lasted.", oldest
        yield (
            "sidings_consumer_full_partitions",
            "Partitions of which no more is read, since enough is under way.",
            full,
        )
        yield (
            "sidings_consumer_stopped_partitions",
            "Partitions that stand still until a person helps; /health says why.",
            stopped,
        )
        by_order: dict[tuple[str, int | None], float]
        under_way = {loop.topic for loop in self._loops if loop.in_flight}
        by_order = {(topic, None): float(topic in self._paused and topic not in under_way) for topic in self._topics}
        yield (
            "sidings_consumer_topic_paused",
            "1 while a person has paused the topic, once nothing of it is under way any more.",
            by_order,
        )
        jobs = {} if self._backlog is None else self._backlog.waiting
        waiting: dict[tuple[str, int | None], float] = {
            (tp.topic, tp.partition): float(count) for tp, count in jobs.items()
        }
        yield "sidings_consumer_waiting_jobs", "Waiting jobs of a partition with max_waiting, up to one more.", waiting
        yield "sidings_consumer_lag", "Messages between the stored offset and the end of the log.", lag

    def _highwater(self, tp: TopicPartition) -> int | None:
        try:
            told = None if self._client is None else self._client.highwater(tp)
        except (AssertionError, AttributeError):
            return None  # revoked between two looks
        end = self._ends.get(tp)  # once: it is another mapping in a moment
        return told if end is None else max(told or 0, end)


def _age(since: float | None) -> float:
    return 0.0 if since is None else time.monotonic() - since


def _silence(partition: Partition) -> float:
    """For how long Kafka had said nothing about a partition that is being read, when it was last asked for more and
    nothing was at hand: while something is, the client does not ask Kafka."""
    return partition.idle_at - max(partition.since, partition.answered_at)
