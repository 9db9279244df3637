"""Kafka messages that wait in the database, and the relay that sends them.

Reading order: `schema/migrations/` (the outbox), `settings`, `errors`; `message`, `receipt`, `publish`, `addition`,
`inquiry` and `decisions` (into the outbox, and what persons do), `backlog` (pure: what a relay knows), `reader` with
`read.sql`, `recorder` with `record.sql` (out of the outbox), `senders` and `packing` (towards Kafka); one topic's way,
from the inside out: `failures` (what errors mean), `lane_senders` (which producer), `ledger` (what becomes of
messages), `shunned` (where messages without a key do not go), `rounds` (a batch for each partition), `lanes` (round
after round); `slots` (ownership), `amends` (what is owed after a slot was lost), `metrics`, `figures` (how much waits),
and `relay`, which puts them together.
"""

from .errors import InvalidMessage, MessageParked, NotPublished, PublishError, RolledBack
from .message import Headers, Outgoing, Value
from .metrics import OutboxMetrics
from .packing import MESSAGE_ID
from .publish import FailingTopic, Outbox, ParkedMessage
from .receipt import Receipt
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
