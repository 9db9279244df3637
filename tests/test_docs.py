"""The reference tables of the documentation are complete and true."""

import inspect
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from sidings import Service
from sidings.executor import Executor, ExecutorSettings, PostgresSettings
from sidings.jobs import Registry
from sidings.kafka import KafkaSettings, OutboxSettings

ROOT = Path(__file__).parent.parent


def rows(text: str) -> list[list[str]]:
    """Cells of all table rows whose first cell is code."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]


def test_the_metrics_table_lists_what_an_executor_exports() -> None:
    registry = CollectorRegistry()
    postgres = PostgresSettings(dsn="postgresql://localhost/nowhere")
    Executor("docs", Registry(), postgres, prometheus=registry)
    exported = {f"{m.name}_total" if m.type == "counter" else m.name: m.type for m in registry.collect()}
    documented = {row[0].strip("`"): row[1] for row in rows((ROOT / "docs/metrics.md").read_text())}
    assert documented == exported


@pytest.mark.parametrize("model", [PostgresSettings, ExecutorSettings, KafkaSettings, OutboxSettings])
def test_the_configuration_reference_lists_every_field(model: type[BaseModel]) -> None:
    assert configured(rf"`{model.__name__}`") == set(model.model_fields)


def test_the_configuration_reference_lists_every_argument_of_the_service() -> None:
    assert configured(r"`Service\(name, …\)`") == set(inspect.signature(Service).parameters)


def configured(title: str) -> set[str]:
    """The settings that a section of the reference names."""
    text = (ROOT / "docs/configuration.md").read_text()
    section = re.search(rf"## {title}.*?(?=\n## |\Z)", text, re.DOTALL)
    assert section is not None
    return {name for row in rows(section[0]) for name in re.findall(r"`(\w+)`", row[0])}


def test_every_link_inside_the_documentation_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
