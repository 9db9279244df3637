"""The report as one HTML page with everything in it: no scripts, no files beside it."""

import math
from html import escape

from .results import UNITS, Comparison, Report, ScenarioResult, VariantResult
from .wording import compared, cpu, figure, held, number, others, where

__all__ = ["html"]

_LEGEND = (
    "Bars are medians, whiskers the smallest and the largest repetition. Beside each rate stands the CPU for each job, "
    "the steadiest figure on a machine that others use too. Ratios are medians of pairs of repetitions that ran next "
    "to each other, on a logarithmic scale; the hollow tick is the target."
)
_STYLE = """
:root { --text: #1b1f24; --soft: #57606a; --line: #d8dee4; --back: #fff; --own: #0969da; --floor: #8c959f;
        --peer: #d4a72c; --client: #8250df; --server: #2da44e; --met: #116329; --missed: #a40e26 }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9198a1; --line: #30363d; --back: #0d1117;
        --own: #4493f8; --floor: #9198a1; --client: #ab7df8; --server: #3fb950; --met: #3fb950; --missed: #f85149 } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 66rem; padding: 0 1rem; color: var(--text);
       background: var(--back) }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.4rem;
     border-top: 1px solid var(--line); padding-top: 1rem }
p.note, p.where { color: var(--soft); max-width: 52rem } p.where { font-size: 13px }
table { border-collapse: collapse; margin: .6rem 0; font-size: 13px }
th, td { text-align: right; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th:first-child, td:first-child, td.text, th.text { text-align: left } th { font-weight: 600; color: var(--soft) }
.met { color: var(--met) } .missed { color: var(--missed); font-weight: 600 } small { color: var(--soft) }
svg { display: block; width: 100%; height: auto; margin: .4rem 0 } summary { cursor: pointer; color: var(--soft) }
svg text { font: 12px system-ui, sans-serif; fill: var(--text) } svg .soft { fill: var(--soft) }
.own { fill: var(--own) } .floor { fill: var(--floor) } .peer { fill: var(--peer) }
.client { fill: var(--client) } .server { fill: var(--server) }
.whisker { stroke: var(--text); stroke-width: 1.2 } .axis { stroke: var(--line); stroke-width: 1 }
circle.missed { fill: var(--missed) }
.target { fill: none; stroke: var(--missed); stroke-width: 1.6 } a { color: var(--own) }
"""

_WIDTH, _NAMES, _STEP, _HEAD = 1_000, 250, 24, 22
_BARS, _CPU_LEFT, _CPU = 330, 700, 200  # widths of the two plots, and where the second begins


