"""Jobs in Postgres, committed with the state change and run only by the owner of their Kafka partition.

Everything that a service author imports stands here. Reading order of the code: `errors`; `schema` (the tables);
`jobs` (what a job is, and how it is stored); `executor` (who runs it, and when); `kafka` (assignment and consumer);
`service`, which composes all of these, with `environment` and `monitor` beside it.
"""

from .errors import (
    ActionRefused,
    AdministrationError,
    Busy,
    ConfigurationError,
    ConsumerError,
    EnqueueError,
    Fenced,
    ForeignSchema,
    InvalidPayload,
    JobNotFound,
    KafkaUnavailable,
    MissingGroup,
    MissingOrigin,
    NotInTransaction,
    OffsetOutOfRange,
    OffsetUnknown,
    PostgresUnavailable,
    SchemaChanged,
    SchemaError,
    SchemaMissing,
    SchemaTooNew,
    SchemaTooOld,
    SidingsError,
    UndecodableMessage,
    UnknownJobType,
    UnknownMessageType,
)
from .executor import ExecutorSettings, PostgresSettings
from .jobs import Discard, Fence, Job, JobId, JobType, Registry, Retry, Snooze, Transaction
from .jobs.admin import Admin
from .kafka import KafkaSettings, Message, StaticAssignment
from .kafka.outbox import (
    InvalidMessage,
    MessageParked,
    NotPublished,
    OutboxSettings,
    PublishError,
    Receipt,
    RolledBack,
)
from .schema import migrate
from .service import Service

__all__ = [
    "ActionRefused",
    "Admin",
    "AdministrationError",
    "Busy",
    "ConfigurationError",
    "ConsumerError",
    "Discard",
    "EnqueueError",
    "ExecutorSettings",
    "Fence",
    "Fenced",
    "ForeignSchema",
    "InvalidMessage",
    "InvalidPayload",
    "Job",
    "JobId",
    "JobNotFound",
    "JobType",
    "KafkaSettings",
    "KafkaUnavailable",
    "Message",
    "MessageParked",
    "MissingGroup",
    "MissingOrigin",
    "NotInTransaction",
    "NotPublished",
    "OffsetOutOfRange",
    "OffsetUnknown",
    "OutboxSettings",
    "PostgresSettings",
    "PostgresUnavailable",
    "PublishError",
    "Receipt",
    "Registry",
    "Retry",
    "RolledBack",
    "SchemaChanged",
    "SchemaError",
    "SchemaMissing",
    "SchemaTooNew",
    "SchemaTooOld",
    "Service",
    "SidingsError",
    "Snooze",
    "StaticAssignment",
    "Transaction",
    "UndecodableMessage",
    "UnknownJobType",
    "UnknownMessageType",
    "migrate",
]
