"""Kafka messages that wait in the database, and the relay that sends them.

Reading order: `schema/migrations/` (the outbox), `message` and `publish` (into the outbox), `backlog` (pure: what a
relay knows), `reader` with `read.sql`, `senders` and `packing` (towards Kafka), `lanes` (one topic at a time, in
order, failures), `recorder` with `record.sql` (out of the outbox), `slots` (ownership), then `relay`, which puts them
together.
"""

from .errors import InvalidMessage, MessageParked, NotPublished, PublishError, RolledBack
from .message import Headers, Outgoing, Value
from .metrics import OutboxMetrics
from .packing import MESSAGE_ID
from .publish import FailingTopic, Outbox, ParkedMessage, Receipt
from .relay import Relay
from .settings import OutboxSettings, Route

__all__ = [
    "MESSAGE_ID",
    "FailingTopic",
    "Headers",
    "InvalidMessage",
    "MessageParked",
    "NotPublished",
    "Outbox",
    "OutboxMetrics",
    "OutboxSettings",
    "Outgoing",
    "ParkedMessage",
    "PublishError",
    "Receipt",
    "Relay",
    "RolledBack",
    "Route",
    "Value",
]
