"""The executor's own cycle loop with two cycles in flight, and with jobs that are named before they are read, against a
server that answers late, in another order or not at all. What counts is what stands in the executor's row and in the
jobs at any moment."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from prometheus_client import CollectorRegistry
from sidings.errors import PostgresUnavailable
from sidings.executor import cycles, expected
from sidings.executor.cycles import CycleLoop
from sidings.executor.deferral import Deferral
from sidings.executor.expected import Expected
from sidings.executor.metrics import ExecutorMetrics
from sidings.executor.queues import Entry
from sidings.executor.scheduler import Scheduler
from sidings.executor.standing import Standing
from sidings.jobs import SUCCEEDED, Registry
from sidings.schema import load_sql

from .scheduler_world import Handlers
from .support import eventually

CYCLE = load_sql("sidings.executor", "cycle")
NAME = load_sql("sidings.executor", "name")
LIVES = 15
JOBS = 60


class Server:
    """The executor's row and its jobs. A statement arrives, waits for the row, and commits, each at a time of its own;
    whoever sent it may have given up by then."""

    def __init__(self, random: Random, faults: float) -> None:
        self.random = random
        self.faults = faults
        self.cycle = 0
        self.fence = 0
        self.running: set[int] = set()
        self.jobs: set[int] = set()
        self.succeeded: list[int] = []
        self.cancelled: set[int] = set()
        self.stopped: set[int] = set()  # cancelled when they were named
        self.alive: set[int] = set()  # jobs whose handlers have started and whose outcomes are not recorded
        self.locked: set[int] = set()  # by somebody else's transaction
        self.row = asyncio.Lock()  # fair: who comes first is served first
        self.statements: set[asyncio.Task[Any]] = set()
        self.trouble = 0
        self.brought = 0  # jobs, by the cycles that named them

    async def pause(self) -> None:
        for _ in range(self.random.choice((0, 0, 1, 2, 5, 20))):
            await asyncio.sleep(0)

    async def execute(self, kind: str, args: tuple[Any, ...]) -> dict[str, Any]:
        await self.pause()
        async with self.row:
            await self.pause()
            return getattr(self, kind)(*args)

    def apply(self, _: object, number: int, fence: int, running: str, *rest: Any) -> dict[str, Any]:
        ids = rest[0] if len(rest) > 1 else "{}"  # a cycle that only names brings the timeline and no more
        if self.cycle != number - 1 or self.fence != fence:
            return {"applied": 0, "succeeded": 0, "other": 0}
        if trouble := self.refusal(numbers(ids)):
            raise trouble
        self.cycle, self.running = number, numbers(running)
        ended = numbers(ids) & self.jobs
        self.jobs -= ended
        self.alive -= ended
        self.succeeded += ended
        missing = self.alive - self.running
        assert not missing, f"cycle {number} names {self.running}: nobody could account for {missing}"
        return {"applied": 1, "succeeded": len(ended), "other": 0}

    def refusal(self, ids: set[int]) -> Exception | None:
        """Postgres may not take a value, or somebody else may have a row locked for a while."""
        if self.locked & ids:
            return asyncpg.LockNotAvailableError("locked")
        if not ids or self.random.random() > self.faults / 3:
            return None
        self.trouble += 1
        if self.random.random() < 0.5:
            return asyncpg.DataError("a value is refused")
        self.locked = {self.random.choice(sorted(ids))}
        asyncio.get_running_loop().call_later(0.003, self.locked.clear)
        return asyncpg.LockNotAvailableError("locked")

    def found(self, ids: set[int]) -> list[dict[str, Any]]:
        """The jobs of these that are committed, each the first of its group."""
        first = [id for id in sorted(ids & self.jobs) if not _before(id, self.jobs)]
        fixed = {"type": "known", "enqueued_at": 0.0, "headers": None, "payload": None, "priority": 0, "policy": 0}
        return [fixed | {"id": id, "position": id, "group": _group(id), "origin": _origin(id)} for id in first]

    def disown(self, _: object) -> dict[str, Any]:
        self.fence += 1
        return {"fence": self.fence}

    def standing(self, _: object, known: int, most: int) -> dict[str, Any]:
        gone = [id for id in self.running if id not in self.jobs]
        origins = {"origins": ["t/0", "t/1"], "epochs": [1, 1]}
        return {"cycle": self.cycle, "fence": self.fence, "timeline": None, "gone": gone, "actions": None, **origins}

    async def cancel(self) -> None:
        """A person cancels a job: what was planned before is void. One of half, lest all be that stand still."""
        async with self.row:
            ids = [id for id in sorted(self.jobs) if id % 2]
            if not ids:
                return
            id = self.random.choice(ids)
            self.jobs.remove(id)
            self.alive.discard(id)
            self.cancelled.add(id)
            if id in self.running:
                self.stopped.add(id)
            self.fence += 1


class Line:
    """Takes the place of `Link`: an answer may be lost, before or after the statement has been at work."""

    def __init__(self, server: Server) -> None:
        self.server = server

    async def fetchrow(self, sql: str, *args: Any) -> dict[str, Any]:
        server = self.server
        kind = "apply" if "begin_cycle" in sql else "disown" if "fence + 1" in sql else "standing"
        refused = kind == "apply" and server.random.random() < server.faults / 4
        if refused:
            server.trouble += 1
            await server.pause()
            raise asyncpg.DeadlockDetectedError("refused")
        statement = asyncio.create_task(server.execute(kind, args))
        server.statements.add(statement)
        statement.add_done_callback(server.statements.discard)
        if server.random.random() < server.faults:
            server.trouble += 1
            await server.pause()  # it may be at work, or over, or on its way
            raise PostgresUnavailable("no answer")
        return await statement

    async def fetch(self, sql: str, *args: Any) -> list[dict[str, Any]]:
        """`locked.sql`, or `name_and_read.sql`: what that has found it saw before it waited for the row."""
        await self.server.pause()
        if "begin_cycle" not in sql:
            return [{"id": id} for id in self.server.locked.intersection(args[0])]
        found = self.server.found(numbers(args[5]))
        answer = await self.fetchrow(sql, *args[:5])
        self.server.brought += len(found) * answer["applied"]
        return [answer | row for row in found if answer["applied"]] or [answer | {"id": None}]


def numbers(array: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", array)}


class Service:
    """A cycle loop with a scheduler full of jobs, and handlers that end when they like."""

    def __init__(self, seed: int, faults: float, *, expected: bool = False) -> None:
        self.random = Random(seed)
        self.expected = expected
        self.coming = list(range(1, JOBS + 1)) if expected else []  # jobs whose transactions have not begun
        self.at_work: list[int] = []  # they are expected, and will be committed, in this order
        self.unread: list[int] = []
        self.server = Server(self.random, faults)
        self.scheduler = Scheduler(lambda kind: True)
        self.queues = [self.scheduler.add_origin(name, 1) for name in ("t/0", "t/1")]
        self.handlers = Handlers(6)
        self.started: list[int] = []
        registry = Registry()
        registry.job(name="known", payload=object)(_handler)
        self.loop = CycleLoop(
            [Line(self.server), Line(self.server)],  # type: ignore[list-item]
            self.scheduler,
            self.handlers,  # type: ignore[arg-type]
            registry,
            ExecutorMetrics("test", CollectorRegistry()),
            schema="sidings",
            poison_after=5,
            on_fenced=_ignore,
            on_replaced=_ignore,
            on_read=self.read,
            on_forgotten=self.read,
            on_delayed=_ignore,
            on_hungry=_ignore,
        )
        self.loop.begin(uuid4())
        self.server.jobs = set() if expected else set(range(1, JOBS + 1))
        self.most_in_flight = 0
        self.handed_over = 0
        self.still = False  # no handler ends
        self.quiet = 0  # looks while the loop had nothing to do

    def read(self) -> None:
        """What the reader would do: all that stands in the database, in order."""
        self.unread.clear()
        for id in sorted(self.server.jobs):
            group = _group(id)
            queue = self.queues[id % 3 == 0]
            if not queue.draining:
                self.scheduler.insert(Entry(id, queue, "known", group, id), 0.0)
                queue.high = max(queue.high, id)
        self.loop.signal()

    def work(self) -> None:
        """Transactions begin, and are committed; now and then one is rolled back. The reader comes later."""
        random = self.random
        if random.random() < 0.02:
            id = random.randrange(1_000, 2_000)
            self.loop.expect({_origin(id): [id]})
        if self.coming and len(self.server.jobs) + len(self.at_work) < 4 and random.random() < 0.1:
            id = self.coming.pop(0)
            self.at_work.append(id)
            if random.random() < 0.4:
                self.loop.expect({_origin(id): [id]})
        idle = not (self.loop._flights or self.handlers.finished or self.handlers.busy or self.handlers.claimed)
        if self.at_work and random.random() < (0.5 if idle else 0.05):
            id = self.at_work.pop(0)
            self.server.jobs.add(id)
            self.unread.append(id)
            if random.random() < 0.7:
                self.loop.expect({_origin(id): [id]})
        if self.unread and random.random() < 0.05:
            self.read()

    async def live(self) -> None:
        """Until all jobs have ended."""
        self.read()
        tasks = [
            asyncio.create_task(work) for work in (self.loop.run(), self.drain_and_resume(), self.stop_and_go_on())
        ]
        try:
            async with asyncio.timeout(20):
                while self.server.jobs or self.coming or self.at_work:
                    await self.step()
                    await asyncio.sleep(0)
                    for task in tasks:
                        assert not task.done(), task.exception()
            answers = await asyncio.gather(*self.server.statements, return_exceptions=True)
            refused = (dict, asyncpg.PostgresError)  # also the last of all, which nobody has to ask again
            assert not [answer for answer in answers if not isinstance(answer, refused)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def drain_and_resume(self) -> None:
        """An origin is given up, and comes back when it could have been released."""
        queue = self.queues[1]
        while True:
            await asyncio.sleep(0)
            if self.random.random() < 0.98:
                continue
            self.loop.unname(self.handlers.unclaim(queue))
            self.scheduler.drain(queue)
            while queue.running:
                await asyncio.sleep(0)
            await self.loop.barrier()
            named = {id for id in self.server.running if id % 3 == 0}
            assert not named, f"an origin could be released although {named} are named"
            self.scheduler.resume(queue)
            self.read()

    async def stop_and_go_on(self) -> None:
        """Nothing new is started, and what runs ends: then nothing is named any more."""
        while True:
            await asyncio.sleep(0)
            if self.random.random() < 0.98:
                continue
            self.loop.paused = True
            self.loop.unname(self.handlers.unclaim())
            self.still = self.random.random() < 0.5  # what runs may take long to end
            for _ in range(100):
                await asyncio.sleep(0)
            self.still = False
            while self.handlers.busy or any(queue.running for queue in self.queues):
                await asyncio.sleep(0)
            await self.loop.barrier()
            assert not self.server.running, f"{self.server.running} are still named"
            self.loop.paused = False
            self.loop.signal()

    async def step(self) -> None:
        if self.expected:
            self.work()
        handlers, server, random = self.handlers, self.server, self.random
        self.most_in_flight = max(self.most_in_flight, len(self.loop._flights))
        self.handed_over += sum(lane.ending is not None for queue in self.queues for lane in queue.lanes.values())
        if handlers.claimed and len(handlers.busy) < handlers.concurrency and random.random() < 0.5:
            entry = handlers.claimed.popleft()
            assert entry.id in server.running, f"{entry} starts although no committed cycle names it"
            assert entry.id in server.jobs | server.stopped, f"{entry} starts although it is over"
            assert entry.id not in self.started, f"{entry} starts twice"
            before = _before(entry.id, server.jobs)
            assert not before, f"{entry} starts although {before} of its group have not ended"
            if entry.id in server.jobs:
                server.alive.add(entry.id)
            handlers.busy.append(entry)
            self.started.append(entry.id)
        if handlers.busy and not self.still and random.random() < 0.5:
            entry = handlers.busy.pop(random.randrange(len(handlers.busy)))
            handlers.finished.append((entry, SUCCEEDED, 0.0, 0.0))
            self.loop.signal()
        if random.random() < server.faults / 30:
            await server.cancel()
        self.loop.standing.fence_read(server.fence)
        self.check_that_the_row_names_no_more_than_is_known()

    def check_that_the_row_names_no_more_than_is_known(self) -> None:
        """While the loop has nothing to do, whatever has been put back."""
        loop, server = self.loop, self.server
        at_work = loop._flights or loop._signal.is_set() or loop._deferral or loop.standing.fence != server.fence
        if not at_work and not self.expected:
            self.quiet += 1
            left = server.running - loop._named.keys()
            assert not left, f"{left} have been put back, and are still named"


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second cycle for each outcome, and no waiting between attempts."""
    monkeypatch.setattr(cycles, "_ENOUGH", 1)
    monkeypatch.setattr(Deferral, "locked_seconds", 0.001)
    monkeypatch.setattr(cycles, "_REFUSED_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(cycles.Backoff, "sleep", lambda _: asyncio.sleep(0))


@pytest.mark.parametrize("faults", [0.0, 0.1, 0.4])
async def test_whatever_becomes_of_two_cycles_each_job_runs_and_ends_once(faults: float):
    most, trouble, handed_over, quiet = 0, 0, 0, 0
    for seed in range(LIVES):
        service = Service(seed, faults)
        await service.live()
        ended = sorted([*service.server.succeeded, *service.server.cancelled])
        assert ended == list(range(1, JOBS + 1)), f"seed {seed}"
        assert set(service.started) - service.server.cancelled == set(service.server.succeeded), f"seed {seed}"
        most = max(most, service.most_in_flight)
        trouble += service.server.trouble
        handed_over += service.handed_over
        quiet += service.quiet
    assert most == 2
    assert handed_over > LIVES
    assert quiet > LIVES
    assert (trouble > LIVES) == (faults > 0)


@pytest.mark.parametrize("faults", [0.0, 0.1, 0.2])
async def test_jobs_that_are_named_before_they_are_read_run_and_end_once(
    monkeypatch: pytest.MonkeyPatch, faults: float
):
    early: list[Entry] = []
    started = Expected.started

    def counted(*call: Any) -> list[Entry]:
        start = started(*call)
        early.extend(start)
        return start

    monkeypatch.setattr(Expected, "started", counted)
    monkeypatch.setattr(expected, "_SECONDS", 0.01)
    brought = 0
    for seed in range(2 * LIVES):
        service = Service(seed, faults, expected=True)
        await service.live()
        brought += service.server.brought
        ended = sorted([*service.server.succeeded, *service.server.cancelled])
        assert ended == list(range(1, JOBS + 1)), f"seed {seed}"
        assert set(service.started) - service.server.cancelled == set(service.server.succeeded), f"seed {seed}"
    assert len(early) > LIVES
    assert brought > LIVES // 2


async def test_cycles_that_were_under_way_when_the_executors_row_was_gone_do_not_end_its_next_life():
    """They are cancelled with the loop: a new one that asked for their answers came to its end, and the service too."""
    service = Service(seed=0, faults=0.0)
    loop, server, scheduler = service.loop, service.server, service.scheduler
    service.read()
    async with server.row:  # held by somebody: no cycle comes to its end
        former = asyncio.create_task(loop.run())
        await eventually(lambda: loop.under_way(), "a cycle under way")
        former.cancel()
        await asyncio.wait([former])
    scheduler.remove_origin(*list(scheduler.origins))
    service.queues = [scheduler.add_origin(name, 1) for name in ("t/0", "t/1")]
    loop.begin(uuid4())
    service.read()
    running = asyncio.create_task(loop.run())
    async with asyncio.timeout(20):
        while server.jobs and not running.done():
            await service.step()
            await asyncio.sleep(0)
    assert not running.done(), "it has come to its end"
    running.cancel()
    await asyncio.wait([running])


async def test_of_two_cycles_that_are_sent_as_one_both_are_under_way_until_that_has_ended():
    """Else an origin of the second one's could be taken again, under the lease of which the cycle yet ends its jobs."""
    service = Service(seed=0, faults=0.0)
    loop, server, handlers = service.loop, service.server, service.handlers
    one, two = (Entry(id, service.queues[id], "known", None, id) for id in (0, 1))
    for entry in (one, two):
        service.scheduler.insert(entry, 0.0)
        entry.origin.high = entry.position
    assert {*service.scheduler.choose(2, 0.0)} == {one, two}
    running = asyncio.create_task(loop.run())
    async with server.row:
        for number, entry in enumerate((one, two), start=1):
            handlers.finished.append((entry, SUCCEEDED, 0.0, 0.0))
            loop.signal()
            await eventually(lambda: len(loop._flights) == number, "a cycle under way")  # noqa: B023
        server.fence += 1  # by a person: both are void
    await server.row.acquire()
    try:
        await eventually(lambda: len(loop._flights) == 1, "one in place of both")
        assert loop.under_way() == {"t/0", "t/1"}
    finally:
        server.row.release()
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("where", ["claimed", "expired"])
@pytest.mark.parametrize("together", [False, True], ids=["", "as two cycles are disowned"])
async def test_a_job_that_a_person_ends_before_it_has_started_does_not_start(where: str, together: bool):
    """Where a disowning and somebody else bump the fence together, what the other one has done is looked up, too."""
    service = Service(seed=0, faults=0.0)
    standing, server, handlers = service.loop.standing, service.server, service.handlers
    service.read()
    [entry] = service.scheduler.choose(1, 0.0)
    server.jobs.remove(entry.id)  # by a person, who has bumped the fence
    server.fence = 1
    getattr(handlers, where).append(entry)
    await (standing.disown([]) if together else standing.find_out([]))
    assert not handlers.claimed
    assert not handlers.expired
    assert standing.fence == server.fence
    assert {job.id for queue in service.queues for job in queue.running} == set()


@pytest.mark.parametrize("ask", [Standing.look_up, lambda standing: standing.disown([])], ids=["looked up", "disowned"])
async def test_the_log_is_not_filled_while_nothing_tells_what_has_become_of_cycles(
    ask: Callable[[Standing], Awaitable[object]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A busy executor loses Postgres with two cycles in flight: there was a line for each try, as long as it lasted."""
    service = Service(seed=0, faults=0.0)
    standing, answer = service.loop.standing, Line.fetchrow
    tries = 0

    async def away(*statement: Any) -> dict[str, Any]:
        nonlocal tries
        tries += 1
        if tries <= 50:
            raise PostgresUnavailable("away")
        return await answer(*statement)

    monkeypatch.setattr(Line, "fetchrow", away)
    while tries <= 50:
        await ask(standing)
    begins, ends = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert begins == "what has become of cycles could not be looked up, trying again: away"
    assert ends.startswith("what has become of cycles could not be looked up for")


@pytest.mark.parametrize("bumped", [False, True], ids=["", "and a person changes something"])
async def test_a_cycle_that_is_sent_while_the_one_before_is_at_work_waits_for_it(database: str, bumped: bool):
    first, second = await asyncpg.connect(database), await asyncpg.connect(database)
    me = uuid4()
    await first.execute("INSERT INTO sidings.executor (id) VALUES ($1)", me)
    insert = (
        "INSERT INTO sidings.job (type, origin, payload) VALUES ('x', 't/0', '{}'), ('x', 't/0', '{}') RETURNING id"
    )
    ids = await first.fetch(insert)
    one, two = (row["id"] for row in ids)
    async with first.transaction():
        row = await first.fetchrow(CYCLE, *_arguments(me, 1, running=[two], ended=[one]))
        assert row is not None
        assert row["applied"] == row["succeeded"] == 1
        following = asyncio.create_task(second.fetchrow(CYCLE, *_arguments(me, 2, running=[], ended=[two])))
        await eventually(lambda: _waits(first, second), "the second waits for the row")
        if bumped:
            await first.execute("UPDATE sidings.executor SET fence = fence + 1")
    row = await following
    assert row is not None
    assert row["applied"] == row["succeeded"] == (0 if bumped else 1)
    assert await first.fetchval("SELECT count(*) FROM sidings.job") == (1 if bumped else 0)
    await first.close()
    await second.close()


@pytest.mark.parametrize("query", [CYCLE, NAME], ids=["it ends jobs", "it only names"])
async def test_a_sending_that_comes_behind_its_repetition_is_void(database: str, query: str):
    """Nobody waits for it any more. It would name again what has ended since, or names no more what runs."""
    connection, me = await asyncpg.connect(database), uuid4()
    await connection.execute("INSERT INTO sidings.executor (id) VALUES ($1)", me)
    arguments = _arguments(me, 1, running=[7], ended=[])
    if query is NAME:
        arguments = *arguments[:4], None
    applied = [(await connection.fetch(query, *arguments))[0]["applied"] for _ in range(2)]
    following = await connection.fetch(CYCLE, *_arguments(me, 2, running=[8], ended=[]))
    applied += [following[0]["applied"], (await connection.fetch(query, *arguments))[0]["applied"]]
    assert applied == [1, 0, 1, 0]
    row = await connection.fetchrow("SELECT cycle, running FROM sidings.executor")
    assert tuple(row or ()) == (2, [8])
    await connection.close()


async def _waits(observer: asyncpg.Connection, of: asyncpg.Connection) -> bool:
    found = await observer.fetchval("SELECT pg_blocking_pids($1) <> '{}'", of.get_server_pid())
    return bool(found)


def _arguments(me: UUID, number: int, *, running: list[int], ended: list[int]) -> tuple[object, ...]:
    """Of ``cycle.sql``."""
    ages = _array([0] * len(ended))
    return me, number, 0, _array(running), _array(ended), "{}", "{}", ages, ages, "[]", [], 1, None


def _array(numbers: list[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"


def _group(id: int) -> str | None:
    return f"g{id % 5}" if id % 4 else None


def _lane(id: int) -> tuple[bool, str | None]:
    return id % 3 == 0, _group(id)


def _before(id: int, jobs: set[int]) -> set[int]:
    """Those of these jobs that stand before it in its group."""
    return {other for other in jobs if other < id and _group(id) and _lane(other) == _lane(id)}


def _origin(id: int) -> str:
    return f"t/{int(id % 3 == 0)}"


async def _handler(job: object) -> None: ...


def _ignore(*_: object) -> None: ...
