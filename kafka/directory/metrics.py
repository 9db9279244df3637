"""What directories show of themselves. The table in `docs/directories.md` is the reference; a test holds it
equal to this."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...exposition import gauge

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
    ("end_offset", "The end of the log.", lambda f: f.ends),
    (
        "lag",
        "Offsets between the two.",
        lambda f: {p: max(0, end - f.positions.get(p, 0)) for p, end in f.ends.items()},
    ),
]


class DirectoryMetrics(Collector):
    """Asks a directory for its figures at scrape time."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """All metrics, as prometheus-client wants them."""
        f, labels = self._figures(), ["service", "topic"]
        records = CounterMetricFamily(
            "sidings_directory_records", "Records, by what became of them.", labels=[*labels, "result"]
        )
        for result, count in (("stored", f.stored), ("deleted", f.deleted), ("bad", f.bad)):
            records.add_metric([f.service, f.topic, result], count)
        yield records
        for name, text, of in _COUNTED:
            counter = CounterMetricFamily(f"sidings_directory_{name}", text, labels=labels)
            counter.add_metric([f.service, f.topic], of(f))
            yield counter
        for name, text, of in _WHOLE:
            yield gauge(f"sidings_directory_{name}", text, labels, {(f.service, f.topic): of(f)})
        for name, text, of_each in _BY_PARTITION:
            values = {(f.service, f.topic, str(partition)): value for partition, value in of_each(f).items()}
            yield gauge(f"sidings_directory_{name}", text, [*labels, "partition"], values)
