"""A process that hangs, and handlers that outlive their lease."""

import asyncio
import logging
import multiprocessing
import re
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from logging.handlers import MemoryHandler
from multiprocessing.connection import Connection
from operator import gt
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from sidings.executor import Executor, ExecutorSettings
from sidings.executor.clock import now
from sidings.executor.watchdog import Watchdog
from sidings.executor.worker import CancelReason
from sidings.jobs import Job, Registry, Retry
from tenacity import wait_fixed

from .faulty_proxy import proxied
from .fleet import Fleet, Member, until
from .support import ORIGIN, SECONDS, an_executor, enqueue, eventually, fetch, outcomes, running

ORIGINS = ["t/0", "t/1"]


def logged(member: Member, *texts: str) -> bool:
    log = member.log.read_text(errors="replace")
    return all(text in log for text in texts)


async def lease_ends(fleet: Fleet):
    return await fleet.fetchval("SELECT min(lease_until) FROM sidings.origin")


async def test_after_a_stall_the_leases_are_renewed_at_once_and_the_next_one_is_told(
    database: str, caplog: pytest.LogCaptureFixture
):
    stalls, prometheus = {"stall_warn_seconds": 0.2, "stall_seconds": 0.4}, CollectorRegistry()
    async with running(database, Registry(), ORIGINS, prometheus=prometheus, lease_seconds=60.0, **stalls):

        async def renewed() -> bool:
            ends = await fetch(database, "SELECT lease_until FROM sidings.origin")
            return all(end[0] > before for end in ends)

        def told() -> list[int]:
            lines = [record.getMessage() for record in caplog.records]
            return [sum(text in line for line in lines) for text in ("it is blocked here", "are not renewed any more")]

        for _ in range(2):
            before = max(end[0] for end in await fetch(database, "SELECT lease_until FROM sidings.origin"))
            earlier, deadline = told(), time.monotonic() + 10.0
            while not all(map(gt, told(), earlier)):
                assert time.monotonic() < deadline, (earlier, told())
                time.sleep(0.02)  # noqa: ASYNC251 - that is what it is about
            await eventually(renewed, "their next turn is in 20 s", seconds=10.0)
        counted = prometheus.get_sample_value("sidings_event_loop_stalled_seconds_total", {"service": "test"})
        silences = re.findall(r"answers again after (\S+) s", caplog.text)
        assert counted == pytest.approx(sum(map(float, silences)), abs=0.2)
        assert len(silences) >= 2


