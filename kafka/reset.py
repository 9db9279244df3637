"""Moving a consumer's stored offsets by order of a person, whether instances run or not; and how those notice."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Literal, NamedTuple, cast
from uuid import UUID

import asyncpg
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndTimestamp

from ..errors import ConfigurationError, KafkaUnavailable, OffsetOutOfRange, PostgresUnavailable
from ..executor import BROKEN, Link, PostgresSettings, connect
from ..schema import load_sql
from . import membership
from .brokers import go_around_hanging_brokers
from .leader_epochs import ask_epoch_ends
from .message import check_topic
from .offsets import OffsetStore
from .partition import Partition, State
from .settings import KafkaSettings
from .stateless_offsets import committed_stateless
from .topic_ids import ask_topic_ids

__all__ = ["Reset", "ResetTo", "ResetWatch", "existing_partitions", "handled_statelessly", "reset_offsets"]

log = logging.getLogger("sidings.consumer")

ResetTo = Literal["earliest", "latest"] | datetime | int

_LOOK_SECONDS = 1.0
_STATEMENT_SECONDS = 300.0  # it may have to cancel a million jobs
_ATTEMPTS = 5
_PROBE_MS = 1_000  # longer than Kafka waits for records that there are none of


class Reset(NamedTuple):
    """A partition that was reset.

    Attributes:
        before: Its stored offset until now; None where it had none.
        offset: Where it goes on.
        cancelled: Jobs of messages that will be delivered again: parked, held or isolated ones.
    """

    partition: int
    before: int | None
    offset: int
    cancelled: int


async def reset_offsets(
    kafka: KafkaSettings,
    postgres: PostgresSettings,
    group: str,
    topic: str,
    to: ResetTo,
    *,
    partitions: Collection[int] | None,
    actor: str,
    reason: str | None,
) -> list[Reset]:
    """See ``Service.reset_offsets``."""
    _check(topic, to, partitions)
    stored = await _load_epochs(postgres, topic)
    targets, cuts, topic_id = await _targets(kafka, group, topic, to, partitions, stored)
    ordered = sorted(targets)
    sql = load_sql(__package__, "reset_offsets", postgres.schema_name)
    offsets = [targets[partition] for partition in ordered]
    cut = [cuts.get(partition) for partition in ordered]
    rows = await _store(postgres, sql, topic, ordered, offsets, actor, reason, topic_id, cut)
    done = [Reset(row[0], row[1], targets[row[0]], row[2]) for row in rows]
    for one in sorted(done):
        log.warning(
            "%s/%s was reset from offset %s to %s by %s; jobs cancelled, whose messages are delivered again: %s",
            *(topic, one.partition, one.before, one.offset, actor, one.cancelled),
        )
    return sorted(done)


def _check(topic: str, to: ResetTo, partitions: Collection[int] | None) -> None:
    check_topic(topic, "reset_offsets")
    if partitions is not None and not (
        isinstance(partitions, Collection) and all(type(partition) is int for partition in partitions)  # pyright: ignore[reportUnnecessaryIsInstance]
    ):
        raise ConfigurationError(f"{topic}: partitions={partitions!r}: give a list of numbers, or None for all")
    if isinstance(to, datetime):
        if to.tzinfo is None:
            raise ConfigurationError(
                f"{topic}: to={to!r} has no time zone: give an aware datetime, e.g. datetime.now(UTC) - ..."
            )
    elif isinstance(to, bool) or not (isinstance(to, int) or to in ("earliest", "latest")):
        raise ConfigurationError(f"{topic}: to={to!r}: give an offset, an aware datetime, 'earliest' or 'latest'")
    elif isinstance(to, int) and (partitions is None or len(partitions) != 1):
        raise ConfigurationError(f"{topic}: to={to} is an offset of one partition: give partitions=[n]")
    if partitions is not None and not partitions:
        raise ConfigurationError(f"{topic}: partitions=[]: give at least one, or None for all")


async def _targets(
    kafka: KafkaSettings,
    group: str,
    topic: str,
    to: ResetTo,
    partitions: Collection[int] | None,
    stored: Collection[asyncpg.Record],
) -> tuple[dict[int, int], dict[int, int], UUID | None]:
    """The offset of each partition that `to` means; where logs were cut off before the stored offsets; and the topic's
    id where Kafka tells it."""
    client = _client(kafka, group)
    try:
        async with asyncio.timeout(kafka.request_seconds):
            there = await existing_partitions(kafka, topic)
            wanted = there if partitions is None else set(partitions)
            if not wanted or wanted - there:
                known = f"has the partitions {sorted(there)}" if there else "does not exist"
                raise ConfigurationError(f"partitions={sorted(wanted)} cannot be reset: the topic {topic!r} {known}")
            tps = [TopicPartition(topic, partition) for partition in wanted]
            await client.start()
            first = cast(Mapping[TopicPartition, int], await client.beginning_offsets(tps))
            end = cast(Mapping[TopicPartition, int], await client.end_offsets(tps))
            topic_id = (await ask_topic_ids(client, tps)).get(topic)
            known = {TopicPartition(topic, row["partition"]): row for row in stored if row["topic_id"] == topic_id}
            ends = await ask_epoch_ends(client, {tp: known[tp]["leader_epoch"] for tp in tps if tp in known})
            match to:
                case "earliest":
                    found = first
                case "latest":
                    found = end
                case datetime():
                    found = await _at_time(client, to, end)
                case _:
                    found = dict.fromkeys(tps, to)
                    await _must_be_readable(client, tps[0], to, end[tps[0]])
    except (KafkaError, OSError) as error:  # TimeoutError is an OSError
        raise KafkaUnavailable(f"the offsets of {topic!r} could not be asked for: {error!r}") from error
    finally:
        await membership.close(client)
    for tp in tps:
        if not first[tp] <= found[tp] <= end[tp]:
            raise OffsetOutOfRange(
                f"{tp.topic}/{tp.partition}: there is no offset {found[tp]}: its log goes from {first[tp]} to {end[tp]}"
            )
    cuts = {tp.partition: cut for tp, cut in ends.items() if cut < known[tp]["next_offset"]}
    return {tp.partition: found[tp] for tp in tps}, cuts, topic_id


async def existing_partitions(kafka: KafkaSettings, topic: str) -> set[int]:
    """The partitions that Kafka has of `topic`; none where it does not exist. Raises `KafkaUnavailable`."""
    admin = AIOKafkaAdminClient(**kafka.client_options())
    go_around_hanging_brokers(admin._client)  # pyright: ignore[reportPrivateUsage]
    try:
        async with asyncio.timeout(kafka.request_seconds):
            try:
                await admin.start()
                found = (await membership.describe(admin, [topic])).to_object()
            finally:
                await admin.close()
    except (KafkaError, OSError) as error:  # TimeoutError is an OSError
        raise KafkaUnavailable(f"the partitions of {topic!r} could not be asked for: {error!r}") from error
    return {partition["partition"] for one in found["topics"] for partition in one["partitions"]}


async def handled_statelessly(kafka: KafkaSettings, group: str, topic: str, partitions: Collection[int]) -> set[int]:
    """Those of `partitions` whose offsets in Kafka a stateless consumer of the group was the last to commit. Raises
    `KafkaUnavailable`."""
    if not (there := await existing_partitions(kafka, topic) & set(partitions)):
        return set()
    tps = [TopicPartition(topic, partition) for partition in there]
    client = _client(kafka, group)
    try:
        async with asyncio.timeout(kafka.request_seconds):
            await client.start()
            await client.beginning_offsets(tps)  # it knows the leaders then, who know the topic's id
            ids = await ask_topic_ids(client, tps)
            return {tp.partition for tp in await committed_stateless(client, {tp: ids[topic] for tp in tps if ids})}
    except (KafkaError, OSError) as error:  # TimeoutError is an OSError
        raise KafkaUnavailable(f"the group's offsets of {topic!r} could not be asked for: {error!r}") from error
    finally:
        await membership.close(client)


def _client(kafka: KafkaSettings, group: str) -> AIOKafkaConsumer:
    """It subscribes to nothing, so it joins no group. Without group_id, aiokafka 0.14 cannot be stopped in good
    order."""
    client = AIOKafkaConsumer(
        **kafka.client_options(), group_id=group, isolation_level=kafka.isolation_level, enable_auto_commit=False
    )
    go_around_hanging_brokers(client._client)  # pyright: ignore[reportPrivateUsage]
    return client


async def _at_time(
    client: AIOKafkaConsumer, time: datetime, end: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """The first message that is not older than `time`; the end where all are."""
    stamp = max(0, round(time.timestamp() * 1000))  # aiokafka refuses what is before 1970
    found = cast(
        Mapping[TopicPartition, OffsetAndTimestamp | None], await client.offsets_for_times(dict.fromkeys(end, stamp))
    )
    return {tp: end[tp] if at is None else at.offset for tp, at in found.items()}


async def _must_be_readable(client: AIOKafkaConsumer, tp: TopicPartition, offset: int, end: int) -> None:
    """A record that cannot be read takes all that follow it in its batch with it, and nobody sees where that ends: who
    wants to pass it over is told. Raises `OffsetOutOfRange`."""
    client.assign([tp])

    async def refused(at: int) -> Exception | None:
        client.seek(tp, at)
        try:
            await client.getmany(tp, timeout_ms=_PROBE_MS, max_records=1)
        except membership.UNREADABLE as error:
            return error

    if not 0 <= offset < end or (error := await refused(offset)) is None:
        return
    bad, good = offset, min(offset + 1, end)
    while good < end and await refused(good) is not None:
        bad, good = good, min(good + 2 * (good - offset), end)
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (bad, middle) if await refused(middle) is None else (middle, good)
    raise OffsetOutOfRange(
        f"{tp.topic}/{tp.partition}: the record at {offset} cannot be read: one of its batch cannot ({error!r}); the "
        f"next that can is {good}"
    )


async def _load_epochs(postgres: PostgresSettings, topic: str) -> list[asyncpg.Record]:
    link = Link(postgres)
    try:
        return await link.fetch(load_sql(__package__, "load_epochs", postgres.schema_name), topic)
    finally:
        link.drop()


async def _store(postgres: PostgresSettings, sql: str, *arguments: object) -> list[asyncpg.Record]:
    for attempt in range(_ATTEMPTS):
        connection = await connect(postgres, statement_seconds=_STATEMENT_SECONDS)
        try:
            # PgBouncer passes on no level at the start of a session. What fails is undone with the connection.
            transaction = connection.transaction(isolation="read_committed")
            await transaction.start()
            rows = await connection.fetch(sql, *arguments)
            await transaction.commit()
            return rows
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:  # nothing has changed
            if attempt + 1 == _ATTEMPTS:
                raise PostgresUnavailable(f"a lock that is needed was not free, try again: {error}") from error
        except asyncpg.ReadOnlySQLTransactionError as error:
            raise PostgresUnavailable(f"Postgres takes no writes, as a standby; nothing was reset ({error})") from error
        except BROKEN as error:
            raise PostgresUnavailable(f"it is not known whether the reset has committed: {error!r}") from error
        finally:
            connection.terminate()
    raise AssertionError


class ResetWatch:
    """Notices resets of the partitions that are assigned here, by a person or a failover that has lost commits, and
    lets reading go on at the stored offset. An offset that is reset under a batch undoes the batch in any case; this is
    for the partitions in which nothing happens.

    displace: called with those that have been reset.
    """

    def __init__(
        self,
        partitions: Mapping[TopicPartition, Partition],
        offsets: OffsetStore,
        displace: Callable[[Collection[Partition]], None],
    ) -> None:
        self._partitions = partitions
        self._offsets = offsets
        self._displace = displace

    async def run(self) -> None:
        """Look every second, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                reset = await self._offsets.find_reset(self._partitions)
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                log.debug("resets could not be looked for: %s", error)
                continue
            # Of those that have no place yet the stored offset is read in any case, when Kafka answers.
            found = [p for tp in reset if (p := self._partitions.get(tp)) is not None and p.state is not State.UNPLACED]
            if found:
                names = ", ".join(partition.origin for partition in found)
                log.warning("reset by order, or Postgres was replaced: %s: going on at the stored offset", names)
                self._displace(found)
