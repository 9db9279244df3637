"""`service.outbox`: publish in the caller's transaction, wait for the acknowledgement, look after what is parked."""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from ...errors import ConfigurationError, EnqueueError, NotInTransaction, PostgresUnavailable
from ...executor import Backoff, Link, PostgresSettings
from ...jobs import Transaction
from ...jobs.connections import AnyConnection, AnySyncConnection, Statement, Storing, store, store_sync
from ...jobs.transaction import noted
from ...schema import load_sql
from ..checks import check_actor, check_loop
from .addition import AddedMessages
from .decisions import Decisions
from .errors import InvalidMessage
from .inquiry import Inquiry
from .message import Headers, Item, Outgoing, Value, outgoing, outgoing_many
from .receipt import Receipt, acknowledged, has_crashed, receipt_of
from .settings import OutboxSettings

if TYPE_CHECKING:
    from asyncpg import Record

__all__ = ["FailingTopic", "Outbox", "ParkedMessage"]

_POLL_SECONDS = 0.05
_MESSAGES = Storing(__package__ or "", "message", "publish")
_ITS_OWN = "that the service runs in"


@dataclass(frozen=True, slots=True)
class ParkedMessage:
    """A message that Kafka refused.

    Attributes:
        headers: JSON text; None without any.
        error: Why Kafka refused it.
    """

    id: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: str | None
    published_at: datetime
    parked_at: datetime
    error: str


@dataclass(frozen=True, slots=True)
class FailingTopic:
    """A topic that a relay cannot send to at present; each relay has its own view.

    Attributes:
        error: What the last try met.
        retry_at: When the relay tries again.
        relay: Which relay; `host` and `pid` are of its process.
    """

    topic: str
    error: str
    retries: int
    retry_at: datetime
    failing_since: datetime
    relay: UUID
    host: str
    pid: int


class Direct(Protocol):
    """What sends the messages of topics whose route is ``direct``: `sidings.kafka.Producer`."""

    async def send_many(self, messages: Sequence[Outgoing]) -> None: ...


