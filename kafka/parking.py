"""Messages that leave the main line: stored as jobs of their key's group."""

import json
from collections.abc import Callable, Sequence
from uuid import UUID

from aiokafka import TopicPartition

from ..executor import PostgresSettings
from ..jobs import Transaction
from ..jobs.context import travelling
from ..jobs.outcome import storable
from ..jobs.transaction import note_jobs
from ..schema import load_sql
from .message import StoredMessage
from .partition import Item
from .subscription import Subscription
from .topics import Topics

__all__ = ["Parking"]

_REASON_CHARACTERS = 2_000
_SEPARATOR = "\x1f"  # stands in no origin, and in no group of a key: that is printable, and never empty


class Parking:
    """Stores messages as jobs, and knows which keys have one waiting. topic_id: of a partition's topic."""

    def __init__(
        self,
        settings: PostgresSettings,
        topics: Topics | None,
        topic_id: Callable[[TopicPartition], UUID | None],
    ) -> None:
        schema = settings.schema_name
        self._topics = topics
        self._topic_id = topic_id
        self._seconds = settings.call_seconds
        self._parked_sql = load_sql(__package__, "parked_groups", schema)
        self._store_sql = load_sql(__package__, "store_messages", schema)

    async def blocked(self, tx: Transaction, items: Sequence[Item]) -> frozenset[tuple[str, str]]:
        """The (origin, group) pairs among those of `items` that have a message parked."""
        keys = {(item.partition.origin, group) for item in items if (group := item.group) is not None}
        if not keys:
            return frozenset()
        elsewhere = self._elsewhere(items)
        asked = [*keys, *elsewhere]
        places = (_SEPARATOR.join(place[0] for place in asked), _SEPARATOR.join(place[1] for place in asked))
        rows = await tx.fetch(self._parked_sql, *places, timeout=self._seconds)
        parked = {(row[0], row[1]) for row in rows}
        return frozenset((parked & keys).union(*(elsewhere[place] for place in parked & elsewhere.keys())))

    def _elsewhere(self, items: Sequence[Item]) -> dict[tuple[str, str], set[tuple[str, str]]]:
        """Where messages of these keys were before partitions were added to their topic, with the keys concerned: all
        as (origin, group)."""
        topic = items[0].partition.tp.topic
        found: dict[tuple[str, str], set[tuple[str, str]]] = {}
        if self._topics is None or not self._topics.has_grown(topic):
            return found
        for item in items:
            own = item.partition.origin
            if item.group is None or item.record.key is None:
                continue
            origins = self._topics.origins_of(item.record.key, topic)
            if own in origins:
                for origin in origins:
                    found.setdefault((origin, item.group), set()).add((own, item.group))
        return found

    async def store(
        self, tx: Transaction, subscription: Subscription[object], items: Sequence[Item], error: str | None = None
    ) -> None:
        """Store `items` as jobs, in order. One that cannot be decoded is held, with its bytes and its error.

        error: why the message is parked, as its payload tells whoever looks at it.
        """
        topic = subscription.topic
        grown = self._topics is not None and self._topics.has_grown(topic)
        rows = await tx.fetch(
            self._store_sql,
            subscription.job_type_name,
            [item.partition.origin for item in items],
            [item.group for item in items],
            [None if i.error is None else f"the message cannot be decoded: {_clean(i.error)}" for i in items],
            [self._stored(item, error).model_dump_json() for item in items],
            [_headers(item) for item in items],
            [item.record.key for item in items] if grown else None,
            timeout=self._seconds,
        )
        for row in rows:
            note_jobs(tx.enqueued, row[0], [])

    def _stored(self, item: Item, error: str | None) -> StoredMessage:
        why = item.error or error
        return StoredMessage.of(item.record, None if why is None else _clean(why), self._topic_id(item.partition.tp))


def _headers(item: Item) -> str | None:
    """The job's headers: what of the message's travels on."""
    headers = travelling(item.record.headers)
    return json.dumps(headers) if headers else None


def _clean(error: str) -> str:
    return storable(error, _REASON_CHARACTERS)
