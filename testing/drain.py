"""Run jobs in the test's own process, one after the other, until none is due."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from uuid import uuid4

import asyncpg

from ..errors import SidingsError
from ..executor import ExecutorSettings, PostgresSettings, connect
from ..executor.attempts import Finished, poison
from ..executor.clock import now
from ..executor.queues import Entry, Lane, OriginQueue
from ..executor.recording import cycle_arguments, unless_gone
from ..executor.transactional import Transactional
from ..executor.workers import Workers
from ..jobs import Again, ErrorInfo, JobType, OutcomeName, Policy, Registry
from ..schema import check, int_array, load_sql
from ..waiting import set_within
from .look import LONGEST_SECONDS, advance, seconds_of

__all__ = ["Attempt", "NotDrained", "drain"]

log = logging.getLogger("sidings.testing")

_EXECUTOR, _HERE = "sidings.executor", "sidings.testing"
_LEASE = timedelta(minutes=1)  # so long a drain that was killed keeps others away
_LOOK_SECONDS = 0.5  # how often to see, while a handler runs, whether a person has ended its job
_THREAD_SECONDS = 0.05  # how often to see whether a plain function has returned
_PATIENCE_SECONDS = 60.0  # how long to wait for that
_RENEW_SECONDS = 10.0
_MOST_DUE = 1_000


class NotDrained(SidingsError):
    """Jobs are left that this process may not run, or that come back again and again; the message says which."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a handler.

    Attributes:
        payload: As the handler got it; the stored text where that does not validate.
        error: None for a success.
        delay: Seconds until the next attempt, where there is one.
        after: Simulated seconds that had passed since the drain began.
    """

    type: str
    job_id: int
    origin: str
    group: str | None
    attempt: int
    payload: Any
    outcome: OutcomeName
    error: ErrorInfo | None
    delay: float | None
    after: float


class _Service(Protocol):
    """What `drain` needs of a `Service`."""

    @property
    def registry(self) -> Registry: ...
    @property
    def executor(self) -> "_Executor": ...
    def connected(self) -> AbstractAsyncContextManager[None]: ...


class _Executor(Protocol):
    @property
    def postgres(self) -> PostgresSettings: ...
    @property
    def settings(self) -> ExecutorSettings: ...


async def drain(
    database: str | _Service,
    registry: Registry | None = None,
    *,
    until: timedelta | float = 0.0,
    limit: int = 1_000,
) -> list[Attempt]:
    """Run the committed jobs of all origins, and those that these enqueue, until none is due::

        [attempt] = await drain(service)
        assert attempt.outcome == "succeeded"

    Jobs run one at a time, those of a handler that takes lists as many as there are, by priority and position, and as
    an executor runs them: payloads, timeouts, retry policies, transactional handlers, history. Held and paused jobs,
    and types without a handler, are left alone.

    All attempts of a job see one `enqueued_timestamp`, that of its first in this drain, and so one `idempotency_key`,
    as in production. So from one attempt to the next a job gets no older by it; see `advance`.

    Args:
        database: A service that does not run, whose `transaction` and `origin_for` work in its handlers meanwhile; or a
            DSN.
        registry: Of the handlers, together with a DSN. A service's own, ``service.registry``, has its middleware.
        until: Seconds of simulated time to pass: whenever nothing is due, the clock jumps to the next delayed job or
            retry, as long as that lies within. ``math.inf``: until nothing waits any more, but what is due in a
            thousand years or never.
        limit: Most attempts.

    Returns:
        The attempts in the order in which they ran. What handlers raise stands in them.

    Raises:
        NotDrained: An executor that runs has the jobs' origin, or jobs are left after `limit` attempts; or a plain
            function goes on for a minute after the drain was cut off.
        SchemaError: Sidings' tables are missing or old.
        ConfigurationError: A type's `Retry(on_exhausted=)` names one that is not in the registry.
        ValueError: The arguments do not go together.
    """
    left = min(seconds_of(until, "drain(until"), LONGEST_SECONDS)
    if not isinstance(limit, int) or limit < 1:  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
        raise ValueError(f"drain(limit={limit!r}): give a whole number, 1 or more")
    connected: AbstractAsyncContextManager[None]
    if isinstance(database, str) and isinstance(registry, Registry):
        settings, connected = PostgresSettings(dsn=database, schema_name=registry.schema), nullcontext()
        poison_after = ExecutorSettings().poison_after
    elif not isinstance(database, str) and registry is None and hasattr(type(database), "connected"):
        settings, registry, connected = database.executor.postgres, database.registry, database.connected()
        poison_after = database.executor.settings.poison_after
    else:
        given = ", ".join(type(each).__name__ for each in (database, registry) if each is not None)
        raise ValueError(
            f"drain({given}): give a DSN and the registry of the handlers, drain(dsn, registry), or a service alone, "
            "which has its own, drain(service)"
        )
    registry.check_follow_ups()
    attempts: list[Attempt] = []
    due: float | None = None
    known = False  # when the next one becomes due; what has become due since is found by one more look
    async with connected, _opened(settings, registry, poison_after) as drainer:
        while True:
            if entries := await drainer.next(limit - len(attempts)):
                if len(attempts) >= limit:
                    raise NotDrained(
                        f"jobs are left after {limit} attempts ({attempts[-1]}): give limit= or less until="
                    )
                attempts += map(drainer.attempt, await drainer.run(entries))
                known = False
            elif not known:
                due, known = await drainer.next_due(), True
            elif due is None or due > left:
                return attempts
            else:
                left -= due
                await drainer.jump(due)
                known = False


@asynccontextmanager
async def _opened(settings: PostgresSettings, registry: Registry, poison_after: int) -> "AsyncGenerator[_Drainer]":
    connection = await connect(settings)
    try:
        await check(connection, service=None, schema=settings.schema_name)
    except BaseException:
        connection.terminate()
        raise
    drainer = _Drainer(settings, registry, connection, poison_after)
    try:
        await drainer.begin()
        yield drainer
    finally:
        ending, cut_off = asyncio.create_task(drainer.end()), None
        while not ending.done():
            try:
                await asyncio.wait([ending])
            except asyncio.CancelledError as error:  # a scope of anyio's cancels at each turn of the loop
                cut_off = error
        try:
            await connection.close(timeout=settings.call_seconds)
        finally:
            ending.result()
        if cut_off is not None:
            raise cut_off


class _Drainer:
    """An executor by hand: the same statements and the same workers, but each step when the test asks for it."""

    def __init__(
        self, settings: PostgresSettings, registry: Registry, connection: asyncpg.Connection, poison_after: int
    ) -> None:
        self.passed = 0.0
        self._schema = settings.schema_name
        self._registry = registry
        self._connection = connection
        self._poison_after = poison_after
        self._id = uuid4()
        self._cycle = self._fence = 0
        self._renew_at = now() + _RENEW_SECONDS
        # By id, as the first attempt saw it: the two are the key of a handler's effects, the same for all attempts.
        self._enqueued: dict[int, float] = {}
        self._gone: set[int] = set()  # jobs that somebody else has ended while they ran
        self._fenced: list[str] = []
        self._held: dict[str, OriginQueue] = {}
        self._transactional = Transactional(settings, self._fenced.append, lambda jobs: None)
        self._transactional.executor_id = self._id
        self._workers = Workers(registry, 1, self._transactional)

    async def begin(self) -> None:
        """Take the place of an executor."""
        await self._fetch(_EXECUTOR, "register", self._id, "test", 0)
        self._workers.start()

    async def end(self) -> None:
        """Give everything back. Where a handler was cut off its job is named no more: it waits, as before. A plain
        function cannot be cut off; another drain would run its job beside it."""
        await self._workers.stop()
        try:
            await self._let_return()
        finally:
            self._transactional.close()
        # By what the database says: statements that were cut off may have been done.
        for row in await self._fetch(_EXECUTOR, "standing", self._id, 0, 0):
            self._cycle, self._fence = row["cycle"], row["fence"]
            await self._record([], [])
            await self._fetch(_EXECUTOR, "release", self._id, row["origins"], row["epochs"])
            await self._fetch(_EXECUTOR, "deregister", self._id)

    async def _let_return(self) -> None:
        """Raises `NotDrained` where a plain function goes on for long: it may wait for the test that waits here."""
        give_up_at = now() + _PATIENCE_SECONDS
        if left := self._workers.in_threads():
            log.warning("%s: a plain function cannot be cut off; the drain ends when it has returned", left.type)
        while left := self._workers.in_threads():
            if now() > give_up_at:
                raise NotDrained(
                    f"{left.type}: its plain function goes on, {_PATIENCE_SECONDS:.0f} s after the drain was cut off. "
                    "Does it wait for the test, as for a lock? "
                    f"{left.origin.name} is free within {_LEASE.total_seconds():.0f} s"
                )
            await asyncio.sleep(_THREAD_SECONDS)
            await self._renew()

    async def next(self, most: int) -> list[Entry]:
        """The job that runs next, or up to `most` that go to their handler as one list; none where none is due."""
        await self._acquire()
        await self._renew()
        names, epochs = list(self._held), [queue.epoch for queue in self._held.values()]
        silent = self._registry.silent()
        await self._fetch(_EXECUTOR, "promote", self._id, names, epochs, _MOST_DUE, silent, None, None)
        known = [job_type.name for job_type in self._registry]
        rows = await self._first(known, names, 1)
        if not rows:
            return []
        size = self._workers.batch_sizes.get(rows[0]["type"])
        if size is not None and _may_share(rows[0]):
            together = await self._first([rows[0]["type"]], [rows[0]["origin"]], max(1, min(size, most)))
            rows = [row for row in together if _may_share(row)]
        return [self._entry(row) for row in rows]

    async def _first(self, types: list[str], origins: list[str], most: int) -> list[asyncpg.Record]:
        """The rows of the jobs that run next, none of which a newer one has superseded."""
        while True:
            rows = await self._fetch(_HERE, "next", types, origins, most)
            latest = [row for row in rows if row["policy"] == Policy.LATEST]
            if not latest or not await self._supersede(latest):
                return rows

    def _entry(self, row: asyncpg.Record) -> Entry:
        time = now()
        entry = Entry(
            row["id"],
            self._held[row["origin"]],
            row["type"],
            row["group"],
            row["position"],
            row["attempt"],
            row["failures"],
            row["losses"],
            row["priority"],
            row["policy"],
            None if row["overdue"] is None else time - row["overdue"],
            self._enqueued.setdefault(row["id"], row["enqueued"]),
            None if row["since_first"] is None else time - row["since_first"],
            row["headers"],
            row["payload"],
        )
        if entry.group is not None and entry.policy != Policy.PARALLEL:  # else it has nothing to block
            entry.lane = Lane(entry.origin, entry.group)
        return entry

    async def _supersede(self, rows: list[asyncpg.Record]) -> bool:
        """End the waiting jobs that a newer one of their group and type has followed; whether there were any."""
        lanes = [[row[name] for row in rows] for name in ("origin", "group", "type")]
        lanes.insert(1, [self._held[row["origin"]].epoch for row in rows])
        thinned = await self._fetch(_EXECUTOR, "supersede", self._id, *lanes, self._registry.silent(), _MOST_DUE)
        return any(lane["superseded"] for lane in thinned)

    async def _acquire(self) -> None:
        rows = await self._fetch(_HERE, "origins")
        wanted = [row[0] for row in rows if row[0] not in self._held]
        if not wanted:
            return
        for row in await self._fetch(_HERE, "acquire", self._id, wanted, 0, _LEASE, True):
            self._held[row["acquired"]] = OriginQueue(row["acquired"], row["acquired_epoch"])
        if taken := [name for name in wanted if name not in self._held]:
            raise NotDrained(
                f"an executor that runs has the jobs of {', '.join(taken)}: stop it, or let it run them; what a test "
                f"had that was killed is free within {_LEASE.total_seconds():.0f} s"
            )

    async def _renew(self) -> None:
        if now() >= self._renew_at:
            self._renew_at = now() + _RENEW_SECONDS
            epochs = int_array([queue.epoch for queue in self._held.values()])
            await self._fetch(_EXECUTOR, "renew", self._id, list(self._held), epochs, _LEASE)

    async def run(self, entries: list[Entry]) -> list[Finished]:
        """One attempt, and its record: the cycle's statement names the jobs, and records what came of them. Nothing is
        run where a person has changed jobs since these were chosen, nor what has killed its process again and again."""
        if (suspect := entries[0]).losses > self._poison_after:  # which is alone
            held = [(suspect, poison(self._registry[suspect.type], suspect), now(), now())]
            return held if await self._record([], held) else []
        if not await self._record([entry.id for entry in entries], []):
            return []
        self._workers.changed.clear()
        self._workers.claim(entries)
        while not self._workers.finished:
            if not await set_within(self._workers.changed, _LOOK_SECONDS):
                await self._look_up()
                await self._renew()
            self._workers.changed.clear()
            if self._fenced or self._workers.expired:
                raise NotDrained(f"another executor has taken {entries[0].origin.name} over: stop it before the drain")
        finished, self._workers.finished = unless_gone(self._workers.finished, self._gone), []
        while not await self._record([], finished):
            finished = unless_gone(finished, self._gone)
        return finished

    async def _record(self, running: list[int], finished: list[Finished]) -> bool:
        """Whether it holds. It does not where a person, or a handler by `Admin`, has changed jobs meanwhile."""
        number, silent = self._cycle + 1, self._registry.silent()
        arguments = cycle_arguments(self._id, number, self._fence, running, finished, silent, now())
        [row] = await self._fetch(_EXECUTOR, "cycle", *arguments)
        if row["applied"] == 1:
            self._cycle = number
            return True
        await self._look_up()
        return False

    async def _look_up(self) -> None:
        """How this drain stands with the database: another's takeover ends it; what a person ends, is stopped."""
        rows = await self._fetch(_EXECUTOR, "standing", self._id, self._fence, 0)
        held = dict(zip(rows[0]["origins"], rows[0]["epochs"], strict=True)) if rows else {}
        if not rows or any(held.get(queue.name) != queue.epoch for queue in self._held.values()):
            raise NotDrained("another executor has taken this drain's origins over: stop it before the drain")
        if rows[0]["fence"] != self._fence:  # else what is gone has ended in its handler's own transaction
            self._gone.update(rows[0]["gone"])
            self._workers.cancel_jobs(self._gone)
        self._cycle, self._fence = rows[0]["cycle"], rows[0]["fence"]

    def attempt(self, finished: Finished) -> Attempt:
        """What the test gets to see."""
        entry, outcome, _, _ = finished
        job_type = self._registry[entry.type]
        return Attempt(
            entry.type,
            entry.id,
            entry.origin.name,
            entry.group,
            entry.attempt,
            _payload(job_type, entry.payload),
            outcome.name,
            outcome.error,
            outcome.delay if isinstance(outcome, Again) else None,
            self.passed,
        )

    async def next_due(self) -> float | None:
        """Seconds until the next job becomes due."""
        rows = await self._fetch(_HERE, "next_due", [job_type.name for job_type in self._registry])
        return None if rows[0][0] is None else max(0.0, rows[0][0])

    async def jump(self, seconds: float) -> None:
        """Let that much time pass at once."""
        self.passed += seconds
        await advance(self._connection, seconds, schema=self._schema)

    async def _fetch(self, package: str, name: str, *arguments: Any) -> list[asyncpg.Record]:
        return await self._connection.fetch(load_sql(package, name, self._schema), *arguments)


def _may_share(row: asyncpg.Record) -> bool:
    """Whether the job may be in a list with others: one that has failed once, or was lost, is alone in its list."""
    return not row["failures"] and not row["losses"]


def _payload(job_type: JobType[Any], text: str | None) -> Any:
    """The payload as its handler got it; the stored text where it does not validate."""
    try:
        return job_type.load(text)
    except Exception:  # noqa: BLE001 - a model's own validators may raise anything
        return text
