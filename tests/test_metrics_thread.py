"""What ``/metrics`` reads in a thread of its own, while the event loop goes on."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
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
