"""A type of jobs whose handlers take long, as where a carrier lets each call run into its timeout."""

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidings.executor import slow_types, workers
from sidings.executor.queues import Entry
from sidings.executor.shares import TIMES_THE_REST, shares, too_many
from sidings.executor.slow_types import SlowTypes
from sidings.jobs import Job, JobType, Registry

from .support import ORIGIN, Ride, connected, drained, enqueue, eventually, running, value

WORKERS = 10
MOST = 8  # four fifths of them


class Carrier:
    """Answers no call until `recover`."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.calls, self.most = 0, 0
        self.answered: list[str] = []

    async def call(self, transport: str) -> None:
        self.calls += 1
        self.most = max(self.most, self.calls)
        await self.answers.wait()
        self.calls -= 1
        self.answered.append(transport)


def declared(
    carrier: Carrier, *, group: str | None = "transport"
) -> tuple[Registry, JobType[Ride], JobType[Ride], list[str]]:
    """Jobs that call the carrier, and others."""
    registry, ran = Registry(), list[str]()

    @registry.job(group=group)
    async def call_carrier(job: Job[Ride]) -> None:
        await carrier.call(job.payload.transport)

    @registry.job(group=group)
    async def store(job: Job[Ride]) -> None:
        ran.append(job.payload.transport)

    return registry, call_carrier, store, ran


@given(
    workers=st.integers(1, 200),
    held=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 60), min_size=1, max_size=4),
)
def test_a_type_gets_one_more_while_it_has_less_than_four_times_what_is_left(workers: int, held: dict[str, int]):
    for type, more in shares(workers, held).items():
        now, rest = held[type], workers - sum(held.values())
        assert now + more >= TIMES_THE_REST * (rest - more)
        assert now + more - 1 < TIMES_THE_REST * (rest - more + 1)


@given(workers=st.integers(1, 100), types=st.integers(1, 6))
def test_slow_types_that_take_what_they_may_leave_the_share_that_is_promised(workers: int, types: int):
    held = {str(n): 0 for n in range(types)}
    while more := [type for type, room in shares(workers, held).items() if room > 0 and sum(held.values()) < workers]:
        held[min(more, key=held.__getitem__)] += 1
    assert workers - sum(held.values()) == workers // (TIMES_THE_REST * types + 1)


@pytest.mark.parametrize("group", ["transport", None])
async def test_what_hangs_leaves_workers_to_other_types(
    database: str, group: str | None, caplog: pytest.LogCaptureFixture
):
    """It kept all of them, and no other job started before one of its calls had run into its timeout."""
    carrier = Carrier()
    registry, call_carrier, store, ran = declared(carrier, group=group)
    calls, others = [f"c{n}" for n in range(100)], [f"s{n}" for n in range(50)]
    async with running(database, registry, concurrency=WORKERS) as executor:
        await enqueue(database, call_carrier, [Ride(transport=name) for name in calls])
        await eventually(lambda: carrier.calls == MOST)
        await enqueue(database, store, [Ride(transport=name) for name in others])
        await eventually(lambda: len(ran) == len(others))
        assert (carrier.most, carrier.answered) == (MOST, [])
        [one, *_] = executor.scheduler.memory.jobs.values()
        assert executor.workers.share_out([]) == ({"call_carrier": 0}, {}, [])
        assert executor.workers.share_out([[one]]) == ({"call_carrier": -1}, {}, [])
        carrier.answers.set()
        await drained(database)
    assert Counter(carrier.answered) == Counter(calls)
    told = [record.getMessage() for record in caplog.records if "no more of them start" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"{MOST} of {WORKERS} workers run jobs of the type 'call_carrier'")


async def test_a_type_that_is_alone_has_all_workers(database: str):
    carrier, registry = Carrier(), Registry()

    @registry.job(group="transport")
    async def call_carrier(job: Job[Ride]) -> None:
        await carrier.call(job.payload.transport)

    async with running(database, registry, concurrency=WORKERS):
        await enqueue(database, call_carrier, [Ride(transport=f"c{n}") for n in range(30)])
        await eventually(lambda: carrier.calls == WORKERS)
        carrier.answers.set()
        await drained(database)


async def test_workers_are_kept_for_a_type_that_is_declared_after_the_start(database: str):
    carrier, registry, ran = Carrier(), Registry(), list[str]()

    @registry.job()
    async def call_carrier(job: Job[Ride]) -> None:
        await carrier.call(job.payload.transport)

    async with running(database, registry, concurrency=WORKERS):

        @registry.job()
        async def store(job: Job[Ride]) -> None:
            ran.append(job.payload.transport)

        await enqueue(database, call_carrier, [Ride(transport=f"c{n}") for n in range(30)])
        await eventually(lambda: carrier.calls >= MOST)
        await enqueue(database, store, [Ride(transport="s")])
        await eventually(lambda: ran == ["s"])
        assert carrier.most == MOST
        carrier.answers.set()
        await drained(database)


@pytest.mark.parametrize("group", ["transport", None])
async def test_a_crowd_that_hangs_keeps_no_other_job_from_being_read(database: str, group: str | None):
    """More of them than memory is to have: they filled it, and what stood behind was not read before they had ended."""
    carrier = Carrier()
    registry, call_carrier, store, ran = declared(carrier, group=group)
    calls = [f"c{n}" for n in range(2_000 if group else 300)]
    await enqueue(database, call_carrier, [Ride(transport=name) for name in calls])
    await enqueue(database, store, [Ride(transport=f"s{n}") for n in range(50)])
    async with running(database, registry, (), concurrency=WORKERS) as executor:
        scheduler = executor.scheduler
        scheduler.memory.window = scheduler._ready._window = 40
        scheduler.memory.budget = 80
        executor.assign([ORIGIN], 2)
        await eventually(lambda: len(ran) == 50)
        assert carrier.most <= MOST
        assert group is None or len(scheduler.memory.jobs) < 200
        carrier.answers.set()
        await drained(database)
    assert Counter(carrier.answered) == Counter(calls)


async def test_calls_of_a_tenth_of_a_second_of_which_more_come_than_can_run_leave_others_alone(database: str):
    """They filled the memory, and whatever came later was read when that many of them had run: here, in a minute."""
    registry, ran = Registry(), list[int]()

    @registry.job()
    async def call_carrier(job: Job[int]) -> None:
        await asyncio.sleep(0.15)

    @registry.job()
    async def store(job: Job[int]) -> None:
        ran.append(job.payload)

    async with running(database, registry, concurrency=WORKERS) as executor:
        await enqueue(database, call_carrier, range(6_000))
        await eventually(lambda: executor.workers.capacity() <= WORKERS - MOST)
        await enqueue(database, store, range(20))
        await eventually(lambda: len(ran) == 20)


async def test_workers_that_were_woken_for_others_do_not_go_on_with_what_hangs(database: str):
    """A job of another type woke one of the last workers, which then took a call that stood behind it: so all hung."""
    carrier = Carrier()
    registry, call_carrier, store, ran = declared(carrier)
    async with running(database, registry, concurrency=WORKERS):
        async with connected(database) as connection, connection.transaction():
            for n in range(100):
                await store.enqueue(connection, Ride(transport=f"s{n}"), origin=ORIGIN)
                await call_carrier.enqueue(connection, Ride(transport=f"c{n}"), origin=ORIGIN)
        await eventually(lambda: len(ran) == 100)
        await eventually(lambda: carrier.calls == MOST)
        assert carrier.most == MOST
        carrier.answers.set()
        await drained(database)


@pytest.mark.parametrize("others", [300, 0])
async def test_what_is_named_ahead_is_given_back_when_its_type_begins_to_hang(database: str, others: int):
    """While calls are quick, many more are named than there are workers; what was named later stood behind them."""
    carrier = Carrier()
    registry, call_carrier, store, ran = declared(carrier)
    carrier.answers.set()
    calls = [f"c{n}" for n in range(6_000)]
    async with running(database, registry, concurrency=WORKERS) as executor:
        async with connected(database) as connection, connection.transaction():
            for n in range(0, len(calls), 20):
                await call_carrier.enqueue_many(
                    connection, [Ride(transport=c) for c in calls[n : n + 20]], origin=ORIGIN
                )
                if others:
                    await store.enqueue(connection, Ride(transport=f"s{n}"), origin=ORIGIN)
        await eventually(lambda: len(executor.workers.claimed) > 100 and len(carrier.answered) > 500)
        carrier.answers.clear()
        await eventually(lambda: carrier.calls >= MOST)
        await eventually(lambda: len(ran) == others)
        await eventually(lambda: not executor.workers.claimed)
        named = "SELECT cardinality(running) = $1 FROM sidings.executor"
        await eventually(lambda: value(database, named, MOST), "what waits is named no more")
        carrier.answers.set()
        await drained(database)
    assert Counter(carrier.answered) == Counter(calls)


async def test_a_type_of_which_few_jobs_take_long_is_not_slow(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(slow_types, "_SLOW_SECONDS", 0.6)  # so that a busy machine makes no others slow
    registry, hangs, ran = Registry(), asyncio.Event(), list[int]()

    @registry.job()
    async def mostly_quick(job: Job[int]) -> None:
        await (hangs.wait() if job.payload < 2 else asyncio.sleep(0.02))
        ran.append(job.payload)

    @registry.job()
    async def other(job: Job[int]) -> None: ...

    async with running(database, registry, concurrency=WORKERS) as executor:
        await enqueue(database, mostly_quick, range(400))
        await eventually(lambda: len(ran) >= 350)
        assert executor.workers.share_out([]) == ({}, {}, [])
        hangs.set()
        await drained(database)
    assert "no more of them start" not in caplog.text


async def test_workers_that_are_kept_for_others_cost_nothing(database: str, monkeypatch: pytest.MonkeyPatch):
    """The event loop went round and round as long as a claimed job was not to have them."""
    monkeypatch.setattr(slow_types, "_SLOW_SECONDS", 60.0)
    carrier, looks = Carrier(), Counter[str]()
    registry, call_carrier, _, _ = declared(carrier)
    async with running(database, registry, concurrency=WORKERS) as executor:
        await enqueue(database, call_carrier, [Ride(transport=f"c{n}") for n in range(30)])
        await eventually(lambda: carrier.calls == MOST and executor.workers.claimed)
        leaves = executor.workers.slow.leaves
        monkeypatch.setattr(executor.workers.slow, "leaves", lambda name, *n: looks.update([name]) or leaves(name, *n))
        await eventually(lambda: looks["call_carrier"] >= 5)  # by the timer
        began = asyncio.get_running_loop().time()
        await eventually(lambda: looks["call_carrier"] >= 8)
        assert asyncio.get_running_loop().time() - began > 0.1
        carrier.answers.set()
        await drained(database)


class Looked(list[Any]):
    """Knows how often it was looked through, but for the watchdog, which does so from time to time."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.looks += threading.current_thread() is threading.main_thread()
        return super().__iter__()


