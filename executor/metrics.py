"""What an executor counts. The table in `docs/metrics.md` is the reference; a test holds it equal to this module.

Histograms and outcome counts of jobs are kept in plain lists and turned into Prometheus' form at scrape time: the
library's own `observe` takes longer than many a handler.
"""

from bisect import bisect_right
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..exposition import show, show_no_more
from ..jobs import JobType, Outcome, OutcomeName
from .queues import Entry

__all__ = ["ExecutorMetrics"]

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600)
_COUNTED = [outcome for outcome in OutcomeName if outcome is not OutcomeName.LOST]  # those are in `lost`
_CALL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

Gauges = Callable[[], Iterator[Metric]]


class _Durations:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS) + 1)
        self.total = 0.0

    def add(self, values: list[float]) -> None:
        """Count durations, in seconds; sorts the list: a few searches in it are cheaper than one for each value."""
        values.sort()
        below = 0
        for bucket, bound in enumerate(_BUCKETS):
            upto = bisect_right(values, bound, below)
            self.counts[bucket] += upto - below
            below = upto
            if below == len(values):
                break
        self.counts[-1] += len(values) - below
        self.total += sum(values[bisect_right(values, 0.0) :])  # clocks differ: nothing takes less than no time

    def buckets(self) -> list[tuple[str, float]]:
        out: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*_BUCKETS, "+Inf"), self.counts, strict=True):
            running += count
            out.append((str(bound), float(running)))
        return out


class ExecutorMetrics(Collector):
    """Counters and histograms of one executor, labelled with the service's name. `gauges` is asked at scrape time for
    the figures that are states.

    types: those whose counters are there before anything is counted: Prometheus' ``increase()`` does not see the first
    count of a series that begins with it.
    """

    def __init__(self, service: str, registry: CollectorRegistry, types: Iterable[JobType[Any]] = ()) -> None:
        self.service = service
        self._types = types
        self._registry = registry
        self.gauges: Gauges | None = None
        self._outcomes: dict[tuple[str, OutcomeName], int] = {}
        self._run: dict[str, _Durations] = {}
        self._wait: dict[str, _Durations] = {}
        self._own = CollectorRegistry()
        self._skew = 0.0

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["service"], registry=self._own).labels(service)

        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(name, text, ["service"], registry=self._own, buckets=_CALL_BUCKETS)
            return made.labels(service)

        self.cycle_seconds = histogram("sidings_cycle_seconds", "Round trip of a cycle statement.")
        self.read_seconds = histogram("sidings_read_seconds", "Round trip of a read statement.")
        self.audit_found = counter("sidings_audit_found", "Jobs that only the audit read has found; must stay 0.")
        self.fenced = counter("sidings_fenced", "Origins that another executor had taken over from this one.")
        self.lost = counter("sidings_lost", "Attempts of dead executors that this one has accounted for as lost.")
        self.takeovers = counter("sidings_takeovers", "Origins taken over from an executor whose lease had run out.")
        self.unmatched = counter("sidings_unmatched_outcomes", "Outcomes whose job had been changed meanwhile.")
        self.database_errors = counter("sidings_database_errors", "Statements that failed or were not answered.")
        self.stalled_seconds = counter("sidings_event_loop_stalled_seconds", "For which the event loop did not answer.")
        self.late_rows = counter("sidings_late_rows", "Jobs that became visible behind jobs already read.")
        show(self, registry)

    def close(self) -> None:
        """Take the metrics out of their registry. Safe to call twice."""
        show_no_more(self, self._registry)

    def set_clock_skew(self, seconds: float) -> None:
        """The server's epoch seconds minus the executor's clock."""
        self._skew = seconds

    def record(self, attempts: Iterable[tuple[Entry, Outcome, float, float]]) -> None:
        """Count attempts whose outcomes are committed: entry, outcome, start and end in seconds of the executor's
        clock."""
        skew = self._skew
        by_type: dict[str, tuple[list[float], list[float], list[OutcomeName]]] = {}
        for entry, outcome, started, finished in attempts:
            lists = by_type.get(entry.type)
            if lists is None:
                lists = by_type[entry.type] = [], [], []
            runs, waits, names = lists
            runs.append(finished - started)
            waited = started + skew - entry.enqueued
            # It may have been due before it was there, be it for ever: SQL may say '-infinity'.
            waits.append(waited if entry.due is None else min(waited, started - entry.due))
            names.append(outcome.name)
        for kind, (runs, waits, names) in by_type.items():
            self._run.setdefault(kind, _Durations()).add(runs)
            self._wait.setdefault(kind, _Durations()).add(waits)
            for name, count in Tally(names).items():
                self._outcomes[kind, name] = self._outcomes.get((kind, name), 0) + count

    def superseded(self, kind: str, count: int) -> None:
        """Count jobs that ended because a newer one of their type followed."""
        if count:
            key = (kind, OutcomeName.SUPERSEDED)
            self._outcomes[key] = self._outcomes.get(key, 0) + count

    def collect(self) -> Iterator[Metric]:
        """All metrics, as prometheus-client wants them."""
        ended = CounterMetricFamily(
            "sidings_jobs", "Attempts by type and outcome.", labels=["service", "type", "outcome"]
        )
        zeros = {(kind.name, outcome): 0 for kind in self._types for outcome in _COUNTED}
        for (kind, outcome), count in (zeros | self._outcomes).items():
            ended.add_metric([self.service, kind, outcome.value], count)
        yield ended
        for name, text, durations in (
            ("sidings_job_run_seconds", "How long attempts ran.", self._run),
            ("sidings_job_wait_seconds", "From enqueue or, if later, due time to the attempt's start.", self._wait),
        ):
            family = HistogramMetricFamily(name, text, labels=["service", "type"])
            for kind, duration in list(durations.items()):
                family.add_metric([self.service, kind], buckets=duration.buckets(), sum_value=duration.total)
            yield family
        yield from self._own.collect()
        if self.gauges is not None:
            yield from self.gauges()

    def count(self, outcome: OutcomeName, kind: str | None = None) -> int:
        """Attempts that ended so, of one type or of all."""
        return sum(n for (k, o), n in self._outcomes.items() if o is outcome and kind in (None, k))
