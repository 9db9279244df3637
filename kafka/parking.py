"""Messages that leave the main line: stored as jobs of their key's group."""

import json
from collections.abc import Sequence

from ..executor import PostgresSettings
from ..jobs import Transaction
from ..jobs.context import travelling
from ..schema import load_sql
from .message import StoredMessage
from .partition import Item
from .subscription import Subscription

__all__ = ["Parking"]

_REASON_CHARACTERS = 2_000


class Parking:
    """Stores messages as jobs, and knows which keys have one waiting."""

    def __init__(self, settings: PostgresSettings) -> None:
        schema = settings.schema_name
        self._seconds = settings.call_seconds
        self._parked_sql = load_sql(__package__, "parked_groups", schema)
        self._store_sql = load_sql(__package__, "store_messages", schema)

    async def blocked(self, tx: Transaction, items: Sequence[Item]) -> frozenset[tuple[str, str]]:
        """The (origin, group) pairs among those of `items` that have a message parked."""
        keys = {(item.partition.origin, item.group) for item in items if item.group is not None}
        if not keys:
            return frozenset()
        rows = await tx.fetch(
            self._parked_sql, [key[0] for key in keys], [key[1] for key in keys], timeout=self._seconds
        )
        return frozenset((row[0], row[1]) for row in rows)

    async def store(
        self, tx: Transaction, subscription: Subscription[object], items: Sequence[Item], error: str | None = None
    ) -> None:
        """Store `items` as jobs, in order. One that cannot be decoded is held, with its bytes and its error.

        error: why the message is parked, as its payload tells whoever looks at it.
        """
        await tx.execute(
            self._store_sql,
            subscription.job_type_name,
            [item.partition.origin for item in items],
            [item.group for item in items],
            [None if item.error is None else _reason(item.error) for item in items],
            [StoredMessage.of(item.record, _clean(item.error or error)).model_dump_json() for item in items],
            [_headers(item) for item in items],
            timeout=self._seconds,
        )
        tx.enqueued.update(item.partition.origin for item in items)


def _headers(item: Item) -> str | None:
    """The job's headers: what of the message's travels on."""
    headers = travelling(item.record.headers)
    return json.dumps(headers) if headers else None


def _reason(error: str) -> str:
    return f"the message cannot be decoded: {_clean(error)}"


def _clean(error: str | None) -> str | None:
    """Neither NUL nor lone surrogates can be stored in Postgres."""
    if error is None:
        return None
    return error[:_REASON_CHARACTERS].replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
