"""What directories show of themselves. The table in `docs/directories.md` is the reference; a test holds it
equal to this.

All directories of a registry are one collector, so that a process with several shows each metric once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = ["DirectoryMetrics", "Figures"]


class Figures(NamedTuple):
    """The figures of one directory, now."""

    service: str
    topic: str
    ready: bool
    start_seconds: float
    stale_seconds: float
    entries: int
    stored: int
    deleted: int
    bad: int
    errors: int
    rebuilds: int
    callback_failures: int
    positions: Mapping[int, int]
    ends: Mapping[int, int]


_WHOLE: list[tuple[str, str, Callable[[Figures], float]]] = [
    ("ready", "1 when all is applied that was in the topic at the start.", lambda f: f.ready),
    ("start_seconds", "From the start until it was ready, or until now.", lambda f: f.start_seconds),
    ("stale_seconds", "Since Kafka has last said that nothing was missing.", lambda f: f.stale_seconds),
    ("entries", "Keys in the directory.", lambda f: f.entries),
    ("errors", "Rows whose newest record could not be applied.", lambda f: f.errors),
]
_COUNTED: list[tuple[str, str, Callable[[Figures], float]]] = [
    ("rebuilds", "Times that all was read again, because rows could have been missing.", lambda f: f.rebuilds),
    ("callback_failures", "Calls of on_change functions that raised.", lambda f: f.callback_failures),
]
_BY_PARTITION: list[tuple[str, str, Callable[[Figures], Mapping[int, float]]]] = [
    ("offset", "The next offset: what is before has been applied.", lambda f: f.positions),
    ("end_offset", "The end of what is committed.", lambda f: f.ends),
    (
        "lag",
        "Offsets between the two.",
        lambda f: {p: max(0, end - f.positions.get(p, 0)) for p, end in f.ends.items()},
    ),
]


class DirectoryMetrics(Collector):
    """Asks its directories at scrape time."""

    def __init__(self) -> None:
        self._sources: list[Callable[[], Figures]] = []

    @classmethod
    def of(cls, registry: CollectorRegistry) -> "DirectoryMetrics":
        """The one of `registry`."""
        if (metrics := _of.get(registry)) is None:
            metrics = _of[registry] = cls()
            registry.register(metrics)
        return metrics

    def add(self, source: Callable[[], Figures]) -> None:
        """Show this directory."""
        self._sources.append(source)

    def remove(self, source: Callable[[], Figures]) -> None:
        """Show it no more. Safe to call twice."""
        if source in self._sources:
            self._sources.remove(source)

    def describe(self) -> Iterable[Metric]:
        """Nothing: it is registered before there is anything to show."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics, as prometheus-client wants them."""
        figures = [source() for source in list(self._sources)]
        if not figures:
            return
        labels = ["service", "topic"]
        records = CounterMetricFamily(
            "sidings_directory_records", "Records, by what became of them.", labels=[*labels, "result"]
        )
        for f in figures:
            for result, count in (("stored", f.stored), ("deleted", f.deleted), ("bad", f.bad)):
                records.add_metric([f.service, f.topic, result], count)
        yield records
        for name, text, of in _COUNTED:
            counter = CounterMetricFamily(f"sidings_directory_{name}", text, labels=labels)
            for f in figures:
                counter.add_metric([f.service, f.topic], of(f))
            yield counter
        for name, text, of in _WHOLE:
            gauge = GaugeMetricFamily(f"sidings_directory_{name}", text, labels=labels)
            for f in figures:
                gauge.add_metric([f.service, f.topic], of(f))
            yield gauge
        for name, text, of_each in _BY_PARTITION:
            gauge = GaugeMetricFamily(f"sidings_directory_{name}", text, labels=[*labels, "partition"])
            for f in figures:
                for partition, value in of_each(f).items():
                    gauge.add_metric([f.service, f.topic, str(partition)], value)
            yield gauge


_of: WeakKeyDictionary[CollectorRegistry, DirectoryMetrics] = WeakKeyDictionary()
