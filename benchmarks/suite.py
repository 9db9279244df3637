"""Scenarios: named, each with variants that take turns, so that a machine that slows down slows all of them."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .meter import Meter, foreign_cores
from .results import Figures, Ratio, ScenarioResult, VariantResult
from .server import Server

__all__ = ["SCENARIOS", "Bench", "Compare", "Scenario", "Size", "Skip", "Variant", "run", "scenario"]

log = logging.getLogger("benchmarks")

QUIET_SECONDS = 20.0  # how long to wait, at most, for other work to let go of the machine


class Skip(Exception):
    """A variant cannot run here; the text says why."""


@dataclass(frozen=True)
class Size:
    """How much to do. scale: of the number of jobs; 1 is the normal run."""

    name: str
    scale: float
    repetitions: int
    long: bool = False

    def jobs(self, normal: int, least: int = 200) -> int:
        """So many jobs at this size."""
        return max(least, int(normal * self.scale))


SIZES = {
    "tiny": Size("tiny", 0.01, 1),
    "short": Size("short", 0.5, 2),
    "normal": Size("normal", 1.0, 5),
    "long": Size("long", 1.0, 5, long=True),
}


@dataclass
class Bench:
    """What a repetition gets: the server, a meter over it, the size."""

    server: Server
    size: Size
    meter: Meter


@dataclass(frozen=True)
class Variant:
    """One way of doing a scenario's work. `once` does it once and returns what was measured."""

    name: str
    once: Callable[[Bench], Awaitable[Figures]]
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    repetitions: int | None = None  # fewer than the others', for slow ones


@dataclass(frozen=True)
class Compare:
    """`of` against `to`, by the figure `key` (default: the scenario's), with the target of the design's section 7."""

    of: str
    to: str
    target: float | None = None
    at_most: bool = False
    key: str | None = None
    to_key: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Scenario:
    """A scenario; `variants` is asked at run time, with the size."""

    name: str
    title: str
    variants: Callable[[Size], Sequence[Variant]]
    compare: Sequence[Compare]
    key: str
    note: str
    long_only: bool
    peers: bool
    kafka: bool


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str,
    title: str,
    *,
    compare: Sequence[Compare] = (),
    key: str = "rate",
    note: str = "",
    long_only: bool = False,
    peers: bool = False,
    kafka: bool = False,
) -> Callable[[Callable[[Size], Sequence[Variant]]], Callable[[Size], Sequence[Variant]]]:
    """Declare the decorated function's variants as a scenario. peers: it runs other projects' queues; kafka: it
    starts a broker."""

    def declare(variants: Callable[[Size], Sequence[Variant]]) -> Callable[[Size], Sequence[Variant]]:
        SCENARIOS[name] = Scenario(name, title, variants, compare, key, note, long_only, peers, kafka)
        return variants

    return declare


async def run(chosen: Scenario, server: Server, size: Size, *, only: Sequence[str] = ()) -> ScenarioResult:
    """All repetitions of a scenario, its variants taking turns. only: names of variants; default all."""
    result = ScenarioResult(chosen.name, chosen.title, chosen.key, chosen.note)
    variants = [v for v in chosen.variants(size) if not only or v.name in only]
    result.variants = [VariantResult(v.name, dict(v.settings)) for v in variants]
    for repetition in range(size.repetitions):
        for variant, into in zip(variants, result.variants, strict=True):
            if into.skipped or repetition >= (variant.repetitions or size.repetitions):
                continue
            if size.name != "tiny":
                await _quiet(QUIET_SECONDS if size.name != "short" else QUIET_SECONDS / 8)
            load, others, began = os.getloadavg()[0], foreign_cores(server), time.monotonic()
            try:
                figures = await variant.once(Bench(server, size, Meter(server)))
            except Skip as reason:
                into.skipped = str(reason)
                log.info("%s / %s: skipped: %s", chosen.name, variant.name, reason)
                continue
            figures["load"] = load
            figures["foreign_cores"] = others()
            into.runs.append(figures)
            log.info("%s / %s #%s: %s (%.1f s)", chosen.name, variant.name, repetition + 1,
                     ", ".join(f"{k} {v:,.4g}" for k, v in figures.items()), time.monotonic() - began)  # fmt: skip
    result.ratios = [r for c in chosen.compare if (r := _ratio(result, c)) is not None]
    return result


def _ratio(result: ScenarioResult, compare: Compare) -> Ratio | None:
    of, to = result.variant(compare.of), result.variant(compare.to)
    if of is None or to is None:
        return None
    key = compare.key or result.key
    over, under = of.values(key), to.values(compare.to_key or key)
    if not over or not under:
        return None
    if len(over) != len(under):  # one of them ran less often: against its last
        under = [under[min(i, len(under) - 1)] for i in range(len(over))]
    label = compare.label or f"{compare.of} / {compare.to}" + (f" ({key})" if compare.key else "")
    return Ratio(label, [a / b for a, b in zip(over, under, strict=True) if b], compare.target, compare.at_most)


async def _quiet(patience: float) -> None:
    """Wait a little when the machine is busy with something else; how busy it was stands beside each result."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        busy = foreign_cores(None)
        await asyncio.sleep(0.5)
        if busy() < 0.3 * (os.cpu_count() or 1):
            return
