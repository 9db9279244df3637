"""How figures are written, in every form of the report."""

from .results import Comparison, Report, VariantResult

__all__ = ["compared", "cpu", "figure", "held", "number", "others", "where"]


def where(report: Report) -> str:
    """The machine, the versions, the settings and the load before."""
    m = report.machine
    packages = ", ".join(f"{name} {version}" for name, version in m["packages"].items() if version)
    loop = f" ({m['python_loop_ms']} ms for a fixed loop)" if "python_loop_ms" in m else ""
    return (
        f"{m['cores']} × {m['cpu']}, {m['memory_gib']} GiB, {m['system']}; PostgreSQL {m['postgres']} "
        f"({', '.join(f'{k} {v}' for k, v in m['postgres_settings'].items())}), Python {m['python']}{loop}, "
        f"{packages}; "
        f"commit {m['commit']}; size {m.get('size', '?')}; load before the run "
        f"{', '.join(f'{x:.1f}' for x in m['load_before'])}; {m['when']}, {m.get('seconds', '?')} s"
    )


def number(value: float) -> str:
    """Three digits, or all of a large number."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def figure(variant: VariantResult, key: str) -> str:
    """Median, range and number of repetitions."""
    values = variant.values(key)
    return f"{number(variant.median(key) or 0.0)} ({number(min(values))}–{number(max(values))}, {len(values)})"


def compared(c: Comparison, *, label: bool = True) -> str:
    """A comparison's median, range and number of pairs."""
    middle, low, high = (f"{x:.2f}" if not c.unit else number(x) for x in (c.median or 0, min(c.values), max(c.values)))
    unit = f" {c.unit}" if c.unit and label and not c.label.endswith(c.unit) else ""
    return f"{f'{c.label}: ' if label else ''}{middle} ({low}–{high}, {len(c.values)}){unit}"


def held(c: Comparison) -> str:
    """The target and whether it is met; nothing without one."""
    if c.target is None:
        return ""
    return f"target {'≤' if c.at_most else '≥'} {c.target:g}: {'met' if c.met else 'MISSED'}"


def cpu(variant: VariantResult) -> str:
    """CPU for each job, client + Postgres."""
    client, postgres = variant.median("client_us"), variant.median("postgres_us")
    if client is None:
        return ""
    return f"{number(client)} + {number(postgres)} µs" if postgres is not None else f"{number(client)} µs (client)"


def others(variant: VariantResult) -> str:
    """How many cores other processes used meanwhile."""
    values = variant.values("foreign_cores")
    return f"{min(values):.1f}–{max(values):.1f}" if values else ""
