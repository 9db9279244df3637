"""What a run yields, as plain data: figures of single runs, medians, comparisons; to and from JSON."""

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["UNITS", "Comparison", "Figures", "Report", "ScenarioResult", "VariantResult"]

Figures = dict[str, float]  # of one repetition: "rate" and whatever else was measured, by name (units in `UNITS`)

UNITS = {
    "rate": "jobs/s",
    "messages": "messages/s",
    "client_us": "µs CPU each, client",
    "postgres_us": "µs CPU each, Postgres",
    "wal_bytes": "bytes of WAL each",
    "p50_ms": "ms, median",
    "p99_ms": "ms, 99th percentile",
    "others_p50_ms": "ms, median, commits of other processes",
    "others_p99_ms": "ms, 99th percentile, commits of other processes",
    "batch": "jobs a cycle",
    "work_seconds": "s of work measured",
    "seconds": "s",
    "statements": "statements/s",
    "core_percent": "% of a core, client and Postgres",
    "client_percent": "% of a core, client",
    "postgres_percent": "% of a core, Postgres",
    "wal_bytes_second": "bytes of WAL/s",
    "cpu_us": "µs CPU a job, client and Postgres",
    "seed_us": "µs CPU of Postgres for each row until its commit",
    "us": "µs a message",
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
    skipped: str | None = None  # why it could not run, or go on
    failed: bool = False  # whether that was an error, and not something that is missing here

    def values(self, key: str) -> list[float]:
        """A figure of all repetitions."""
        return [run[key] for run in self.runs if key in run]

    def median(self, key: str) -> float | None:
        """The median of a figure, None when it was not measured."""
        values = self.values(key)
        return statistics.median(values) if values else None

    @property
    def cpu_us(self) -> float | None:
        """Microseconds of CPU for each job or message, client and Postgres; the median of the repetitions."""
        both = [
            run["client_us"] + run["postgres_us"] for run in self.runs if {"client_us", "postgres_us"} <= run.keys()
        ]
        return statistics.median(both) if both else None


@dataclass
class Comparison:
    """A figure of one variant: against another's, pair by pair of repetitions that ran next to each other, or, where
    `to` is None, by itself. target: of the design's section 7."""

    label: str
    of: str
    to: str | None
    values: list[float]
    target: float | None = None
    at_most: bool = False  # whether the target is a ceiling
    unit: str = ""  # of `values`; none: they are ratios
    times: bool = False  # whether the label names `to` first: a ratio of rates, told as one of times

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
    comparisons: list[Comparison] = field(default_factory=list[Comparison])

    def variant(self, name: str | None) -> VariantResult | None:
        """The variant of that name."""
        return next((v for v in self.variants if v.name == name), None)


@dataclass
class Report:
    """A whole run: where, with what, and the scenarios."""

    machine: dict[str, Any]
    scenarios: list[ScenarioResult] = field(default_factory=list[ScenarioResult])

    @property
    def failures(self) -> list[str]:
        """Variants that ended with an error."""
        return [f"{s.name} / {v.name}: {v.skipped}" for s in self.scenarios for v in s.variants if v.failed]

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
            item["comparisons"] = [Comparison(**c) for c in item["comparisons"]]
            report.scenarios.append(ScenarioResult(**item))
        return report
