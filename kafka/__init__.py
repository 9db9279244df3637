"""Everything that speaks to Kafka: the assignment, and the consumer whose effects happen exactly once.

Reading order:

* what a service author declares: `settings` with `tls` and `environment`, `message`, `subscription` and
  `typed_subscription`, with `checks` of what is given
* who has which partition: `assignment` (from a consumer group to the executor's origins), `assignor`, `topics` (which
  partition a key belongs to)
* the consumer, from the inside out: `transactions`, `pauses` (by persons), `offsets` with ``advance_offsets.sql`` (the
  compare-and-set), `parking`, `seen` (dedup), `partition`, `handling` (one batch, one transaction; `patience` limits
  each call), `calling` (one message alone), `backlog` (back-pressure), `reset` (offsets moved by order), `fetch_loop`
  and `topic_loop` (the main line), `siding` (what fails, and is tried alone), `placing` (where to read on),
  `topic_ids` (of which topic), `leader_epochs` (of a log that still holds what was read), `lag`, and `stored`, which
  puts these together: one `half` of the consumer
* the other half, which needs no Postgres: `stateless_subscription`, `stateless_window` (what may start, what may be
  committed), `stateless_partition`, `stateless_offsets`, `dead_letters`, `stateless_handling`, `stateless_loop`, and
  `stateless`, which puts these together
* of both: `membership` with `brokers` (one that hangs is gone around), `vitals`, `metrics`, and `consumer`, their life
  in one client
* live replicas of compacted topics: `directory`
* the way out: `outbox` (messages that leave when a transaction has committed), `producer` (those that leave at once)
"""

from .assignment import KafkaExecutor, RebalanceListener, StaticAssignment
from .consumer import Consumer
from .dead_letters import DeadLetters
from .directory import BadRecord, Changed, Directory, KeyOf, SQLite, Storage
from .message import Message, StoredMessage, check_topic
from .outbox import Outbox, OutboxSettings, Receipt, Relay
from .producer import Producer
from .reset import Reset, ResetTo, reset_offsets
from .settings import KafkaSettings
from .stateless_subscription import StatelessSubscription
from .subscription import Decoder, Dedup, Start, Subscription
from .topics import Topics, partition_for
from .transactions import Transactions
from .typed_subscription import TypedSubscription, Unknown

__all__ = [
    "BadRecord",
    "Changed",
    "Consumer",
    "DeadLetters",
    "Decoder",
    "Dedup",
    "Directory",
    "KafkaExecutor",
    "KafkaSettings",
    "KeyOf",
    "Message",
    "Outbox",
    "OutboxSettings",
    "Producer",
    "RebalanceListener",
    "Receipt",
    "Relay",
    "Reset",
    "ResetTo",
    "SQLite",
    "Start",
    "StatelessSubscription",
    "StaticAssignment",
    "Storage",
    "StoredMessage",
    "Subscription",
    "Topics",
    "Transactions",
    "TypedSubscription",
    "Unknown",
    "check_topic",
    "partition_for",
    "reset_offsets",
]
