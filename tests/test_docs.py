"""The reference tables of the documentation are complete and true."""

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from sidings.executor import Executor, ExecutorSettings, PostgresSettings
from sidings.jobs import Registry
from sidings.kafka import KafkaSettings

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


@pytest.mark.parametrize("model", [PostgresSettings, ExecutorSettings, KafkaSettings])
def test_the_configuration_reference_lists_every_field(model: type[BaseModel]) -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    section = re.search(rf"## `{model.__name__}`.*?(?=\n## |\Z)", text, re.DOTALL)
    assert section is not None
    documented = {name for row in rows(section[0]) for name in re.findall(r"`(\w+)`", row[0])}
    assert documented == set(model.model_fields)


def test_every_link_inside_the_documentation_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
