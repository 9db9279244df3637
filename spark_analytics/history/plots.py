"""Plots of a report, as SVG that stands in the page: no colour of their own for text and lines, so that a dark page
shows them as well as a light one."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportAttributeAccessIssue=false
# (pandas and matplotlib are partly annotated)
import io
import re
import warnings
from typing import Any

import matplotlib as mpl
import pandas as pd
from cycler import cycler
from matplotlib import dates
from matplotlib.figure import Figure

__all__ = ["bars", "lines"]

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")
_INK = "#123456"  # stands for the page's own colour of text
_MOST = 8  # series in one plot

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "sidings", "font.size": 9, "font.family": "sans-serif",
    "text.color": _INK, "axes.edgecolor": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": _INK, "grid.alpha": 0.15,
    "axes.prop_cycle": cycler(color=_COLOURS), "legend.frameon": False, "text.parse_math": False,
}  # fmt: skip


def lines(
    table: pd.DataFrame,
    x: str,
    y: str,
    series: str,
    unit: str,
    times: pd.DatetimeIndex,
    *,
    log: bool = False,
    missing: float | None = None,
) -> str:
    """A line for each value of `series` (at most eight: those with the largest sums) over the `times`. missing: what it
    is at times that the table does not have in `x`; None: nothing is drawn there."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 2.8), layout="constrained")
        axes = figure.subplots()
        wide = table.pivot_table(index=x, columns=series, values=y, aggfunc="sum", sort=True).reindex(times)
        wide = wide if missing is None else wide.fillna(missing)
        names = wide.sum().sort_values(ascending=False).index[:_MOST]
        for name in names:
            label = _short(f" {name}" if str(name).startswith("_") else str(name))  # those with _ get no legend
            axes.plot(times.to_pydatetime(), wide[name], label=label, linewidth=1.4, marker=".", markersize=3)
        if log and (wide > 0).any(axis=None):  # nothing at all, or no time at all, has no logarithm
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel(unit)
        locator = dates.AutoDateLocator()
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
        if len(names):
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
        return _svg(figure)


def bars(names: list[str], hours: list[float]) -> str:
    """A horizontal bar for each name, the first on top."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 0.6 + 0.27 * max(1, len(names))), layout="constrained")
        axes = figure.subplots()
        axes.barh(range(len(names)), hours, color=_COLOURS[0])
        axes.set_yticks(range(len(names)), [_short(name) for name in names])
        axes.invert_yaxis()
        axes.set_xlabel("hours")
        return _svg(figure)


def _short(text: str) -> str:
    return text if len(text) <= 32 else text[:31] + "…"


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # fonts of this machine do not matter: the page's reader has others
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
