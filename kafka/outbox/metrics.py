"""What a relay counts. The table in `docs/outbox.md` is the reference; a test holds it equal to this module."""

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...exposition import gauge, show, show_no_more

__all__ = ["OutboxMetrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class OutboxMetrics(Collector):
    """Counters and histograms of one relay, labelled with the service's name; states are asked for at scrape time."""

    def __init__(self, service: str, registry: CollectorRegistry) -> None:
        self.service = service
        self.waiting: dict[str, tuple[int, float]] = {}  # topic -> messages, age of the oldest in seconds
        self.slots = 0
        self.failing: set[str] = set()
        self._registry = registry
        self._own = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["service", "topic"], registry=self._own)

        self._sent = counter("sidings_outbox_sent", "Messages acknowledged by Kafka and deleted.")
        self._failed = counter("sidings_outbox_failed", "Batches that Kafka did not acknowledge.")
        self._parked = counter("sidings_outbox_parked", "Messages parked because Kafka refused them.")
        self._seconds = Histogram(
            "sidings_outbox_seconds",
            "From publish() to the acknowledgement, for the oldest message of each batch.",
            ["service", "topic"],
            registry=self._own,
            buckets=_SECONDS,
        )
        self._size = Histogram(
            "sidings_outbox_batch_size",
            "Messages sent at once.",
            ["service", "topic"],
            registry=self._own,
            buckets=_SIZES,
        )
        show(self, registry)

    def close(self) -> None:
        """Take the metrics out of their registry. Safe to call twice."""
        show_no_more(self, self._registry)

    def batch(self, topic: str, size: int) -> None:
        """A batch was handed to Kafka. From now on all counters of its topic are there: Prometheus' ``increase()`` does
        not see the first count of a series that begins with it."""
        for counter in (self._sent, self._failed, self._parked):
            counter.labels(self.service, topic)
        self._size.labels(self.service, topic).observe(size)

    def sent(self, topic: str, count: int, oldest_seconds: float) -> None:
        """Messages were acknowledged."""
        self._sent.labels(self.service, topic).inc(count)
        self._seconds.labels(self.service, topic).observe(max(0.0, oldest_seconds))

    def failed(self, topic: str) -> None:
        """A topic's batch failed, and will be tried again."""
        self._failed.labels(self.service, topic).inc()

    def parked(self, topic: str, count: int) -> None:
        """Messages were refused."""
        self._parked.labels(self.service, topic).inc(count)

    def forget(self, topic: str) -> None:
        """Nothing was sent to a topic for long: its histograms, most of what is kept of it, begin anew with the next
        message. Not its counters: what one begins with is no increase, so that no alert would tell of it."""
        for histogram in (self._seconds, self._size):
            with suppress(KeyError):  # it has none, as where nothing was ever acknowledged
                histogram.remove(self.service, topic)

    def count(self, name: str, topic: str | None = None) -> float:
        """The value of a counter: ``sent``, ``failed`` or ``parked``; without a topic: of all."""
        if topic is None:
            counter = {"sent": self._sent, "failed": self._failed, "parked": self._parked}[name]
            samples = (sample for metric in counter.collect() for sample in metric.samples)
            return sum(sample.value for sample in samples if sample.name.endswith("_total"))
        labels = {"service": self.service, "topic": topic}
        return self._own.get_sample_value(f"sidings_outbox_{name}_total", labels) or 0.0

    def collect(self) -> Iterator[Metric]:
        """All metrics, as prometheus-client wants them."""
        yield from self._own.collect()
        by_topic = ["service", "topic"]
        service = self.service
        waiting = list(self.waiting.items())
        yield gauge(
            "sidings_outbox_waiting",
            "Messages that wait in the slots of this relay, and in those that no relay has.",
            by_topic,
            {(service, topic): count for topic, (count, _) in waiting},
        )
        yield gauge(
            "sidings_outbox_oldest_seconds",
            "Age of the oldest waiting message.",
            by_topic,
            {(service, topic): age for topic, (_, age) in waiting},
        )
        yield gauge(
            "sidings_outbox_failing",
            "Topics that cannot be sent to at present.",
            by_topic,
            {(service, topic): 1.0 for topic in list(self.failing)},
        )
        yield gauge("sidings_outbox_slots", "Slots that this relay has leased.", ["service"], {(service,): self.slots})
