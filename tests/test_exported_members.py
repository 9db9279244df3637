"""What `import sidings` offers: the list is kept, sorted, and everything in it has a docstring."""

import inspect

import pytest
import sidings
from sidings import errors, executor, jobs, kafka, schema

EXPORTED = [
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


def test_the_facade_exports_what_is_listed_here() -> None:
    """A change of this list is a change of the public interface: it belongs into the changelog."""
    assert sidings.__all__ == EXPORTED


@pytest.mark.parametrize("package", [sidings, errors, executor, jobs, kafka, schema], ids=lambda p: p.__name__)
def test_exports_are_sorted_and_exist(package: object) -> None:
    names: list[str] = package.__all__  # type: ignore[attr-defined]
    assert names == sorted(set(names), key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert [name for name in names if not hasattr(package, name)] == []


def test_every_error_is_exported() -> None:
    assert set(errors.__all__) - set(sidings.__all__) == set()


def test_every_public_name_has_a_docstring() -> None:
    undocumented = [
        name
        for name in sidings.__all__
        if (inspect.isclass(getattr(sidings, name)) or callable(getattr(sidings, name)))
        and not inspect.getdoc(getattr(sidings, name))
    ]
    assert undocumented == []


def test_every_public_method_of_the_service_has_a_docstring() -> None:
    methods = [name for name in vars(sidings.Service) if not name.startswith("_")]
    assert [name for name in methods if not inspect.getdoc(getattr(sidings.Service, name))] == []
