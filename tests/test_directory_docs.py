"""docs/directories.md is complete and true."""

import inspect
from pathlib import Path

from prometheus_client import CollectorRegistry
from sidings import Directory, Service
from sidings.exposition import show
from sidings.kafka.directory.metrics import DirectoryMetrics, Figures

PAGE = (Path(__file__).parent.parent / "docs" / "directories.md").read_text()


def table(first: str) -> list[list[str]]:
    """The rows of the table whose head begins with `first`."""
    lines = PAGE[PAGE.index(f"| {first} |") :].splitlines()[2:]
    rows = lines[: next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_lists_what_a_directory_exports() -> None:
    registry = CollectorRegistry()
    figures = Figures("s", "t", False, 0.0, 0.0, 0, 0, 0, 0, 0, 0, 0, {0: 1}, {0: 1})
    registry.register(DirectoryMetrics(lambda: figures))
    families = list(registry.collect())
    exported = {f"{family.name}{'_total' * (family.type == 'counter')}": family for family in families}
    documented = {row[0]: row for row in table("name")}
    assert documented.keys() == exported.keys()
    for name, family in exported.items():
        assert documented[name][1] == family.type
        labels = {label for sample in family.samples for label in sample.labels} - {"service", "topic"}
        assert {label for label in documented[name][2].split(", ") if label} == labels


def test_of_several_directories_each_metric_is_shown_once() -> None:
    registry = CollectorRegistry()
    for topic in ("a", "b"):
        figures = Figures("s", topic, True, 0.0, 0.0, 0, 0, 0, 0, 0, 0, 0, {}, {})
        show(DirectoryMetrics(lambda figures=figures: figures), registry)
    names = [family.name for family in registry.collect()]
    assert len(names) == len(set(names))
    assert registry.get_sample_value("sidings_directory_ready", {"service": "s", "topic": "b"}) == 1


def test_the_page_lists_every_argument() -> None:
    documented = {row[0] for row in table("argument")}
    assert documented == set(inspect.signature(Service.directory).parameters) - {"self", "topic"}
    given_by_the_service = {"kafka", "service", "prometheus"}
    assert documented == set(inspect.signature(Directory).parameters) - {"topic"} - given_by_the_service


def test_the_defaults_of_a_directory_are_those_of_a_services() -> None:
    ours, theirs = inspect.signature(Service.directory).parameters, inspect.signature(Directory).parameters
    assert all(ours[name].default == theirs[name].default for name in ours.keys() & theirs.keys() - {"topic"})
