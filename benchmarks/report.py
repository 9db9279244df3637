"""Results as a table for the terminal and as one self-contained HTML page."""

from html import escape

from .results import UNITS, Ratio, Report, ScenarioResult, VariantResult

__all__ = ["html", "text"]

_HIDDEN = ("load", "foreign_cores")


def text(report: Report) -> str:
    """Plain text: per scenario its variants with medians and spread, then the ratios."""
    lines = [_where(report), ""]
    for scenario in report.scenarios:
        lines += [f"{scenario.name}: {scenario.title}"]
        for variant in scenario.variants:
            lines.append(f"  {variant.name:<28} {_summary(scenario, variant)}")
        lines += [f"  ratio {_ratio(ratio)}" for ratio in scenario.ratios]
        lines.append("")
    return "\n".join(lines)


def _where(report: Report) -> str:
    m = report.machine
    return (
        f"{m['cores']} × {m['cpu']}, {m['memory_gib']} GiB, {m['system']}; PostgreSQL {m['postgres']} "
        f"({', '.join(f'{k} {v}' for k, v in m['postgres_settings'].items())}), Python {m['python']}; "
        f"commit {m['commit']}; load before the run {', '.join(f'{x:.1f}' for x in m['load_before'])}; {m['when']}"
    )


def _summary(scenario: ScenarioResult, variant: VariantResult) -> str:
    if variant.skipped:
        return f"skipped: {variant.skipped}"
    if not variant.runs:
        return "not run"
    keys = [scenario.key, *(k for k in variant.runs[0] if k != scenario.key and k not in _HIDDEN)]
    return ", ".join(f"{_figure(variant, k)} {UNITS.get(k, k)}" for k in keys if k in variant.runs[0]) + _noise(variant)


def _figure(variant: VariantResult, key: str) -> str:
    values = variant.values(key)
    middle = _number(variant.median(key) or 0.0)
    if key != "rate" and key[-3:] != "_ms":
        return middle
    return f"{middle} ({_number(min(values))}–{_number(max(values))}, {len(values)})"


def _noise(variant: VariantResult) -> str:
    others = variant.values("foreign_cores")
    return f"; others used {min(others):.1f}–{max(others):.1f} cores" if others else ""


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _ratio(ratio: Ratio) -> str:
    target = ""
    if ratio.target is not None:
        sign = "≤" if ratio.at_most else "≥"
        target = f"; target {sign} {ratio.target:g}: {'met' if ratio.met else 'MISSED'}"
    values = ratio.values
    return f"{ratio.label}: {ratio.median or 0:.2f} ({min(values):.2f}–{max(values):.2f}, {len(values)}){target}"


_LEGEND = (
    "Bars are medians, whiskers the smallest and the largest repetition. Ratios are medians of pairs of repetitions "
    "that ran next to each other."
)
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1b1f24;
       background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-top: 1px solid #d8dee4; padding-top: 1rem }
p.note, p.where { color: #57606a } table { border-collapse: collapse; margin: .6rem 0; font-size: 13px }
th, td { text-align: right; padding: .15rem .7rem .15rem 0; border-bottom: 1px solid #eaeef2 }
th:first-child, td:first-child { text-align: left } .met { color: #116329 } .missed { color: #a40e26; font-weight: 600 }
svg text { font: 12px system-ui, sans-serif; fill: #1b1f24 } .own { fill: #0969da } .floor { fill: #8c959f }
.peer { fill: #d4a72c } .whisker { stroke: #1b1f24; stroke-width: 1.2 }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; color: #e6edf3 } svg text { fill: #e6edf3 } .whisker { stroke: #e6edf3 }
  p.note, p.where { color: #9198a1 } th, td { border-color: #30363d } h2 { border-color: #30363d }
  .met { color: #3fb950 } .missed { color: #f85149 } }
"""


def html(report: Report) -> str:
    """One page with everything in it: no scripts, no files beside it."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'><title>Sidings: benchmarks</title>",
        f"<style>{_STYLE}</style><h1>Sidings: benchmarks</h1><p class='where'>{escape(_where(report))}</p>",
        f"<p class='note'>{_LEGEND}</p>",
    ]
    for scenario in report.scenarios:
        parts.append(f"<h2 id='{escape(scenario.name)}'>{escape(scenario.title)}</h2>")
        parts.append(f"<p class='note'>{escape(scenario.note)}</p>")
        parts.append(_bars(scenario))
        parts.append(_table(scenario))
        if scenario.ratios:
            items = "".join(
                f"<li class='{'' if r.met is None else 'met' if r.met else 'missed'}'>{escape(_ratio(r))}</li>"
                for r in scenario.ratios
            )
            parts.append(f"<ul>{items}</ul>")
    return "\n".join(parts) + "\n</html>\n"


def _bars(scenario: ScenarioResult) -> str:
    rows = [v for v in scenario.variants if v.values(scenario.key)]
    if not rows:
        return ""
    top = max(max(v.values(scenario.key)) for v in rows) or 1.0
    left, width, step = 190, 480, 24
    height = step * len(rows) + 8
    out = [f"<svg width='{left + width + 130}' height='{height}' role='img' aria-label='{escape(scenario.title)}'>"]
    for number, variant in enumerate(rows):
        values, y = variant.values(scenario.key), number * step + 4
        middle = variant.median(scenario.key) or 0.0
        kind = "own" if variant.name.startswith("sidings") else "floor" if "floor" in variant.name else "peer"
        low, high = (left + width * x / top for x in (min(values), max(values)))
        out.append(
            f"<text x='{left - 8}' y='{y + 13}' text-anchor='end'>{escape(variant.name)}</text>"
            f"<rect class='{kind}' x='{left}' y='{y}' width='{max(1.0, width * middle / top):.1f}' height='17' rx='2'/>"
            f"<line class='whisker' x1='{low:.1f}' x2='{high:.1f}' y1='{y + 8.5}' y2='{y + 8.5}'/>"
            f"<text x='{max(high, left + width * middle / top) + 8:.1f}' y='{y + 13}'>{_number(middle)} "
            f"{escape(UNITS.get(scenario.key, scenario.key))}</text>"
        )
    return "".join(out) + "</svg>"


def _table(scenario: ScenarioResult) -> str:
    keys: dict[str, None] = {}
    for variant in scenario.variants:
        for run in variant.runs:
            keys.update(dict.fromkeys(run))
    head = "".join(f"<th>{escape(UNITS.get(k, k))}</th>" for k in keys)
    body: list[str] = []
    for variant in scenario.variants:
        settings = escape(", ".join(f"{k}: {v}" for k, v in variant.settings.items()))
        name = f"<td title='{settings}'>{escape(variant.name)}</td>"
        if variant.skipped:
            body.append(f"<tr>{name}<td colspan='{len(keys)}'>skipped: {escape(variant.skipped)}</td></tr>")
            continue
        cells = "".join(f"<td>{_number(m) if (m := variant.median(k)) is not None else ''}</td>" for k in keys)
        body.append(f"<tr>{name}{cells}</tr>")
        if settings:
            body[-1] += f"<tr><td colspan='{len(keys) + 1}'><small>{settings}</small></td></tr>"
    return f"<table><tr><th></th>{head}</tr>{''.join(body)}</table>"
