"""What a consumer counts. The table in `docs/consumer.md` is the reference; a test holds it equal to this module."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..exposition import show, show_no_more

__all__ = ["ConsumerMetrics", "Figures"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_RESULTS = ("handled", "duplicate", "skipped", "parked", "isolated", "held", "discarded", "dead_letter")
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)


# Name, help, and a value per (topic, partition); the partition is None where a figure is of the topic.
Figures = tuple[str, str, dict[tuple[str, int | None], float]]


class ConsumerMetrics(Collector):
    """Counters and histograms of one consumer. `figures` is asked at scrape time for those that are states. topics:
    those whose counters are there before anything is counted: Prometheus' ``increase()`` does not see the first count
    of a series that begins with it."""

    def __init__(self, service: str, registry: CollectorRegistry, topics: Iterable[str]) -> None:
        self.service = service
        self.figures: Callable[[], Iterator[Figures]] | None = None
        self._own = CollectorRegistry()
        self._registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["service", "topic", *labels], registry=self._own)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["service", "topic"], registry=self._own, buckets=buckets)

        self._messages = counter("sidings_consumer_messages", "Messages whose offset is stored, by result.", "result")
        self._failures = counter("sidings_consumer_failures", "Attempts at a message that failed.")
        self._retries = counter("sidings_consumer_retries", "Failed messages that were tried again.")
        self._conflicts = counter("sidings_consumer_conflicts", "Batches undone, because another process was ahead.")
        self._missed = counter("sidings_consumer_missed", "Offsets deleted by retention before they were read.")
        self._sizes = histogram("sidings_consumer_batch_messages", "Messages in one transaction.", _SIZES)
        self._seconds = histogram("sidings_consumer_batch_seconds", "Duration of a batch's transaction.", _SECONDS)
        self._handled = histogram(
            "sidings_consumer_handler_seconds", "Duration of a stateless handler's call.", _SECONDS
        )
        errors = Counter(
            "sidings_consumer_errors", "Failed calls to a server.", ["service", "server"], registry=self._own
        )
        self._kafka_errors = errors.labels(service, "kafka")
        self._postgres_errors = errors.labels(service, "postgres")
        for topic in topics:
            for result in _RESULTS:
                self._messages.labels(service, topic, result)
            for each in (self._failures, self._retries, self._conflicts, self._missed):
                each.labels(service, topic)
        show(self, registry)

    def close(self) -> None:
        """Take the metrics out of their registry. Safe to call twice."""
        show_no_more(self, self._registry)

    def batch(self, topic: str, size: int, seconds: float) -> None:
        """A transaction has committed."""
        self._sizes.labels(self.service, topic).observe(size)
        self._seconds.labels(self.service, topic).observe(seconds)

    def messages(self, topic: str, result: str, count: int = 1) -> None:
        """Messages are done with. result: one of `_RESULTS`."""
        if count:
            self._messages.labels(self.service, topic, result).inc(count)

    def handled(self, topic: str, seconds: float) -> None:
        """A stateless handler has returned, or raised."""
        self._handled.labels(self.service, topic).observe(seconds)

    def failed(self, topic: str) -> None:
        """An attempt at a single message failed."""
        self._failures.labels(self.service, topic).inc()

    def retried(self, topic: str) -> None:
        """A failed message will be tried again."""
        self._retries.labels(self.service, topic).inc()

    def conflict(self, topic: str) -> None:
        """The compare-and-set of the offsets was refused."""
        self._conflicts.labels(self.service, topic).inc()

    def missed(self, topic: str, count: int) -> None:
        """Offsets were deleted before they were read."""
        self._missed.labels(self.service, topic).inc(count)

    def kafka_error(self) -> None:
        """A call to Kafka failed."""
        self._kafka_errors.inc()

    def postgres_error(self) -> None:
        """A call to Postgres failed."""
        self._postgres_errors.inc()

    def collect(self) -> Iterator[Metric]:
        """All metrics, as prometheus-client wants them."""
        yield from self._own.collect()
        if self.figures is None:
            return
        for name, text, values in self.figures():
            by_partition = any(partition is not None for _, partition in values)
            labels = ["service", "topic", "partition"] if by_partition else ["service", "topic"]
            family = GaugeMetricFamily(name, text, labels=labels)
            for (topic, partition), value in values.items():
                family.add_metric([self.service, topic, *([str(partition)] if by_partition else [])], value)
            yield family
