"""What ``/metrics`` reads in a thread of its own, while the event loop goes on."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
from sidings.executor import Executor, cycles, reader
from sidings.executor.clock import now
from sidings.executor.flights import Batch, Flight
from sidings.executor.queues import Entry
from sidings.exposition import gauge, show, show_no_more
from sidings.jobs import Registry

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
