"""What Kafka's errors mean: for a message, for its topic, and for the producer."""

from aiokafka.errors import (
    BrokerResponseError,
    InvalidTimestampError,
    InvalidTopicError,
    KafkaError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    UnsupportedForMessageFormatError,
    kafka_errors,
)

__all__ = ["NEVER", "NO_TOPIC", "TOO_LARGE", "ClocksApart", "Failed", "InvalidRecordError", "refuses", "text_of"]


class InvalidRecordError(BrokerResponseError):
    """aiokafka 0.14 does not know it."""

    errno = 87
    message = "INVALID_RECORD"
    description = "The broker takes no such record, as a message without a key for a compacted topic."

    def __str__(self) -> str:
        return f"{super().__str__()}: {self.description}"


kafka_errors[InvalidRecordError.errno] = InvalidRecordError

# What the broker says of a batch that is too large, by one of its messages or by all of them together.
TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
# What it says of a batch that holds a message which it will never take.
NEVER = (*TOO_LARGE, InvalidTimestampError, UnsupportedForMessageFormatError, InvalidRecordError)
# What it says of a topic to which no message can be sent until somebody does something about it.
NO_TOPIC = (UnknownTopicOrPartitionError, TopicAuthorizationFailedError, InvalidTopicError)


class ClocksApart(KafkaError):
    """Kafka refuses the time of now: so it would any message's."""

    def __str__(self) -> str:
        return (
            "Kafka refuses the time of now (InvalidTimestampError): the clock of this machine or of a broker is wrong, "
            "by an hour or more unless the topic says otherwise (message.timestamp.after.max.ms, before.max.ms)"
        )


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


def refuses(error: BaseException) -> bool:
    """Whether with this error a broker refuses a batch for good: for what is in `NEVER`, or what may be a message's
    fault or not, as a policy of the brokers, or a reason that aiokafka has no name for."""
    return isinstance(error, BrokerResponseError) and not (error.retriable or isinstance(error, NO_TOPIC))


def text_of(error: BaseException) -> str:
    """An error as people are told it."""
    return str(error) if str(error).startswith("[Error") else f"{type(error).__name__}: {error}"
