"""What can go wrong with a published message.

::

    SidingsError
    └── PublishError
        ├── InvalidMessage        it cannot be stored or sent as it is; nothing has been written
        └── NotPublished          it has not reached its topic, and will not by itself
            ├── RolledBack        its transaction did not commit
            └── MessageParked     Kafka refused it; it waits for a person, with Kafka's reason
"""

from ...errors import SidingsError

__all__ = ["InvalidMessage", "MessageParked", "NotPublished", "PublishError", "RolledBack"]


class PublishError(SidingsError):
    """The root of the outbox's errors."""


class InvalidMessage(PublishError):
    """The message cannot be stored or sent as it is; the error says why.

    From `Outbox` nothing has been written, and the caller's transaction is still usable. From `Producer` Kafka may have
    been asked, and have refused it.
    """


class NotPublished(PublishError):
    """The message has not reached its topic, and will not by itself."""


class RolledBack(NotPublished):
    """The transaction, or the savepoint, that published the message was rolled back."""


class MessageParked(NotPublished):
    """Kafka refused the message, and it is kept in `outbox_parked`: see `Outbox.parked`, `release` and `discard`."""
