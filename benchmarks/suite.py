"""Scenarios: named, each with variants that take turns, so that a machine that slows down slows all of them."""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from sidings.devstack import DevstackError

from .meter import Meter, foreign_cores
from .results import UNITS, Comparison, Figures, ScenarioResult, VariantResult
from .server import Server, running_kafka

__all__ = ["SCENARIOS", "Bench", "Compare", "Scenario", "Size", "Skip", "Variant", "run", "scenario"]

log = logging.getLogger("benchmarks")

QUIET_SECONDS = 20.0  # how long to wait, at most, for other work to let go of the machine


class Skip(Exception):
    """A variant cannot run here; the text says why."""


@dataclass(frozen=True)
class Size:
    """How much to do. scale: of the number of jobs; 1 is the normal run. patience: seconds that one repetition of one
    variant may take. seconds: no further repetition begins that would end after so long."""

    name: str
    scale: float
    repetitions: int
    patience: float = 900.0
    seconds: float | None = None
    long: bool = False

    def jobs(self, normal: int, least: int = 200) -> int:
        """So many jobs at this size."""
        return max(least, int(normal * self.scale))


SIZES = {
    "tiny": Size("tiny", 0.01, 1, patience=120.0),
    "short": Size("short", 0.4, 3, patience=180.0, seconds=480.0),
    "normal": Size("normal", 1.0, 5),
    "long": Size("long", 1.0, 5, patience=3_600.0, long=True),
}


@dataclass
class Bench:
    """What a repetition gets: the server, the size, a meter over the server; in scenarios that need a Kafka, its
    bootstrap servers."""

    server: Server
    size: Size
    meter: Meter
    kafka: str | None = None


@dataclass(frozen=True)
class Variant:
    """One way of doing a scenario's work. `once` does it once and returns what was measured."""

    name: str
    once: Callable[[Bench], Awaitable[Figures]]
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    repetitions: int | None = None  # fewer than the others', for slow ones


@dataclass(frozen=True)
class Compare:
    """The figure `key` (default: the scenario's) of the variant `of`, against that of `to` or, without, by itself; with
    the target of the design's section 7. times: the two are rates, and what is told is how the times compare, which is
    the same turned round: the time of `to` against that of `of`."""

    of: str
    to: str | None = None
    target: float | None = None
    at_most: bool = False
    key: str | None = None
    label: str | None = None
    times: bool = False


@dataclass(frozen=True)
class Scenario:
    """A scenario; `variants` is asked at run time, with the size."""

    name: str
    title: str
    variants: Callable[[Size], Sequence[Variant]]
    compare: Sequence[Compare]
    key: str
    note: str
    kafka: bool
    spark: bool


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str,
    title: str,
    *,
    compare: Sequence[Compare] = (),
    key: str = "rate",
    note: str = "",
    kafka: bool = False,
    spark: bool = False,
) -> Callable[[Callable[[Size], Sequence[Variant]]], Callable[[Size], Sequence[Variant]]]:
    """Declare the decorated function's variants as a scenario. kafka: it needs a broker, which `Bench.kafka` is then;
    spark: it takes minutes, so that it is left out of short runs that do not name it."""

    def declare(variants: Callable[[Size], Sequence[Variant]]) -> Callable[[Size], Sequence[Variant]]:
        SCENARIOS[name] = Scenario(name, title, variants, compare, key, note, kafka, spark)
        return variants

    return declare


async def run(
    picked: Sequence[Scenario],
    server: Server,
    size: Size,
    *,
    only: Sequence[str] = (),
    saved: Callable[[list[ScenarioResult]], None] = lambda _: None,
) -> list[ScenarioResult]:
    """All repetitions: every scenario once, then every scenario again. only: names of variants; default all. saved:
    gets what is there after each scenario, so that an interrupted run has not been for nothing."""
    turns = [_Turns(chosen, server, size, only) for chosen in picked]
    results, began = [turn.result for turn in turns], time.monotonic()
    for repetition in range(size.repetitions):
        for turn in turns:
            if repetition and size.seconds and time.monotonic() - began + turn.seconds > size.seconds:
                log.info("%s: no time is left for repetition %s", turn.result.name, repetition + 1)
                continue
            await turn.take(repetition)
            saved(results)
    return results


