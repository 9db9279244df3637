"""The tables of an analysis as one page of HTML that needs nothing else."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (pyarrow has no annotations)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pyarrow.parquet as pq
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from .analysis import TABLES
from .findings import duration, findings, measured
from .plots import bars, lines
from .selection import Selection

__all__ = ["Facts", "report"]

_ROWS = 25  # of a table in the page; the Parquet tables have all
_LONG = ("blocked", "errors", "still_failing")


@dataclass(frozen=True)
class Facts:
    """What stands in the page's head. source: without secrets. compared: the earlier window."""

    source: str
    selection: Selection
    compared: Selection | None = None
    concurrency: int = 100
    utilisation: float = 0.7


def report(folder: Path, facts: Facts) -> str:
    """The page. folder: where `analyse` has put its tables."""
    names = [name for name in TABLES if (folder / f"{name}.parquet").exists()]
    # Of these there may be a million rows, with messages; what the page shows of them stands first.
    first = {name: _first(folder / f"{name}.parquet") for name in names if name in _LONG}
    tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in names if name not in _LONG}
    sizes = {name: len(table) for name, table in tables.items()} | {name: size for name, (_, size) in first.items()}
    tables |= {name: table for name, (table, _) in first.items()}
    for name in ("concurrency", "capacity"):
        tables[name]["type"] = tables[name]["type"].fillna("all types")
    environment = Environment(
        loader=PackageLoader(__package__ or "", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    filters = cast(dict[str, Any], environment.filters)
    filters |= {"duration": duration, "measured": measured, "count": _count, "percent": _percent}
    filters |= {"time": _time, "text": _text}
    heaviest = tables["heaviest"].query("dimension == 'group'").head(15)
    page = environment.get_template("report.html.j2").render(
        facts=facts,
        findings=findings(tables, sizes["still_failing"]),
        attempts=int(tables["types"]["attempts"].sum()),
        jobs=int(tables["throughput"]["jobs"].sum()),
        tables={name: table.head(_ROWS).to_dict("records") for name, table in tables.items()},
        sizes=sizes,
        plots={
            name: Markup(svg) for name, svg in _plots(tables, facts.selection).items()
        },  # matplotlib has escaped them
        groups=heaviest.to_dict("records"),
        origins=tables["heaviest"].query("dimension == 'origin'").head(15).to_dict("records"),
    )
    # Names and messages come from elsewhere: some of what is not printable reverses or hides what stands beside it.
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in page)


def _first(table: Path) -> tuple[pd.DataFrame, int]:
    """The first rows of a table, and how many it has."""
    (file,) = table.glob("*.parquet")
    with pq.ParquetFile(file) as opened:
        rows = next(opened.iter_batches(_ROWS), None)
        frame = opened.schema_arrow.empty_table().to_pandas() if rows is None else rows.to_pandas()
        return cast(pd.DataFrame, frame), cast(int, opened.metadata.num_rows)


def _plots(tables: dict[str, pd.DataFrame], selection: Selection) -> dict[str, str]:
    blocked = tables["blocked_by_error"].head(12)
    classes = blocked["error_class"].fillna("lost executor")
    times = pd.to_datetime(range(selection.first_bucket_us, selection.until_us, selection.step_us), unit="us", utc=True)

    def plot(table: str, column: str, unit: str, *, log: bool = False, missing: float | None = None) -> str:
        return lines(tables[table], "bucket", column, "type", unit, times, log=log, missing=missing)

    return {
        "throughput": plot("throughput", "jobs_per_second", "jobs/s", missing=0.0),
        "errors": plot("rates", "error_rate", "share that failed"),
        "wait": plot("durations", "wait_p95_seconds", "seconds", log=True),
        "run": plot("durations", "run_p95_seconds", "seconds", log=True),
        "concurrency": plot("concurrency", "mean_running", "attempts at once"),
        "blocked": bars(
            [f"{t}: {c}" for t, c in zip(blocked["type"], classes, strict=True)],
            list(blocked["blocked_seconds"] / 3_600),
        ),
    }


def _count(value: Any) -> str:
    return "–" if pd.isna(value) else f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3g}"


def _percent(value: Any) -> str:
    return "–" if pd.isna(value) else f"{value:.2%}"


def _time(value: Any) -> str:
    return "–" if pd.isna(value) else f"{value:%Y-%m-%d %H:%M:%S}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "–"