async def test_a_job_that_starts_beside_a_slow_type_does_not_have_all_workers_counted(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """With a thousand workers, each job took three times as much of the client's CPU."""
    carrier = Carrier()
    registry, call_carrier, store, ran = declared(carrier)
    async with running(database, registry, concurrency=WORKERS) as executor:
        await enqueue(database, call_carrier, [Ride(transport=f"c{n}") for n in range(30)])
        await eventually(lambda: carrier.calls == MOST and executor.workers.slow.names)  # `share_out` gives jobs back
        monkeypatch.setattr(workers, "_SWEEP_SECONDS", 60.0)
        await asyncio.sleep(0.1)  # the last sweep
        executor.workers.all = looked = Looked(executor.workers.all)
        for n in range(50):
            await enqueue(database, store, [Ride(transport=f"s{n}")])
            await eventually(lambda n=n: len(ran) == n + 1)
        assert looked.looks < 50
        carrier.answers.set()
        await drained(database)


async def test_groups_of_a_type_that_hangs_keep_their_order(database: str):
    carrier, registry, began = Carrier(), Registry(), defaultdict[str, list[int]](list)

    @registry.job(group=lambda payload: payload[0])
    async def call_carrier(job: Job[tuple[str, int]]) -> None:
        began[job.payload[0]].append(job.payload[1])
        await carrier.call(job.payload[0])

    @registry.job()
    async def other(job: Job[str]) -> None: ...

    async with running(database, registry, concurrency=WORKERS):
        for n in range(5):
            await enqueue(database, call_carrier, [(f"g{group}", n) for group in range(30)])
        await eventually(lambda: carrier.calls == MOST)
        await enqueue(database, other, ["x"])
        carrier.answers.set()
        await drained(database)
    assert began == {f"g{group}": list(range(5)) for group in range(30)}


@given(
    workers=st.integers(1, 60),
    running=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 30), min_size=1, max_size=4),
    claimed=st.lists(st.sampled_from("abcdef"), max_size=40),
)
def test_what_is_too_many_is_given_back_and_no_more(workers: int, running: dict[str, int], claimed: list[str]):
    held = {type: count + claimed.count(type) for type, count in running.items()}
    before = held.copy()
    back = too_many(workers, held, claimed)
    gone = Counter(type for type, goes in zip(claimed, back, strict=True) if goes)
    assert held == {type: count - gone[type] for type, count in before.items()}
    rest = workers - sum(held.values())
    for type in held.keys() & {type for type, goes in zip(claimed, back, strict=True) if not goes}:
        assert held[type] - 1 < TIMES_THE_REST * (rest + 1), "it would not start now"
    if True in back:
        type = claimed[first := back.index(True)]
        assert held[type] >= TIMES_THE_REST * rest, f"the one at {first} could have stayed"