async def test_a_blocked_event_loop_is_reported_with_its_stack_and_keeps_its_leases(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": 3.0}) as fleet:
        gate = fleet.gate()
        await fleet.enqueue("blocking", ORIGINS, each=2, gate=str(gate))
        member = fleet.spawn("blocked", ORIGINS, stall_warn_seconds=0.3, stall_seconds=60.0)
        await until(fleet.started, "the handler to block")
        before = await lease_ends(fleet)
        await until(lambda: logged(member, "blocked here", "chaos_worker.py", "in blocking"), "the stack in the log")

        async def renewed() -> bool:
            return (await lease_ends(fleet) - before).total_seconds() > 2.0

        await until(renewed, "two renewals")
        gate.touch()
        await fleet.finish()
        await until(lambda: logged(member, "the event loop answers again"), "its return in the log")
        assert member.exit_code is None
        await member.stop()
        await fleet.verify()
        assert set(await fleet.outcomes()) == {"succeeded"}


async def test_a_process_that_hangs_for_too_long_ends_itself_and_is_taken_over(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": 1.0}) as fleet:
        gate = fleet.gate()
        await fleet.enqueue("step", ORIGINS, groups=3, each=3, ms=20, group="s")
        (hanging,) = await fleet.enqueue("blocking", ["t/0"], gate=str(gate))
        hung = fleet.spawn("hung", ORIGINS, stall_warn_seconds=0.2, stall_seconds=0.5)
        await until(lambda: fleet.started(hanging), "the handler to block")
        heir = fleet.spawn("heir", ORIGINS)
        assert await hung.ended() == 70
        assert logged(hung, "its leases are not renewed any more", "ending the process")
        gate.touch()
        await fleet.finish()
        await heir.stop()
        await fleet.verify()
        assert await fleet.outcomes(hanging) == ["lost", "succeeded"]


@pytest.mark.parametrize("disk", ["stuck", "full", "unreadable"])
async def test_a_process_that_hangs_ends_itself_also_when_it_cannot_say_so(database: str, tmp_path: Path, disk: str):
    async with Fleet(database, tmp_path, executor={"lease_seconds": 3.0}) as fleet:
        gate = fleet.gate()
        (hanging,) = await fleet.enqueue(disk, ["t/0"], gate=str(gate))
        hung = fleet.spawn("hung", ORIGINS, stall_warn_seconds=0.2, stall_seconds=0.5)
        await until(lambda: fleet.started(hanging), "the handler to block")
        heir = fleet.spawn("heir", ORIGINS)
        assert await hung.ended() == 70
        gate.touch()
        await fleet.finish()
        await heir.stop()
        await fleet.verify()
        assert await fleet.outcomes(hanging) == ["lost", "succeeded"]


async def test_a_hung_process_that_runs_no_handler_loses_its_origins_and_lives(database: str, tmp_path: Path):
    """What blocks the loop is the service's own code: nothing of ours runs that would have to be stopped."""
    async with Fleet(database, tmp_path, executor={"lease_seconds": 1.0}) as fleet:
        gate = fleet.gate()
        hung = fleet.spawn("hung", ORIGINS, stall_seconds=0.5)
        await fleet.held_by(hung, ORIGINS)
        hung.send({"block": str(gate)})
        heir = fleet.spawn("heir", ORIGINS)
        await fleet.held_by(heir, ORIGINS)
        await fleet.enqueue("step", ORIGINS, groups=3, each=3, ms=5)
        gate.touch()
        await fleet.finish()
        await until(lambda: logged(hung, "the event loop answers again"), "the loop to answer")
        assert (await hung.ask())["held"] == {}
        await heir.stop()
        await fleet.held_by(hung, ORIGINS)
        await hung.stop()
        await fleet.verify()


@pytest.mark.parametrize("kind", ["thread", "stubborn"])
async def test_a_handler_that_cannot_be_stopped_ends_its_process_when_the_lease_runs_out(
    database: str, tmp_path: Path, kind: str
):
    async with proxied(database) as proxy, Fleet(database, tmp_path, executor={"lease_seconds": 1.5}) as fleet:
        gate = fleet.gate()
        (stuck,) = await fleet.enqueue(kind, ["t/0"], gate=str(gate))
        alone = fleet.spawn("cut off", ORIGINS, dsn=proxy.dsn)
        await until(lambda: fleet.started(stuck), "the handler to run")
        heir = fleet.spawn("heir", ORIGINS, lease_seconds=6.0)  # it cannot stop this handler either
        proxy.cut()
        assert await alone.ended() == 70
        assert logged(alone, f"under job {stuck} ({kind}), which cannot be stopped: ending the process")
        gate.touch()
        await fleet.finish()
        await heir.stop()
        await fleet.verify()  # no overlap: it had ended before its successor began
        assert await fleet.outcomes(stuck) == ["lost", "succeeded"]


async def test_with_the_weaker_promise_such_a_handler_goes_on_and_its_outcome_is_void(database: str, tmp_path: Path):
    settings = {"lease_seconds": 1.0, "exit_when_fenced": False}
    async with proxied(database) as proxy, Fleet(database, tmp_path, executor=settings) as fleet:
        gate = fleet.gate()
        (stuck,) = await fleet.enqueue("thread", ["t/0"], gate=str(gate))
        alone = fleet.spawn("cut off", ["t/0"], dsn=proxy.dsn)
        await until(lambda: fleet.started(stuck), "the handler to run")
        heir = fleet.spawn("heir", ["t/0"])
        proxy.cut()
        await until(lambda: fleet.started(stuck, pid=heir.pid), "the same job elsewhere")
        proxy.heal()
        gate.touch()
        await fleet.finish()
        await until(lambda: len([r for r in fleet.records() if r["event"] == "end"]) == 2, "the ends of both runs")
        await heir.stop()
        assert (await alone.ask())["problems"] == []
        await alone.stop()
        rows = await fleet.fetch("SELECT outcome, attempt, epoch FROM sidings.job_history ORDER BY attempt")
        assert [row["outcome"] for row in rows] == ["lost", "succeeded"]
        assert rows[1]["epoch"] == rows[0]["epoch"] + 1


async def test_a_drain_waits_for_a_handler_that_cannot_be_stopped_and_keeps_the_lease(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": 3.0, "drain_seconds": 0.1}) as fleet:
        gate = fleet.gate()
        jobs = await fleet.enqueue("thread", ["t/0"], each=2, gate=str(gate))
        one = fleet.spawn("one", ["t/0"])
        await until(fleet.started, "the handler to run")
        async with fleet.local(["t/0"], 2) as other:
            one.assign([], 2)
            before = await lease_ends(fleet)

            async def renewed() -> bool:
                return (await lease_ends(fleet) - before).total_seconds() > 2.0

            await until(renewed, "two renewals")
            assert other.held == {}
            gate.touch()
            await fleet.finish()
            assert set(other.held) == {"t/0"}
        assert one.exit_code is None
        await fleet.verify()
        assert await fleet.outcomes() == ["succeeded"] * len(jobs)


@pytest.mark.long
async def test_a_plain_function_that_outlives_the_stop_of_its_executor_does_not_meet_its_successor(
    database: str, tmp_path: Path
):
    """The executor is stopped, the process (or the thread that Python waits for at its end) lives on."""
    async with Fleet(database, tmp_path, executor={"lease_seconds": 1.5, "shutdown_seconds": 0.2}) as fleet:
        gate = fleet.gate()
        (stuck,) = await fleet.enqueue("thread", ["t/0"], gate=str(gate))
        stopping = fleet.spawn("stopping", ["t/0"])
        await until(lambda: fleet.started(stuck), "the handler to run")
        heir = fleet.spawn("heir", ["t/0"])
        stopping.send({"stop": True})
        await until(lambda: stopping.exit_code is not None or fleet.started(stuck, pid=heir.pid), "an end", timeout=25)
        gate.touch()
        await fleet.finish()
        await stopping.ended()
        await heir.stop()
        await fleet.verify()


@pytest.mark.parametrize(
    ("by", "told"),
    [("asyncio.run", "the executor does not run"), ("close", "the event loop has not answered for ")],
)
async def test_an_executor_whose_loop_is_closed_does_not_keep_its_origins(database: str, by: str, told: str):
    """It was started in a thread that has ended, and never stopped, while its process goes on."""
    executor = an_executor(database, Registry(), lease_seconds=1.0, stall_warn_seconds=0.2)
    forking = multiprocessing.get_context("fork")
    here, there = forking.Pipe()
    child = forking.Process(target=_close_loop, args=(executor, by, told, there), daemon=True)
    child.start()
    try:
        await eventually(here.poll, "the loop is closed, and health says so")
        async with running(database, Registry()) as heir:  # returns when it has the origin
            assert heir.held == {ORIGIN: 2}
    finally:
        child.kill()
        child.join()


def _close_loop(executor: Executor, by: str, told: str, ready: Connection) -> None:
    async def start() -> None:
        await executor.start()
        executor.assign([ORIGIN])
        await executor.settled()

    def serve() -> None:
        if by == "asyncio.run":
            asyncio.run(start())
        else:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(start())
            loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    while not any(problem.startswith(told) for problem in executor.problems()):
        time.sleep(0.02)
    ready.send(None)
    time.sleep(2 * SECONDS)


async def test_the_watchdog_is_quiet_while_all_is_well(database: str, tmp_path: Path):
    async with Fleet(database, tmp_path, executor={"lease_seconds": 3.0}) as fleet:
        await fleet.enqueue("step", ORIGINS, groups=2, each=100, ms=30)  # for longer than a stall may last
        member = fleet.spawn("well", ORIGINS, stall_warn_seconds=2.0)
        await fleet.finish()
        assert (await member.ask())["problems"] == []
        await member.stop()
        assert "sidings.watchdog" not in member.log.read_text()
        await fleet.verify()


@pytest.mark.parametrize("kind", ["swallows its cancellation", "is a plain function"])
async def test_a_handler_that_goes_on_after_its_timeout_is_told_of(
    database: str, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sidings.executor.watchdog._NOTICE_SECONDS", 0.1)
    registry, go_on, prometheus = Registry(), threading.Event(), CollectorRegistry()
    if kind == "is a plain function":

        @registry.job(name="ride", timeout=0.1)
        def plain(job: Job[str]) -> None:
            assert go_on.wait(SECONDS)
    else:

        @registry.job(name="ride", timeout=0.1)
        async def swallows(job: Job[str]) -> None:
            while not go_on.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)

    @registry.job()
    async def well(job: Job[str]) -> None: ...

    def deaf() -> float | None:
        return prometheus.get_sample_value("sidings_deaf_handlers", {"service": "test"})

    [stuck] = await enqueue(database, registry["ride"], ["x"])
    try:
        async with running(database, registry, prometheus=prometheus, lease_seconds=5.0) as executor:
            await eventually(deaf, "it is counted")
            [problem] = await eventually(executor.problems, "health names it")
            assert f"job {stuck} (ride) has been running for " in problem
            assert "(its timeout)" in problem
            await enqueue(database, well, ["y"])
            await eventually(lambda: outcomes(database), "others go on")
            told = [record.getMessage() for record in caplog.records if record.name == "sidings.watchdog"]
            assert [f"job {stuck} (ride)" in line for line in told] == [True]  # once
            go_on.set()
            await eventually(lambda: (deaf(), executor.problems()) == (0, []), "nothing is told of it any more")
    finally:
        go_on.set()


@pytest.mark.parametrize("then", ["its executor stops", "its lease runs out", "its origin comes back"])
async def test_a_handler_that_has_swallowed_one_cancellation_is_cancelled_again_for_another_reason(
    database: str, then: str
):
    """It was cancelled once only: a stop did not release its origin, and a lease that ran out ended the process."""
    registry, cancelled = Registry(), list[float]()
    timeout = 1.0 if then == "its origin comes back" else 0.1

    @registry.job(timeout=timeout, retry=Retry(wait=wait_fixed(600)))
    async def swallows(job: Job[str]) -> None:
        while len(cancelled) < 2:
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                cancelled.append(now())
        raise ConnectionError("it was cut off")

    settings: dict[str, Any] = {"lease_seconds": 3.0, "shutdown_seconds": 0.1, "drain_seconds": 0.0}
    async with proxied(database) as proxy:
        await enqueue(database, swallows, ["x"], origin="t/0")
        async with running(proxy.dsn, registry, origins=["t/0"], exit_when_fenced=False, **settings) as executor:
            if then == "its origin comes back":  # it is cancelled for that first, and then for its timeout
                await eventually(executor.workers.running)
                executor.assign([], 2)
                await eventually(lambda: cancelled)
                executor.assign(["t/0"], 3)
            await eventually(lambda: cancelled)
            if then == "its lease runs out":
                proxy.cut()
            if then != "its executor stops":
                await eventually(lambda: not executor.workers.running(), "it ends", seconds=15.0)
            proxy.heal()
        assert len(cancelled) == 2
        if then == "its executor stops":
            assert await outcomes(database) == ["retried"]
            assert [row["owner"] for row in await fetch(database, "SELECT owner FROM sidings.origin")] == [None]


class Working:
    """A worker, as far as the watchdog looks at it. entries: what it works on, at one look after the other."""

    def __init__(self, *entries: object, cancelled: float = 0.0, call: Future[object] | None = None) -> None:
        self.entries = list(entries)
        self.call = call
        self.reason, self.started, self.cancelled = CancelReason.TIMEOUT, 0.0, cancelled

    @property
    def entry(self) -> object:
        return self.entries[0] if len(self.entries) == 1 else self.entries.pop(0)


def a_watchdog(worker: Working, exits: list[Any]) -> Watchdog:
    workers: Any = SimpleNamespace(all=[worker])
    return Watchdog(ExecutorSettings(), cast(Any, None), workers, lambda _: None, exits.append)


class AnEntry(SimpleNamespace):
    __hash__ = object.__hash__


def an_entry(id: int, *, deadline: float) -> Any:
    return AnEntry(id=id, type="ride", origin=SimpleNamespace(name="t/0", deadline=deadline))


def test_the_watchdog_ends_the_process_also_where_there_are_no_threads_left_to_say_so(monkeypatch):
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    exits: list[int] = []
    watchdog = a_watchdog(Working(an_entry(1, deadline=now())), exits)
    monkeypatch.setattr(threading.Thread, "start", none_left)
    watchdog._look_at_deadlines()
    assert exits == [70]


def test_the_watchdogs_last_words_do_not_stay_in_a_buffer_and_are_waited_for():
    told: list[Any] = []

    def slowly(record: logging.LogRecord) -> None:
        time.sleep(0.1)
        told.append(record.getMessage())

    target = logging.Handler()
    target.emit = slowly  # type: ignore[method-assign]
    buffer = MemoryHandler(1_000, flushLevel=logging.CRITICAL + 1, target=target)
    logging.getLogger().addHandler(buffer)
    try:
        a_watchdog(Working(an_entry(1, deadline=0.0)), told)._look_at_deadlines()
    finally:
        logging.getLogger().removeHandler(buffer)
    words, code = told
    assert ("which cannot be stopped" in words, code) == (True, 70)


def test_a_worker_that_goes_on_to_another_job_between_two_looks_is_blamed_for_neither():
    exits: list[int] = []
    ended, next_one = an_entry(1, deadline=0.0), an_entry(2, deadline=float("inf"))
    a_watchdog(Working(ended, next_one), exits)._look_at_deadlines()
    assert exits == []
    assert a_watchdog(Working(ended, next_one), exits).deaf() == []


@pytest.mark.parametrize(("plain", "code"), [(False, []), (True, [70])], ids=["coroutine", "plain function"])
def test_only_plain_functions_outlive_a_loop_that_is_closed(plain: bool, code: list[int]):
    """The process of a web server ended for the sake of a coroutine that could not go on."""
    exits: list[int] = []
    watchdog = a_watchdog(Working(an_entry(1, deadline=0.0), call=Future() if plain else None), exits)
    watchdog._loop = asyncio.new_event_loop()
    watchdog._loop.close()
    watchdog._look_at_deadlines()
    assert exits == code


def test_a_handler_that_was_cancelled_a_moment_ago_is_not_deaf_yet():
    entry = an_entry(1, deadline=float("inf"))
    assert a_watchdog(Working(entry, cancelled=now() - 1.0), []).deaf() == []
    assert len(a_watchdog(Working(entry, cancelled=now() - 6.0), []).deaf()) == 1


async def test_a_deaf_handler_is_told_of_again_when_it_is_so_again_and_the_log_is_not_waited_for():
    """One that nobody reads would have kept the watchdog from ending the process when the lease runs out."""
    go_on, told = threading.Event(), list[bool]()
    stuck = logging.Handler()
    stuck.emit = lambda record: told.append(go_on.wait(SECONDS))  # type: ignore[method-assign]
    worker = Working(an_entry(1, deadline=float("inf")))
    watchdog, deaf = a_watchdog(worker, []), worker.entries
    logging.getLogger("sidings.watchdog").addHandler(stuck)
    try:
        for entries in (deaf, deaf, [None], deaf):
            worker.entries = entries
            watchdog._look_at_cancelled()
        go_on.set()
        await eventually(lambda: told == [True, True], told)
    finally:
        go_on.set()
        logging.getLogger("sidings.watchdog").removeHandler(stuck)


@pytest.mark.parametrize("lease_seconds", [1.0, 3_600.0])
def test_the_watchdog_looks_often_enough(lease_seconds: float):
    """Between two looks less than the margin passes, and of long leases no more than what a stall may take untold."""
    watchdog, waits = a_watchdog(Working(None), []), list[float]()
    watchdog._settings = settings = ExecutorSettings(lease_seconds=lease_seconds)
    watchdog._workers = cast(Any, SimpleNamespace(running=lambda: 0))
    watchdog._stop = cast(Any, SimpleNamespace(wait=lambda seconds: waits.append(seconds) or True))
    watchdog._run()
    assert waits[0] < min(settings.margin_seconds, settings.stall_warn_seconds)


async def test_a_look_that_fails_is_told_of_once_and_does_not_end_the_watch(caplog: pytest.LogCaptureFixture):
    exits: list[int] = []
    watchdog, looks = a_watchdog(Working(an_entry(1, deadline=now())), exits), iter([False, False, True])
    watchdog._workers.running = lambda: 0  # type: ignore[method-assign]
    watchdog._stop = cast(Any, SimpleNamespace(wait=lambda seconds: next(looks)))

    def fails() -> None:
        raise OSError("no such thing")

    watchdog._look_at_loop = fails  # type: ignore[method-assign]
    watchdog._run()
    assert exits == [70, 70]

    def told() -> list[str]:
        return [line for record in caplog.records if "no such thing" in (line := record.getMessage())]

    await eventually(told)
    assert len(told()) == 1


def test_the_last_look_at_handlers_that_go_on_is_made_again_when_it_fails():
    """Under leases that nobody renews any more."""
    exits: list[int] = []
    watchdog, left = a_watchdog(Working(an_entry(1, deadline=now())), exits), iter([1, 1, 0])
    watchdog._workers.running = lambda: next(left)  # type: ignore[method-assign]
    watchdog.stop()
    look, failures = watchdog._look_at_deadlines, iter([True, False])

    def fails_once() -> None:
        if next(failures):
            raise OSError("no such thing")
        look()

    watchdog._look_at_deadlines = fails_once  # type: ignore[method-assign]
    watchdog._run()
    assert exits == [70]
