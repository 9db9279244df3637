"""How metrics come into a registry of Prometheus: those of all parts, services and directories of a process as one."""

from collections.abc import Iterator
from contextlib import suppress
from weakref import WeakKeyDictionary, ref

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

__all__ = ["gauge", "show", "show_no_more"]


class _Together(Collector):
    """Collectors of one registry as one: a process with several services shows each metric once. Where a name came
    twice, all that reads the text strictly would refuse all of it."""

    def __init__(self) -> None:
        self.collectors: list[Collector] = []

    def describe(self) -> Iterator[Metric]:
        """Nothing: it is registered before there is anything to show."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All metrics, as prometheus-client wants them."""
        metrics: dict[str, Metric] = {}
        for collector in list(self.collectors):
            for metric in collector.collect():
                if (first := metrics.setdefault(metric.name, metric)) is not metric:
                    first.samples.extend(metric.samples)
        return iter(metrics.values())


# The registry alone keeps it: it leads to services that have not started, and so back to the registry.
_together: WeakKeyDictionary[CollectorRegistry, ref[_Together]] = WeakKeyDictionary()


def _of(registry: CollectorRegistry) -> _Together | None:
    found = _together.get(registry)
    return None if found is None else found()


def show(collector: Collector, registry: CollectorRegistry) -> None:
    """Show what it collects in this registry."""
    if (together := _of(registry)) is None:
        together = _Together()
        _together[registry] = ref(together)
        registry.register(together)
    together.collectors.append(collector)


def show_no_more(collector: Collector, registry: CollectorRegistry) -> None:
    """The contrary. Safe to call twice."""
    if (together := _of(registry)) is None or collector not in together.collectors:
        return
    together.collectors.remove(collector)
    if not together.collectors:
        del _together[registry]
        with suppress(KeyError):  # somebody has cleared the registry, as tests do between each other
            registry.unregister(together)


def gauge(name: str, text: str, labels: list[str], values: dict[tuple[str, ...], float]) -> GaugeMetricFamily:
    """A gauge family from a table of label values."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family