def test_a_type_is_slow_after_two_looks_and_not_for_long_after_it_has_been():
    """However long it was. Nor is it while most workers have nothing to do, which leave enough to others."""
    slow, entry = SlowTypes(10, ["call_carrier", "store"]), SimpleNamespace(type="call_carrier")
    busy: list[Any] = [SimpleNamespace(entry=entry, started=0.0)] * 8
    slow.held = Counter(call_carrier=8)
    assert [slow.look(busy, 6, 100.0) for _ in range(5)] == [False] * 5
    assert [slow.look(busy, 2, 100.0) for _ in range(100)] == [False, True] + [False] * 98
    assert slow.names == {"call_carrier"}
    assert [slow.look([], 10, 100.0) for _ in range(20)].count(True) == 1
    assert slow.names == frozenset()
    assert [slow.look(busy, 2, 100.0) for _ in range(2)] == [False, True]


def test_what_was_named_last_is_given_back_first_and_the_rest_stays():
    held = {"a": 14}
    assert too_many(10, held, ["a"] * 8) == [False] * 2 + [True] * 6
    assert held == {"a": 8}


@pytest.mark.parametrize(("types", "workers"), [(3, 10), (3, 100), (10, 100)])
async def test_what_is_named_of_several_slow_types_is_not_given_back_again_and_again(
    database: str, types: int, workers: int
):
    """Each was given what was free as if the others took nothing of it, and then each was cut for the same excess: of
    six jobs that a cycle had named five were given back, in a thousand commits a second."""
    registry, ran, back = Registry(), Counter[str](), list[int]()

    async def call(job: Job[int]) -> None:
        await asyncio.sleep(0.1)
        ran[job.type] += 1

    declared = [registry.job(name=f"call_{n}")(call) for n in range(types)]
    async with running(database, registry, (), concurrency=workers) as executor:
        for job_type in declared:
            await enqueue(database, job_type, range(workers * 20 // types))
        share_out = executor.workers.share_out

        def watched(coming: Sequence[list[Entry]]) -> tuple[dict[str, int], dict[str, int], list[Entry]]:
            *left, taken = share_out(coming)
            back.append(len(taken))
            return *left, taken

        executor.assign([ORIGIN], 2)
        await eventually(lambda: len(executor.workers.slow.names) == types)
        await asyncio.sleep(0.3)  # what was named before they were slow has been given back
        executor.workers.share_out = watched
        before = ran.total()
        await eventually(lambda: ran.total() - before >= workers * 8)
        assert sum(back) < (ran.total() - before) / 2
