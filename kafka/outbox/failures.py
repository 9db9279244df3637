"""What Kafka's errors mean: for a message, for its topic, and for the producer."""

from aiokafka.errors import (
    InvalidTimestampError,
    InvalidTopicError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    UnsupportedForMessageFormatError,
)

__all__ = ["NEVER", "NO_TOPIC", "Failed", "text_of"]

# What the broker says of a batch that holds a message which it will never take.
NEVER = (MessageSizeTooLargeError, RecordListTooLargeError, InvalidTimestampError, UnsupportedForMessageFormatError)
# What it says of a topic to which no message can be sent until somebody does something about it.
NO_TOPIC = (UnknownTopicOrPartitionError, TopicAuthorizationFailedError, InvalidTopicError)


class Failed(Exception):
    """Some of a round was not acknowledged. cut: by no fault of the topic; unreachable: no answer, so that it may have
    arrived. stuck: these partitions took nothing, and should go apart. progress: others have taken something."""

    stuck: frozenset[int] = frozenset()
    progress = False

    def __init__(self, error: BaseException, *, cut: bool = False, unreachable: bool = False) -> None:
        super().__init__(repr(error))
        self.error = error
        self.cut = cut
        self.unreachable = unreachable


def text_of(error: BaseException) -> str:
    """An error as people are told it."""
    return str(error) if str(error).startswith("[Error") else f"{type(error).__name__}: {error}"
