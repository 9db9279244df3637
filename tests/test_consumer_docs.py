"""docs/consumer.md is complete and true."""

import inspect
import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from sidings import KafkaSettings, PostgresSettings, Service
from sidings.kafka import Consumer, RebalanceListener, Transactions

PAGE = (Path(__file__).parent.parent / "docs" / "consumer.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below `heading` whose first cell is code."""
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_metrics_table_lists_what_a_consumer_exports() -> None:
    registry = CollectorRegistry()
    transactions = Transactions(PostgresSettings(dsn="postgresql://localhost/nowhere"), print)
    settings = KafkaSettings(bootstrap="localhost:1")
    Consumer("docs", settings, {}, [], transactions, RebalanceListener(print), prometheus=registry)
    exported = {f"{m.name}_total" if m.type == "counter" else m.name: m.type for m in registry.collect()}
    assert {row[0]: row[1] for row in rows("Metrics")} == exported


def test_the_declaration_table_lists_every_argument() -> None:
    arguments = [name for name in inspect.signature(Service.consumer).parameters if name not in ("self", "topic")]
    assert [row[0] for row in rows("The declaration")] == arguments


def test_what_is_said_of_topics_with_several_types_names_every_argument() -> None:
    section = PAGE.split("## Several types in one topic")[1].split("\n## ")[0]
    arguments = [name for name in inspect.signature(Service.topic).parameters if name not in ("self", "topic")]
    assert [name for name in arguments if f"`{name}" not in section] == []
