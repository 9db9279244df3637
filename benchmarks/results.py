"""What a run yields, as plain data: figures of single runs, medians, ratios; to and from JSON."""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Figures", "Ratio", "Report", "ScenarioResult", "VariantResult"]

Figures = dict[str, float]  # of one repetition: "rate" and whatever else was measured, by name (units in `UNITS`)

UNITS = {
    "rate": "jobs/s",
    "client_us": "µs CPU a job, client",
    "postgres_us": "µs CPU a job, Postgres",
    "wal_bytes": "bytes of WAL a job",
    "p50_ms": "ms, median",
    "p99_ms": "ms, 99th percentile",
    "batch": "jobs a cycle",
    "seconds": "s",
    "statements": "statements/s",
    "core_percent": "% of a core, client and Postgres",
    "client_percent": "% of a core, client",
    "postgres_percent": "% of a core, Postgres",
    "wal_bytes_second": "bytes of WAL/s",
    "cpu_us": "µs CPU a job, both",
    "memory_mib": "MiB of the process at its peak",
    "load": "load average before the repetition",
    "foreign_cores": "cores that other processes used meanwhile",
}


@dataclass
class VariantResult:
    """One variant of a scenario: its repetitions, in the order in which they ran."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    runs: list[Figures] = field(default_factory=list[Figures])
    skipped: str | None = None  # why it could not run

    def values(self, key: str) -> list[float]:
        """A figure of all repetitions."""
        return [run[key] for run in self.runs if key in run]

    def median(self, key: str) -> float | None:
        """The median of a figure, None when it was not measured."""
        values = self.values(key)
        return statistics.median(values) if values else None


@dataclass
class Ratio:
    """A figure of one variant against another's, pair by pair: repetitions that ran next to each other."""

    label: str
    values: list[float]
    target: float | None = None
    at_most: bool = False  # whether the target is a ceiling

    @property
    def median(self) -> float | None:
        """The median of the pairs."""
        return statistics.median(self.values) if self.values else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one, or without values."""
        if self.target is None or self.median is None:
            return None
        return self.median <= self.target if self.at_most else self.median >= self.target


@dataclass
class ScenarioResult:
    """All that one scenario has measured."""

    name: str
    title: str
    key: str  # the figure that it is about
    note: str
    variants: list[VariantResult] = field(default_factory=list[VariantResult])
    ratios: list[Ratio] = field(default_factory=list[Ratio])

    def variant(self, name: str) -> VariantResult | None:
        """The variant of that name."""
        return next((v for v in self.variants if v.name == name), None)


@dataclass
class Report:
    """A whole run: where, with what, and the scenarios."""

    machine: dict[str, Any]
    scenarios: list[ScenarioResult] = field(default_factory=list[ScenarioResult])

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Report":
        """What `write` has written."""
        data = json.loads(path.read_text())
        report = cls(data["machine"])
        for item in data["scenarios"]:
            item["variants"] = [VariantResult(**v) for v in item["variants"]]
            item["ratios"] = [Ratio(**r) for r in item["ratios"]]
            report.scenarios.append(ScenarioResult(**item))
        return report
