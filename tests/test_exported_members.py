"""What `import sidings` offers: the list is kept, sorted, and everything in it has a docstring."""

import ast
import inspect
import pickle
import pydoc
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path

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


def test_the_facade_exports_what_is_listed_here() -> None:
    """A change of this list is a change of the public interface: it belongs into the changelog."""
    assert sidings.__all__ == EXPORTED


@pytest.mark.parametrize("package", [sidings, errors, executor, jobs, kafka, schema], ids=lambda p: p.__name__)
def test_exports_are_sorted_and_exist(package: object) -> None:
    names: list[str] = package.__all__  # type: ignore[attr-defined]
    assert names == sorted(set(names), key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert [name for name in names if not hasattr(package, name)] == []


def test_what_one_module_takes_from_another_is_listed_there() -> None:
    root = Path(sidings.__file__).parent
    packages = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    listed: dict[str, list[str]] = {}
    taken: list[tuple[str, str, str]] = []  # by whom, from where, what
    for package in packages:
        for path in sorted(root.joinpath(*package.split(".")[1:]).glob("*.py")):
            module = package if path.stem == "__init__" else f"{package}.{path.stem}"
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Assign([ast.Name("__all__")], names):
                        listed[module] = ast.literal_eval(names)
                    case ast.ImportFrom(level=1 | 2 | 3):
                        home = resolve_name("." * node.level + (node.module or ""), package)
                        taken += [(module, home, alias.name) for alias in node.names]
    assert len(taken) > 1_000
    assert [
        (who, home, name)
        for who, home, name in taken
        if home in listed and name not in listed[home] and f"{home}.{name}" not in listed  # that is a module
    ] == []


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


def declared() -> dict[str, str]:
    """What type checkers see: each name with the package that it is imported from."""
    tree = ast.parse(Path(sidings.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    return {alias.name: f"sidings.{node.module}" for node in imports for alias in node.names}


def test_a_name_is_what_type_checkers_take_it_for() -> None:
    assert sorted(declared()) == sorted(EXPORTED)
    for name, home in declared().items():
        assert getattr(sidings, name) is getattr(import_module(home), name), name


def test_importing_sidings_imports_nothing_that_is_not_asked_for() -> None:
    script = (
        "import sys, sidings\n"
        "from sidings import SidingsError\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('sidings.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    tops, ours = (line.split() for line in done.stdout.splitlines())
    assert not {"aiokafka", "asyncpg", "prometheus_client", "pydantic", "pyspark", "tenacity"} & set(tops)
    assert ours == ["sidings.errors"]


def test_every_name_can_be_imported_alone_listed_explained_and_pickled() -> None:
    """In a process of its own, where nothing is imported yet."""
    script = (
        "import sidings\n"
        "assert set(sidings.__all__) <= set(dir(sidings))\n"
        "for name in sidings.__all__: exec(f'from sidings import {name}')\n"
        "from sidings import *\n"
        "assert Service is sidings.Service and migrate is sidings.schema.migrate\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)
    assert "class Service" in pydoc.plain(pydoc.render_doc(sidings))
    for name in EXPORTED:
        if inspect.isclass(exported := getattr(sidings, name)):
            assert pickle.loads(pickle.dumps(exported)) is exported


def test_a_wrong_name_fails_as_it_does_everywhere() -> None:
    with pytest.raises(AttributeError, match="module 'sidings' has no attribute 'Servise'"):
        _ = sidings.Servise  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Servise' from 'sidings'"):
        from sidings import Servise  # type: ignore[attr-defined] # noqa: F401