class Outbox:
    """Messages that leave after, and only after, the caller's transaction has committed::

        async with service.transaction() as tx:
            receipt = await service.outbox.publish(tx, "etas", key="t-1", value=Eta(transport="t-1", eta=eta))
        await service.outbox.published(receipt, timeout=5)  # only where the caller must know

    It works while Kafka is away, and needs no relay in this process.

    Args:
        direct: Sends the messages of topics whose route is direct.
        wake: Called when a transaction of ours has published and committed.
    """

    def __init__(
        self,
        postgres: PostgresSettings,
        settings: OutboxSettings | None = None,
        *,
        direct: Direct | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings or OutboxSettings()
        self._schema = postgres.schema_name
        self._postgres = postgres
        self._link = Link(postgres)
        self._inquiry = Inquiry(self._fetch)
        self._direct = direct
        self._wake = wake
        self._asked: asyncio.AbstractEventLoop | None = None  # last
        self.loop: asyncio.AbstractEventLoop | None = None  # of a service that runs: the connection is its own

    @noted
    async def publish(
        self,
        tx: Transaction | AnyConnection | None,
        topic: str,
        *,
        key: str | bytes | None = None,
        value: Value = None,
        headers: Headers | None = None,
        partition_key: str | bytes | None = None,
        timestamp: datetime | None = None,
    ) -> Receipt:
        """Store one message in the caller's transaction, which this call neither commits nor rolls back.

        The message reaches its topic at least once if the transaction commits, and never otherwise. Messages of one key
        keep the order of their commits where writers lock the entity's row before they publish. A repeat carries the
        same header ``sidings-id``.

        Args:
            tx: A `Transaction`, or a connection with a transaction open: asyncpg's, psycopg's ``AsyncConnection``,
                SQLAlchemy's ``AsyncConnection`` or ``AsyncSession``. None only where the topic's route is direct.
            value: A pydantic model (stored as JSON, under the names of its fields unless it has
                ``serialize_by_alias``), bytes, or None for a tombstone.
            headers: The current correlation id and trace are added to them (docs/observability.md).
            partition_key: Chooses the partition, in place of the key.
            timestamp: An aware datetime. Default: now.

        Returns:
            What `published` takes, for those who must know that the message has arrived.

        Raises:
            InvalidMessage: The message cannot be stored or sent as it is. Nothing has been written.
            NotInTransaction: The connection is in autocommit, or the transaction has ended. Nothing has been written.
            SchemaError: Sidings' tables are missing or old. The message says what to run; the transaction has to be
                rolled back.
            NotPublished: The topic's route is direct, and there is no such topic, no right to write to it, or Kafka
                refuses the message for a reason that may be its own or not.
            KafkaUnavailable: The topic's route is direct, and Kafka has not acknowledged the message, which may have
                arrived.
        """
        message = outgoing(
            topic,
            key=key,
            value=value,
            headers=headers,
            partition_key=partition_key,
            timestamp=timestamp,
            settings=self.settings,
        )
        if self._is_direct(topic):
            await self._sender().send_many([message])
            return Receipt()
        await self._flush(tx)
        return await self._store(tx, self._one(message))

    @noted
    async def add(
        self,
        tx: Transaction,
        topic: str,
        *,
        key: str | bytes | None = None,
        value: Value = None,
        headers: Headers | None = None,
        partition_key: str | bytes | None = None,
        timestamp: datetime | None = None,
    ) -> None:
        """Store one message with the others that are added to `tx`, before it commits: a statement for all of a topic
        instead of one for each::

            await service.outbox.add(tx, "etas", key="t-1", value=Eta(transport="t-1", eta=eta))

        In a consumer these are the messages that all handlers of a batch publish. There is no receipt. It is checked
        now, and stored when the transaction ends; when 1,000 messages (or 4 MiB) have been added; before the next
        `publish` or `publish_many` in `tx`; at the begin and the end of a `savepoint`; or by `tx.flush()`. The messages
        of a topic keep the order of these calls. What your own SQL publishes (``sidings.publish()``, a trigger) comes
        before what has been added and is not stored yet. Where somebody has taken ``tx.connection``, it is stored by
        this call.

        Args:
            tx: A consumer's, a job's or a service's. Other connections have nobody who would store the message: use
                `publish` or `publish_many`. All else is as in `publish`. Where the topic's route is direct, the message
                is sent at once.

        Raises:
            InvalidMessage: As in `publish`; or `tx` is no `Transaction`. Nothing has been added. Other errors are those
                of `publish`.
        """
        message = outgoing(
            topic,
            key=key,
            value=value,
            headers=headers,
            partition_key=partition_key,
            timestamp=timestamp,
            settings=self.settings,
        )
        if self._is_direct(topic):
            await self._sender().send_many([message])
            return
        if not isinstance(tx, Transaction):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
            given = f"{type(tx).__module__}.{type(tx).__qualname__}"
            raise InvalidMessage(
                f"a message can be added only to a Transaction, which stores it before it commits, and not to {given}: "
                "call publish or publish_many"
            )
        tx.opened()
        if (added := tx.added.get(self)) is None:
            added = tx.added[self] = AddedMessages(self._store_added)
        if added.add(message) or not tx.holds:
            await tx.flush()

    @noted
    async def publish_many(
        self,
        tx: Transaction | AnyConnection | None,
        topic: str,
        messages: Iterable[Item],
        *,
        headers: Headers | None = None,
    ) -> Receipt:
        """Store many messages of one topic with one statement, in order; all or none are stored::

            await service.outbox.publish_many(tx, "etas", [("t-1", eta), ("t-2", planned, {"ce_type": "Planned"})])

        Args:
            messages: Pairs of key and value; or triples, of these and the message's own headers.
            headers: Of all. A message's own take the place of those of the same names. All else is as in `publish`.

        Raises:
            InvalidMessage: As in `publish`; it names the first such message by its index. Other errors are those of
                `publish`.
        """
        made = outgoing_many(topic, messages, headers=headers, settings=self.settings)
        if self._is_direct(topic):
            await self._sender().send_many(made)
            return Receipt()
        await self._flush(tx)
        return await self._store(tx, self._many(topic, made))

    def publish_sync(
        self,
        connection: AnySyncConnection,
        topic: str,
        *,
        key: str | bytes | None = None,
        value: Value = None,
        headers: Headers | None = None,
        partition_key: str | bytes | None = None,
        timestamp: datetime | None = None,
    ) -> Receipt:
        """`publish` for synchronous code.

        Args:
            connection: psycopg's ``Connection``, SQLAlchemy's ``Connection`` or ``Session``, or
                ``django.db.connection``, with a transaction open. All else is as in `publish`.

        Raises:
            InvalidMessage: As in `publish`; or the topic's route is direct.
        """
        message = outgoing(
            topic,
            key=key,
            value=value,
            headers=headers,
            partition_key=partition_key,
            timestamp=timestamp,
            settings=self.settings,
        )
        return self._store_sync(connection, topic, self._one(message))

    def publish_many_sync(
        self,
        connection: AnySyncConnection,
        topic: str,
        messages: Iterable[Item],
        *,
        headers: Headers | None = None,
    ) -> Receipt:
        """`publish_many` for synchronous code, on a connection as in `publish_sync`."""
        made = outgoing_many(topic, messages, headers=headers, settings=self.settings)
        return self._store_sync(connection, topic, self._many(topic, made))

    async def published(self, receipt: Receipt, timeout: float | None = None) -> None:
        """Return when Kafka has acknowledged all messages of `receipt`. Call it after the transaction has committed.

        Asked after a parked message was released or discarded, it returns as if that had been acknowledged.

        Args:
            timeout: Seconds. None: any time.

        Raises:
            TimeoutError: `timeout` is over. The messages may still leave later.
            RolledBack: The transaction did not commit.
            MessageParked: Kafka refused one of the messages.
            NotPublished: It is so long ago that Postgres does not know any more what came of the transaction.
            PostgresUnavailable: Nobody can tell whether the messages were kept: Postgres was replaced meanwhile (a
                failover), or has crashed before the transaction was seen to have committed. A reset of all its
                statistics, as by `pg_stat_reset_shared()` from version 17 on, cannot be told from that.
            ConfigurationError: This is another event loop than the service's, or `receipt` is none.
        """
        check_loop(self.loop, _ITS_OWN)
        if not isinstance(receipt, Receipt):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
            raise ConfigurationError(f"published({receipt!r}): give the Receipt that `await publish(...)` has returned")
        left = dict(zip(receipt.ids, receipt.slots, strict=True))
        kept = False
        backoff = Backoff()
        if left and self._wake is not None:
            self._wake()
        async with asyncio.timeout(timeout):
            while left:
                self._here()
                rows = await self._inquiry.rows(receipt, left)
                if rows is None:
                    await backoff.sleep()
                    continue
                for row in rows:
                    if row["timeline"] not in (None, receipt.timeline):  # null: a standby answers
                        raise PostgresUnavailable(
                            "Postgres was replaced after the message was published: whether it was kept is not known"
                        )
                    if not kept and has_crashed(receipt.crash, row["crash"]):
                        raise PostgresUnavailable(
                            "Postgres has crashed after the message was published, or all its statistics were reset: "
                            "whether it was kept is not known"
                        )
                    kept = kept or row["status"] == "committed"
                    if acknowledged(row):
                        del left[row["id"]]
                if left:
                    await asyncio.sleep(_POLL_SECONDS * random.uniform(0.5, 1.0))

    # -- what a person looks at and decides ------------------------------------------------------------------------

    async def failing(self) -> list[FailingTopic]:
        """The topics that cannot be sent to at present, with error, retries and the time of the next try.

        Raises:
            PostgresUnavailable: Postgres does not answer.
        """
        rows = await self._fetch("failing_topics")
        return [FailingTopic(**dict(row)) for row in rows]

    async def retry(self, topic: str, *, actor: str, reason: str | None = None) -> bool:
        """Try a failing topic again now.

        Args:
            actor: Who does it, for the audit.
            reason: Why, for the audit.

        Returns:
            False: the topic was not failing, and nothing is written into the audit.

        Raises:
            PostgresUnavailable: Postgres does not answer.
            ConfigurationError: `actor` is empty.
        """
        check_actor(actor, "outbox.retry")
        return bool(await self._fetch("retry_topic", topic, actor, reason))

    async def parked(self, topic: str | None = None, *, after: int = 0, limit: int = 100) -> list[ParkedMessage]:
        """Messages that Kafka refused, the oldest first.

        Args:
            topic: None: of all topics.
            after: The id of the last message of the page before.
            limit: Most messages of one page.

        Raises:
            PostgresUnavailable: Postgres does not answer.
        """
        return [ParkedMessage(**dict(row)) for row in await self._fetch("parked_messages", topic, after, limit)]

    async def release(
        self, topic: str | None = None, *, ids: Sequence[int] | None = None, actor: str, reason: str | None = None
    ) -> list[int]:
        """Send parked messages again, as new ones: behind all that waits, in the order that they had.

        5,000 are one transaction, fewer where they are so large that it takes too long: what was released stays so,
        whatever comes after.

        Args:
            topic: Its messages; with `ids`, those of them. Give one of the two, or both.
            actor: Who does it, for the audit.
            reason: Why, for the audit.

        Returns:
            The old ids of the messages.

        Raises:
            Busy: Another transaction has one of the messages locked. Try again, or give the ids of others.
            InvalidMessage: Neither `topic` nor `ids` is given.
            PostgresUnavailable: Postgres does not answer, or has no room. As with `Busy`, the message says how many
                were done before; and also of how many more nobody knows.
            ConfigurationError: `actor` is empty.
        """
        return await self._decide("release", topic, ids, actor, reason)

    async def discard(
        self, topic: str | None = None, *, ids: Sequence[int] | None = None, actor: str, reason: str | None = None
    ) -> list[int]:
        """Delete parked messages for good. Arguments and errors are those of `release`.

        Returns:
            The ids of the messages.
        """
        return await self._decide("discard", topic, ids, actor, reason)

    async def close(self) -> None:
        """Close the connection that `published` and the calls for persons use."""
        self.loop = None
        await self._link.close()

    async def _decide(
        self, verb: str, topic: str | None, ids: Sequence[int] | None, actor: str, reason: str | None
    ) -> list[int]:
        if topic is None and ids is None:
            raise InvalidMessage("say which messages: give topic=, ids=, or both")
        check_actor(actor, f"outbox.{verb}")
        decisions = Decisions(self._fetch, self._link.long_seconds, self._wake)
        return await decisions.carry_out(f"{verb}_parked", topic, ids, actor, reason)

    def _here(self) -> None:
        check_loop(self.loop, _ITS_OWN)
        if (loop := asyncio.get_running_loop()) is not self._asked:  # the other one's connection leads nowhere here
            self._asked, self._link = loop, Link(self._postgres)
            self._inquiry = Inquiry(self._fetch)

    async def _fetch(self, query: str, *args: object) -> "list[Record]":
        self._here()
        return await self._link.fetch(load_sql(__package__, query, self._schema), *args)

    def _one(self, m: Outgoing) -> Statement:
        arguments = (m.topic, m.key, m.value, m.headers, m.partition_key, m.timestamp)
        return Statement("insert_message", self._schema, arguments, 1, "", _MESSAGES)

    def _many(self, topic: str, made: Sequence[Outgoing]) -> Statement:
        keys, values, headers = [m.key for m in made], [m.value for m in made], [m.headers for m in made]
        shared = headers[0] if headers else None
        if headers.count(shared) == len(headers):
            name, theirs = "insert_messages", shared
        else:
            name, theirs = "insert_messages_with_headers", headers
        return Statement(name, self._schema, (topic, keys, values, theirs), len(made), "", _MESSAGES)

    async def _flush(self, tx: Transaction | AnyConnection | None) -> None:
        """What has been added comes first."""
        if isinstance(tx, Transaction) and self in tx.added:
            await tx.flush()

    async def _store_added(self, tx: Transaction, topic: str, messages: Sequence[Outgoing]) -> None:
        if all(m.partition_key is None and m.timestamp is None for m in messages):
            await self._store(tx, self._many(topic, messages))
            return
        columns = [[m.key, m.value, m.headers, m.partition_key, m.timestamp] for m in messages]
        arguments = (topic, *map(list, zip(*columns, strict=True)))
        name = "insert_messages_with_all"
        await self._store(tx, Statement(name, self._schema, arguments, len(messages), "", _MESSAGES))

    async def _store(self, tx: Transaction | AnyConnection | None, statement: Statement) -> Receipt:
        if tx is None:
            raise NotInTransaction("tx=None: give the transaction or connection that the message commits with")
        try:
            _, rows = await store(tx, lambda: statement, _MESSAGES)
        except NotInTransaction:
            raise
        except EnqueueError as error:
            raise InvalidMessage(str(error)) from error
        if isinstance(tx, Transaction) and rows:
            tx.published = True
        return receipt_of(rows)

    def _store_sync(self, connection: AnySyncConnection, topic: str, statement: Statement) -> Receipt:
        if self._is_direct(topic):
            raise InvalidMessage(f"the route of {topic!r} is direct: call `await publish(...)` or `publish_many(...)`")
        try:
            return receipt_of(store_sync(connection, lambda: statement, _MESSAGES)[1])
        except NotInTransaction:
            raise
        except EnqueueError as error:
            raise InvalidMessage(str(error)) from error

    def _is_direct(self, topic: str) -> bool:
        return self.settings.routes.get(topic) == "direct"

    def _sender(self) -> Direct:
        if self._direct is None:
            raise InvalidMessage("the topic's route is direct, and this outbox has no producer: give one, or no route")
        return self._direct