class _Turns:
    """The repetitions of one scenario, its variants taking turns in each."""

    def __init__(self, chosen: Scenario, server: Server, size: Size, only: Sequence[str]) -> None:
        self.result = ScenarioResult(chosen.name, chosen.title, chosen.key, chosen.note)
        self.seconds = 0.0  # that its last repetition took
        self._chosen = chosen
        self._server = server
        self._size = size
        self._variants = [v for v in chosen.variants(size) if not only or v.name in only]
        self.result.variants = [VariantResult(v.name, dict(v.settings)) for v in self._variants]

    async def take(self, repetition: int) -> None:
        """Run each variant once."""
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            try:
                kafka = await stack.enter_async_context(running_kafka()) if self._chosen.kafka else None
            except DevstackError as error:
                log.info("%s: skipped: %s", self._chosen.name, error)
                for into in self.result.variants:
                    into.skipped = str(error)
                return
            for variant, into in zip(self._variants, self.result.variants, strict=True):
                if not into.skipped and repetition < (variant.repetitions or self._size.repetitions):
                    await self._once(variant, into, kafka)
        self.seconds = time.monotonic() - began
        self.result.comparisons = [c for c in (_compared(self.result, c) for c in self._chosen.compare) if c]

    async def _once(self, variant: Variant, into: VariantResult, kafka: str | None) -> None:
        size, server, what = self._size, self._server, f"{self._chosen.name} / {variant.name}"
        if size.name != "tiny":
            await _quiet(QUIET_SECONDS if size.name != "short" else QUIET_SECONDS / 20)
        gc.collect()  # what the last one has left behind is none of this one's business
        load, others, began = os.getloadavg()[0], foreign_cores(server), time.monotonic()
        try:
            async with asyncio.timeout(size.patience):
                figures = await variant.once(Bench(server, size, Meter(server), kafka))
        except Skip as reason:
            into.skipped = str(reason)
            log.info("%s: skipped: %s", what, reason)
            return
        except Exception as error:  # recorded; the other variants of a long run are worth having
            into.skipped, into.failed = f"{type(error).__name__}: {error}", True
            log.exception("%s: failed", what)
            return
        figures = {"load": load, "foreign_cores": others()} | figures
        into.runs.append(figures)
        log.info("%s #%s: %s (%.1f s)", what, len(into.runs),
                 ", ".join(f"{k} {v:,.4g}" for k, v in figures.items()), time.monotonic() - began)  # fmt: skip


def _compared(result: ScenarioResult, compare: Compare) -> Comparison | None:
    of, to = result.variant(compare.of), result.variant(compare.to)
    key = compare.key or result.key
    if of is None or not of.values(key):
        return None
    if compare.to is None:
        label = compare.label or f"{compare.of}: {UNITS.get(key, key)}"
        return Comparison(label, compare.of, None, of.values(key), compare.target, compare.at_most, UNITS.get(key, key))
    if to is None or not to.values(key):
        return None
    told = f"time of {compare.to} / time of {compare.of}" if compare.times else f"{compare.of} / {compare.to}"
    label = compare.label or told + (f" ({key})" if compare.key else "")
    pairs = zip(of.values(key), to.values(key), strict=False)  # slow ones have fewer repetitions: the first ones
    values = [a / b for a, b in pairs if b]
    return Comparison(label, compare.of, compare.to, values, compare.target, compare.at_most, times=compare.times)


async def _quiet(patience: float) -> None:
    """Wait a little when the machine is busy with something else; how busy it was stands beside each result."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        busy = foreign_cores(None)
        await asyncio.sleep(0.5)
        if busy() < 0.3 * (os.cpu_count() or 1):
            return
