"""Results as a table for the terminal, as tables in Markdown, and as one self-contained HTML page (`page`)."""

from pathlib import Path

from .page import html
from .results import UNITS, Comparison, Report, ScenarioResult, VariantResult
from .wording import compared, cpu, figure, held, number, others, where

__all__ = ["html", "markdown", "put_into", "text"]

_HIDDEN = ("load", "foreign_cores")


def text(report: Report) -> str:
    """Plain text: per scenario its variants with medians and spread, then how they compare."""
    lines = [where(report), ""]
    for scenario in report.scenarios:
        lines += [f"{scenario.name}: {scenario.title}"]
        width = max((len(v.name) for v in scenario.variants), default=0)
        lines += [f"  {variant.name:<{width}}  {_summary(scenario, variant)}" for variant in scenario.variants]
        lines += [f"  {compared(c)}{'; ' if c.target is not None else ''}{held(c)}" for c in scenario.comparisons]
        lines.append("")
    return "\n".join(lines)


def _summary(scenario: ScenarioResult, variant: VariantResult) -> str:
    if not variant.runs:
        return _why(variant)
    keys = [scenario.key, *(k for k in variant.runs[0] if k != scenario.key and k not in _HIDDEN)]
    figures = [f"{_spread(variant, k)} {UNITS.get(k, k)}" for k in keys if k in variant.runs[0]]
    return (
        ", ".join(figures)
        + f"; others used {others(variant)} cores"
        + (f"; {_why(variant)}" if variant.skipped else "")
    )


def _why(variant: VariantResult) -> str:
    return f"{'failed' if variant.failed else 'skipped'}: {variant.skipped}" if variant.skipped else "not run"


def _spread(variant: VariantResult, key: str) -> str:
    if key in ("rate", "messages") or key.endswith("_ms"):
        return figure(variant, key)
    return number(variant.median(key) or 0.0)


# -- Markdown ----------------------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- results: made by `python -m benchmarks report` -->", "<!-- end of results -->"


def put_into(file: Path, report: Report) -> None:
    """Replace what stands between the two marks of a file by the tables. Raises `ValueError` where it has no marks."""
    before, begin, rest = file.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{file} has no lines {_BEGIN!r} and {_END!r}: put them where the tables belong")
    file.write_text(f"{before}{_BEGIN}\n\n{markdown(report)}\n{_END}{after}")


def markdown(report: Report) -> str:
    """A table of the targets, and one of everything that was measured."""
    lines = [where(report) + ".", "", "**Targets.** CPU: µs for each job, client + Postgres.", ""]
    lines += [
        "| scenario | compared | median (range, pairs) | CPU | against | target | |",
        "|---|---|---|---|---|---|---|",
    ]
    for scenario in report.scenarios:
        lines += [_target_row(scenario, c) for c in scenario.comparisons if c.target is not None]
    lines += ["", "**All ratios.** CPU: how much more or less of it the first of the two takes for each job.", ""]
    lines += ["| scenario | compared | median (range, pairs) | CPU |", "|---|---|---|---|"]
    for scenario in report.scenarios:
        lines += [_ratio_row(scenario, c) for c in scenario.comparisons if c.to is not None]
    lines += ["", "**All figures**: median (range, repetitions).", ""]
    lines += ["| scenario | variant | figure | CPU: client + Postgres | WAL, bytes | others used, cores |"]
    lines += ["|---|---|---|---|---|---|"]
    for scenario in report.scenarios:
        lines += [_variant_row(scenario, variant) for variant in scenario.variants]
    return "\n".join(lines) + "\n"


def _target_row(scenario: ScenarioResult, c: Comparison) -> str:
    of, to = _sides(scenario, c)
    against = "" if to is None else f"{cpu(to)}"
    sign = "≤" if c.at_most else "≥"
    verdict = "met" if c.met else "**missed**"
    return (f"| {scenario.name} | {c.label} | {compared(c, label=False)} | {'' if of is None else cpu(of)} | {against} "
            f"| {sign} {c.target:g} | {verdict} |")  # fmt: skip


def _sides(scenario: ScenarioResult, c: Comparison) -> tuple[VariantResult | None, VariantResult | None]:
    of, to = scenario.variant(c.of), scenario.variant(c.to)
    return (to, of) if c.times else (of, to)  # as the label names them


def _ratio_row(scenario: ScenarioResult, c: Comparison) -> str:
    of, to = _sides(scenario, c)
    ratio = "" if of is None or to is None or not of.cpu_us or not to.cpu_us else f"{of.cpu_us / to.cpu_us:.2f} ×"
    return f"| {scenario.name} | {c.label} | {compared(c, label=False)} | {ratio} |"


def _variant_row(scenario: ScenarioResult, variant: VariantResult) -> str:
    start = f"| {scenario.name} | {variant.name} |"
    if not variant.runs:
        return f"{start} {_why(variant).splitlines()[0]} | | | |"
    keys = [scenario.key] if variant.values(scenario.key) else []
    keys += [
        k for k in variant.runs[0] if (k not in keys and k.endswith(("_ms", "percent"))) or k in ("us", "statements")
    ]
    shown = "; ".join(f"{figure(variant, k)} {UNITS.get(k, k)}" for k in keys)
    wal = variant.median("wal_bytes")
    return f"{start} {shown} | {cpu(variant)} | {'' if wal is None else number(wal)} | {others(variant)} |"
