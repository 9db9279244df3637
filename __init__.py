"""Jobs in Postgres, committed with the state change and run only by the owner of their Kafka partition.

Everything that a service author imports stands here. Reading order of the code: `errors`, `settings` (what all have in
common); `schema` (the tables); `jobs` (what a job is, and how it is stored); `executor` (who runs it, and when);
`kafka` (assignment and consumer); `service`, which composes all of these. `collector`, `exposition`, `legible`,
`outage`, `signals`, `supervision` and `waiting` know of none of them. Around a service: `testing`, `cli`,
`spark_analytics`, `devstack`.

A name is imported when it is asked for: the command line and a process that only looks do not wait for what they do
not use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers, editors and the import contracts see
    from .errors import (
        ActionRefused,
        AdministrationError,
        Busy,
        ConfigurationError,
        ConsumerError,
        DirectoryBehind,
        DirectoryError,
        DirectoryNotReady,
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
        SchemaBusy,
        SchemaChanged,
        SchemaError,
        SchemaMissing,
        SchemaTooNew,
        SchemaTooOld,
        SidingsError,
        StorageError,
        UndecodableMessage,
        UnknownJobType,
        UnknownMessageType,
    )
    from .executor import ExecutorSettings, PostgresSettings
    from .jobs import (
        Call,
        Discard,
        Fence,
        Job,
        JobId,
        JobType,
        LogContext,
        Next,
        Registry,
        Retry,
        Snooze,
        Tick,
        Transaction,
        correlated,
        current_headers,
    )
    from .jobs.admin import Admin
    from .kafka import BadRecord, Changed, Directory, KafkaSettings, Message, SQLite, StaticAssignment
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
    "BadRecord",
    "Busy",
    "Call",
    "Changed",
    "ConfigurationError",
    "ConsumerError",
    "Directory",
    "DirectoryBehind",
    "DirectoryError",
    "DirectoryNotReady",
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
    "LogContext",
    "Message",
    "MessageParked",
    "MissingGroup",
    "MissingOrigin",
    "Next",
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
    "SQLite",
    "SchemaBusy",
    "SchemaChanged",
    "SchemaError",
    "SchemaMissing",
    "SchemaTooNew",
    "SchemaTooOld",
    "Service",
    "SidingsError",
    "Snooze",
    "StaticAssignment",
    "StorageError",
    "Tick",
    "Transaction",
    "UndecodableMessage",
    "UnknownJobType",
    "UnknownMessageType",
    "correlated",
    "current_headers",
    "migrate",
]

# Whose `__all__` has the names above; what takes longer to import is asked later.
_HOMES = ("errors", "jobs", "schema", "executor", "jobs.admin", "kafka", "kafka.outbox", "service")

if not TYPE_CHECKING:  # else any wrong name would pass the type check

    def __getattr__(name):
        if name in _HOMES:
            return import_module(f".{name}", __name__)
        if name in __all__:
            for home in _HOMES:
                module = import_module(f".{home}", __name__)
                if name in module.__all__:
                    globals()[name] = found = getattr(module, name)
                    return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__, *(home for home in _HOMES if "." not in home)})
