"""Settings of the outbox and its relay. Durations are seconds."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from ...settings import Settings

__all__ = ["OutboxSettings", "Route"]

_MOST_BYTES = 2**31 - 1  # that Kafka's protocol can say
Route = Literal["outbox", "direct"]


class OutboxSettings(Settings):
    """How messages leave.

    Args:
        routes: By topic. ``"direct"`` sends at once, without Postgres, and waits for the acknowledgement, whatever
            becomes of the transaction. The default is ``"outbox"``.
        relay: Whether this process sends messages of the outbox.
        batch_size: Most messages for one partition in one request.
        batch_bytes: Most bytes for one partition in one request. A larger single message is sent alone.
        max_message_bytes: Larger messages are refused in `publish`. Raise it where brokers and topics take more.
        poll_seconds: How often to look for messages that others published.
        window: Most messages in memory. A quarter of it, and at least `batch_size`, may be under way of one topic.
        lease_seconds: How long a slot stays ours without a renewal. A takeover after a kill takes that long.
        delivery_seconds: How long Kafka may leave a batch unacknowledged before its topic counts as failing.
        metadata_seconds: How long to look for a topic before it counts as missing.
        slow_seconds: After so long without an acknowledgement, or without being found, a topic's messages leave the
            memory to others.
        backoff_seconds: First pause of a failing topic.
        max_backoff_seconds: Longest pause of a failing topic.
        topic_patience_seconds: A topic that does not exist, or that we may not write to, is tried for so long; then its
            messages are parked. So is one message that a partition refuses for a reason that the client does not know,
            if it takes no other either. None: never.
        shutdown_seconds: How long the relay may take to stop. For the first half of it, it sends what waits.
        figures_seconds: How often the waiting messages are counted, at most.
        correlation_header: The name under which messages carry the correlation id of the handler that publishes them.
        compression: Of batches, on their way and in the log.

    Raises:
        ConfigurationError: A value is out of bounds; the message names the field.
    """

    routes: Mapping[str, Route] = Field(default_factory=dict[str, Route])
    relay: bool = True
    batch_size: int = Field(default=1_000, ge=1, le=1_000)
    batch_bytes: int = Field(default=512 * 1024, ge=1024, le=_MOST_BYTES)
    max_message_bytes: int = Field(default=1_000_000, ge=1024, le=_MOST_BYTES)
    poll_seconds: float = Field(default=0.1, gt=0)
    window: int = Field(default=10_000, ge=1)
    lease_seconds: float = Field(default=15.0, ge=0.2, le=1_000_000)
    delivery_seconds: float = Field(default=15.0, gt=0)
    metadata_seconds: float = Field(default=3.0, gt=0)
    slow_seconds: float = Field(default=1.0, gt=0)
    backoff_seconds: float = Field(default=0.5, gt=0)
    max_backoff_seconds: float = Field(default=60.0, gt=0)
    topic_patience_seconds: float | None = Field(default=300.0, ge=0)
    shutdown_seconds: float = Field(default=5.0, ge=0)
    figures_seconds: float = Field(default=5.0, gt=0)
    correlation_header: str = Field(default="correlation_id", min_length=1)
    compression: Literal["gzip", "snappy", "lz4", "zstd"] | None = None
