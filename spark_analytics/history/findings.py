"""What is wrong, in sentences: the head of a report."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

__all__ = ["Finding", "duration", "findings", "measured"]

_MOST = 3  # of one kind


@dataclass(frozen=True)
class Finding:
    """level: ``bad`` or ``warn``. section: where the report has more."""

    level: str
    text: str
    section: str


def findings(tables: dict[str, pd.DataFrame], failing: int | None = None) -> list[Finding]:
    """The worst first; none: nothing stands out. failing: rows of `still_failing`, where not all of them are there."""
    bad: list[Finding] = []
    warn: list[Finding] = []
    if "regressions" in tables:
        worse = tables["regressions"].query("verdict == 'worse'")
        for row in worse.head(_MOST).to_dict("records"):
            times = (
                "from none before"
                if not row["before"]
                else f"{row['after'] / row['before']:.1f} times as much as before"
            )
            bad.append(
                Finding("bad", f"{row['type']}: {row['measure']} is {measured(row, 'after')}, {times}", "regressions")
            )
        if len(worse) > _MOST:
            text = f"{len(worse) - _MOST:,} more measures are worse than before"
            bad.append(Finding("bad", text, "regressions"))
    still = tables["still_failing"]
    if len(still):
        worst = still.iloc[0]
        bad.append(
            Finding(
                "bad",
                f"{failing or len(still):,} jobs with a group were still failing, or held, at the end; for longest, "
                f"{duration(worst['seconds'])}, job {worst['job_id']} of {worst['group']} ({worst['origin']})"
                + (f": {worst['error_class']}" if isinstance(worst["error_class"], str) else ""),
                "blocked",
            )
        )
    for row in tables["blocked_by_error"].head(_MOST).to_dict("records"):
        what = row["error_class"] if isinstance(row["error_class"], str) else "the loss of an executor"
        text = (
            f"{row['type']}: {what} blocked {row['groups']:,} groups for {duration(row['blocked_seconds'])} together, "
            f"{duration(row['longest_seconds'])} at a time at most"
        )
        if row["longest_seconds"] > 600:
            bad.append(Finding("bad", text, "blocked"))
        else:
            warn.append(Finding("warn", text, "blocked"))
    of_types = _of_types(tables["types"])
    bad += [finding for finding in of_types if finding.level == "bad"]
    warn += [finding for finding in of_types if finding.level == "warn"]
    for row in tables["skew"].query("dimension != 'type'").to_dict("records"):
        if row["largest_over_median"] >= 20 and row["largest_share"] >= 0.1:
            text = (
                f"one {row['dimension']} has {row['largest_share']:.0%} of all attempts, "
                f"{row['largest_over_median']:,.0f} times the median"
            )
            warn.append(Finding("warn", text, "skew"))
    return bad + warn


def _of_types(types: pd.DataFrame) -> list[Finding]:
    """Of each kind the worst types, and how many more there are: a service may have hundreds."""
    discarded: list[tuple[float, str]] = []
    lost: list[tuple[float, str]] = []
    failed: list[tuple[float, str]] = []
    waited: list[tuple[float, str]] = []
    for row in types.to_dict("records"):
        if row["discarded"]:
            discarded.append((row["discarded"], f"{row['type']}: {row['discarded']:,} jobs were discarded"))
        if row["lost"]:
            lost.append((row["lost"], f"{row['type']}: {row['lost']:,} attempts were lost with their executors"))
        # A type with `history=False` has only what was discarded, followed, cancelled or lost, no share of anything.
        known = any(row[outcome] for outcome in ("succeeded", "retried", "snoozed", "held"))
        if known and row["error_rate"] >= 0.05:
            failed.append((row["error_rate"], f"{row['type']}: {row['error_rate']:.1%} of all attempts failed"))
        wait, run = row["wait_p95_seconds"], row["run_p95_seconds"]
        if pd.notna(wait) and wait > max(10 * run, 1.0):
            text = (
                f"{row['type']}: of 20 attempts one waited {duration(wait)} or longer, 19 ran {duration(run)} at most"
            )
            waited.append((wait, text))
    out: list[Finding] = []
    for level, section, kind in (
        ("bad", "errors", discarded), ("bad", "rates", failed), ("warn", "rates", lost), ("warn", "durations", waited)
    ):  # fmt: skip
        worst = sorted(kind, key=lambda each: -each[0])
        out += [Finding(level, text, section) for _, text in worst[:_MOST]]
        if len(worst) > _MOST:
            out.append(Finding(level, f"the same, less of it, of {len(worst) - _MOST:,} more types", section))
    return out


def measured(row: dict[Any, Any], column: str) -> str:
    """A value of the table of regressions, with its unit."""
    value = row[column]
    if pd.isna(value):
        return "–"
    return f"{value:.2%}" if row["measure"] == "error_rate" else duration(value)


def duration(seconds: float | None) -> str:
    """Short and readable: ``3.2 ms``, ``1.4 s``, ``12 min``, ``5.1 h``, ``3.0 days``."""
    if seconds is None or pd.isna(seconds):
        return "–"
    for limit, factor, unit in (
        (1e-3, 1e6, "µs"),
        (1, 1e3, "ms"),
        (120, 1, "s"),
        (7_200, 1 / 60, "min"),
        (172_800, 1 / 3_600, "h"),
    ):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 86_400:,.1f} days"
