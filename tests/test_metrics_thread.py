"""What ``/metrics`` reads in a thread of its own while the event loop goes on, and what other threads declare."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from aiokafka import TopicPartition
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
from sidings.errors import ConfigurationError
from sidings.executor import Executor, cycles, reader
from sidings.executor.clock import now
from sidings.executor.flights import Batch, Flight
from sidings.executor.queues import Entry
from sidings.exposition import gauge, show, show_no_more
from sidings.jobs import Registry
from sidings.kafka import stateless_partition
from sidings.kafka.stateless_partition import StatelessPartition

from .support import ORIGIN, an_executor


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient")
def test_groups_that_come_and_go_meanwhile_do_not_break_the_metrics():
    prometheus, registry = CollectorRegistry(), Registry()
    registry.job(name="ride", payload=dict)(lambda _: None)
    scheduler = an_executor("postgresql://nowhere", registry, prometheus=prometheus).scheduler
    queue = scheduler.add_origin(ORIGIN, 1)
    for number in range(1, 3_001):  # heads that back off
        scheduler.insert(Entry(number, queue, "ride", f"stuck {number}", number, due=1e9), 0.0)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(lambda: [generate_latest(prometheus) for _ in range(50)])
        while not answer.done():
            number += 1
            scheduler.insert(Entry(number, queue, "ride", f"quick {number}", number), 0.0)
            for entry in scheduler.choose(1, 0.0):
                scheduler.ended(entry, 0.0)
        assert b'sidings_blocked_groups{service="test"} 3000.0' in answer.result()[-1]


def test_what_leaves_a_registry_meanwhile_takes_no_other_with_it_and_may_leave_twice():
    prometheus = CollectorRegistry()

    class Part(Collector):
        def __init__(self, name: str) -> None:
            self.name = name
            show(self, prometheus)

        def collect(self):
            if self.name == "ending":
                show_no_more(self, prometheus)
            return [gauge("parts", "Parts.", ["part"], {(self.name,): 1.0})]

    ending, staying = Part("ending"), Part("staying")
    assert b'parts{part="staying"} 1.0' in generate_latest(prometheus)
    show_no_more(ending, prometheus)
    assert generate_latest(prometheus).count(b"parts{") == 1
    show_no_more(staying, prometheus)
    show_no_more(staying, prometheus)
    assert generate_latest(prometheus) == b""


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(lambda executor: executor.cycles.busy_seconds(), id="cycle"),
        pytest.param(lambda executor: executor.reader.busy_seconds(), id="read"),
        pytest.param(lambda executor: executor.reader.starved_seconds(), id="reading anew"),
    ],
)
def test_what_ends_while_somebody_asks_for_how_long_it_has_been_under_way_is_no_error(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Executor], float]
):
    """`/health` is answered in a thread, and the event loop may go on between any two steps of it."""
    executor = an_executor("postgresql://nowhere", Registry(), prometheus=CollectorRegistry())
    flights, read = executor.cycles._flights, executor.reader

    def ends() -> float:
        flights.clear()
        read._busy_since = read._anew_since = None
        return now()

    monkeypatch.setattr(cycles, "now", ends)
    monkeypatch.setattr(reader, "now", ends)
    flights.append(Flight(Batch([], []), 1, now() - 60, executor.cycles._links[0], Mock(), []))
    read._busy_since = read._anew_since = now() - 60
    read._times_anew = 2
    assert seconds(executor) >= 60
    assert seconds(executor) == 0


def test_a_commit_that_succeeds_while_health_asks_is_no_error(monkeypatch: pytest.MonkeyPatch):
    partition = StatelessPartition(TopicPartition("etas", 0))

    def succeeds() -> float:
        partition.uncommitted_since = None
        return 1e9

    partition.uncommitted_since = 0.0
    monkeypatch.setattr(stateless_partition, "time", SimpleNamespace(monotonic=succeeds))
    assert "could not be committed" in (partition.problem() or "")
    assert partition.problem() is None


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda executor, registry: [job_type.name for job_type in registry], id="all types"),
        pytest.param(lambda executor, registry: registry.silent(), id="those without history"),
        pytest.param(lambda executor, registry: executor.workers.share_out([]), id="limits"),
    ],
)
def test_types_may_be_declared_in_another_thread_meanwhile(look: Callable[[Executor, Registry], object]):
    """As by a module that a web server's thread is the first to need. It ended the executor."""
    registry = Registry()
    executor = an_executor("postgresql://nowhere", registry)

    def declare() -> None:
        for number in range(1_000):
            registry.job(name=f"ride {number}", payload=dict, concurrency=1)(lambda _: None)

    with ThreadPoolExecutor(1) as thread:
        declaring = thread.submit(declare)
        while not declaring.done():
            look(executor, registry)
        declaring.result()


def test_how_a_type_runs_is_known_before_the_type():
    """An executor may take up a job of it at once: it gave one job to a handler of lists, or ran too many at once."""

    class Sizes(dict[str, int]):
        def __setitem__(self, name: str, size: int) -> None:
            known.append(registry.get(name))
            super().__setitem__(name, size)

    registry, known = Registry(), list[object]()
    registry.batch_sizes, registry.limits = Sizes(), Sizes()
    registry.job(name="rides", payload=dict, batch=10, concurrency=2)(lambda _: None)
    assert (registry.batch_sizes, registry.limits, known) == ({"rides": 10}, {"rides": 2}, [None, None])
    with pytest.raises(ConfigurationError, match="two job types are called 'rides'"):
        registry.job(name="rides", payload=dict, batch=20, concurrency=4)(lambda _: None)
    assert (registry.batch_sizes, registry.limits) == ({"rides": 10}, {"rides": 2})