def html(report: Report) -> str:
    """The page of a report."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'><title>Sidings: benchmarks</title>",
        f"<style>{_STYLE}</style><h1>Sidings: benchmarks</h1><p class='where'>{escape(where(report))}</p>",
        f"<p class='note'>{_LEGEND}</p>",
        _targets(report),
    ]
    for scenario in report.scenarios:
        parts += [
            f"<h2 id='{escape(scenario.name)}'>{escape(scenario.title)}</h2>",
            f"<p class='note'>{escape(scenario.note)}</p>",
            _figures(scenario),
            _ratios([c for c in scenario.comparisons if c.to is not None]),
            _table(scenario),
        ]
    return "\n".join(parts) + "\n</html>\n"


def _targets(report: Report) -> str:
    rows = [
        f"<tr><td>{escape(s.title)}</td><td class='text'>{escape(c.label)}</td>"
        f"<td>{escape(compared(c, label=False))}</td><td>{'≤' if c.at_most else '≥'} {c.target:g}</td>"
        f"<td class='text {'met' if c.met else 'missed'}'>{'met' if c.met else 'missed'}</td></tr>"
        for s in report.scenarios
        for c in s.comparisons
        if c.target is not None
    ]
    head = (
        "<tr><th>targets</th><th class='text'>compared</th><th>median (range, pairs)</th><th>target</th><th></th></tr>"
    )
    return f"<table>{head}{''.join(rows)}</table>" if rows else ""


def _svg(height: float, label: str, parts: list[str]) -> str:
    return f"<svg viewBox='0 0 {_WIDTH} {height:.0f}' role='img' aria-label='{escape(label)}'>{''.join(parts)}</svg>"


def _text(x: float, y: float, words: str, *, end: bool = False, soft: bool = False) -> str:
    anchor, kind = " text-anchor='end'" if end else "", " class='soft'" if soft else ""
    return f"<text x='{x:.1f}' y='{y:.1f}'{anchor}{kind}>{escape(words)}</text>"


def _figures(scenario: ScenarioResult) -> str:
    """Bars of the figure that the scenario is about and, on the right, of the CPU for each job."""
    rows = [v for v in scenario.variants if v.values(scenario.key)]
    if not rows:
        return ""
    top = max(max(v.values(scenario.key)) for v in rows) or 1.0
    most_cpu = max((v.cpu_us or 0.0 for v in rows), default=0.0)
    parts = [_text(_NAMES, 13, UNITS.get(scenario.key, scenario.key), soft=True)]
    if most_cpu:
        parts += [
            f"<rect class='client' x='{_CPU_LEFT}' y='4' width='10' height='10'/>",
            _text(_CPU_LEFT + 14, 13, "client", soft=True),
            f"<rect class='server' x='{_CPU_LEFT + 60}' y='4' width='10' height='10'/>",
            _text(_CPU_LEFT + 74, 13, "Postgres: µs CPU each", soft=True),
        ]
    for place, variant in enumerate(rows):
        y = _HEAD + place * _STEP
        parts.append(_text(_NAMES - 8, y + 13, variant.name, end=True))
        parts.append(_bar(variant, scenario.key, y, _BARS / top))
        if most_cpu and variant.cpu_us:
            parts.append(_cpu_bar(variant, y, _CPU / most_cpu))
    return _svg(_HEAD + _STEP * len(rows) + 4, scenario.title, parts)


def _bar(variant: VariantResult, key: str, y: float, scale: float) -> str:
    middle, values = variant.median(key) or 0.0, variant.values(key)
    kind = "floor" if "floor" in variant.name else "own" if variant.name.startswith("sidings") else "peer"
    low, high = _NAMES + scale * min(values), _NAMES + scale * max(values)
    return (
        f"<rect class='{kind}' x='{_NAMES}' y='{y}' width='{max(1.0, scale * middle):.1f}' height='17' rx='2'/>"
        f"<line class='whisker' x1='{low:.1f}' x2='{high:.1f}' y1='{y + 8.5}' y2='{y + 8.5}'/>"
    ) + _text(max(high, _NAMES + scale * middle) + 6, y + 13, number(middle))


def _cpu_bar(variant: VariantResult, y: float, scale: float) -> str:
    client = scale * (variant.median("client_us") or 0.0)
    server = scale * (variant.median("postgres_us") or 0.0)
    return (
        f"<rect class='client' x='{_CPU_LEFT}' y='{y}' width='{client:.1f}' height='17'/>"
        f"<rect class='server' x='{_CPU_LEFT + client:.1f}' y='{y}' width='{server:.1f}' height='17'/>"
    ) + _text(_CPU_LEFT + client + server + 6, y + 13, cpu(variant).removesuffix(" µs"))


def _ratios(comparisons: list[Comparison]) -> str:
    """Dots on a logarithmic scale, with the target as a tick."""
    shown = [c for c in comparisons if c.values and min(c.values) > 0]
    if not shown:
        return ""
    ends = [x for c in shown for x in (*c.values, c.target or 1.0)]
    low, high = math.log10(min(0.5, *ends)), math.log10(max(2.0, *ends))
    left, width = 340, 300

    def at(value: float) -> float:
        return left + width * (math.log10(value) - low) / (high - low)

    bottom = _HEAD + _STEP * len(shown)
    parts = [_text(left, 13, "ratio", soft=True)]
    for mark in (0.01, 0.1, 0.5, 1, 2, 5, 10, 100, 1_000):
        if low <= math.log10(mark) <= high:
            parts.append(f"<line class='axis' x1='{at(mark):.1f}' x2='{at(mark):.1f}' y1='{_HEAD}' y2='{bottom}'/>")
            parts.append(
                f"<text class='soft' x='{at(mark):.1f}' y='{bottom + 13}' text-anchor='middle'>{mark:g}</text>"
            )
    for place, c in enumerate(shown):
        y = _HEAD + place * _STEP + 9.0
        kind = "own" if c.met is None or c.met else "missed"
        parts.append(_text(left - 12, y + 4, c.label, end=True))
        parts.append(
            f"<line class='whisker' x1='{at(min(c.values)):.1f}' x2='{at(max(c.values)):.1f}' y1='{y}' y2='{y}'/>"
        )
        if c.target is not None:
            parts.append(f"<rect class='target' x='{at(c.target) - 2:.1f}' y='{y - 8}' width='4' height='16'/>")
        parts.append(f"<circle class='{kind}' cx='{at(c.median or 1.0):.1f}' cy='{y}' r='4.5'/>")
        parts.append(_text(left + width + 20, y + 4, compared(c, label=False) + (f"; {held(c)}" if held(c) else "")))
    return _svg(bottom + 18, "ratios", parts)


def _table(scenario: ScenarioResult) -> str:
    """Everything that was measured, with settings, and why something was not."""
    keys: dict[str, None] = {}
    for variant in scenario.variants:
        for run in variant.runs:
            keys.update(dict.fromkeys(k for k in run if k != "foreign_cores"))
    head = "".join(f"<th>{escape(UNITS.get(k, k))}</th>" for k in keys)
    rows = "".join(_row(variant, list(keys)) for variant in scenario.variants)
    return (
        "<details><summary>figures: medians (range, repetitions), settings</summary>"
        f"<table><tr><th></th>{head}<th>cores that others used</th></tr>{rows}</table></details>"
    )


def _row(variant: VariantResult, keys: list[str]) -> str:
    settings = escape(", ".join(f"{k}: {v}" for k, v in variant.settings.items()))
    name = f"<td>{escape(variant.name)}<br><small>{settings}</small></td>"
    why = f"{'failed' if variant.failed else 'skipped'}: {escape(variant.skipped)}" if variant.skipped else ""
    if not variant.runs:
        return f"<tr>{name}<td class='text' colspan='{len(keys) + 1}'>{why or 'not run'}</td></tr>"
    cells = "".join(f"<td>{escape(figure(variant, k)) if variant.values(k) else ''}</td>" for k in keys)
    return f"<tr>{name}{cells}<td>{others(variant)} {why}</td></tr>"
