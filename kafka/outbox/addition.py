"""Messages that are added to a transaction: held back until it ends, and then stored with few statements."""

from collections.abc import Awaitable, Callable, Sequence

from ...jobs import Transaction
from ...jobs.transaction import should_be_stored
from .message import Outgoing

__all__ = ["AddedMessages"]


class AddedMessages:
    """Those of one transaction that have not been stored yet. store_topic: stores those of one topic, in order."""

    def __init__(self, store_topic: Callable[[Transaction, str, Sequence[Outgoing]], Awaitable[None]]) -> None:
        self._store_topic = store_topic
        self._by_topic: dict[str, list[Outgoing]] = {}
        self._count = self._bytes = 0

    def add(self, message: Outgoing) -> bool:
        """Take up one more message; returns whether they should be stored now."""
        self._by_topic.setdefault(message.topic, []).append(message)
        self._count += 1
        self._bytes += len(message.value or b"") + len(message.key or b"")
        return should_be_stored(self._count, self._bytes)

    async def store(self, tx: Transaction) -> None:
        """Store all. Errors are those of `Outbox.publish_many`."""
        for topic, messages in self._by_topic.items():
            await self._store_topic(tx, topic, messages)
