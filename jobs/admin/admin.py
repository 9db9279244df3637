"""The interface of administration; the command line and the dashboard are made of it."""

import json
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Literal

from ...errors import ActionRefused, ConfigurationError, JobNotFound
from ..job import JobId
from ..outcome import ErrorInfo, OutcomeName
from ..retry import Discard
from .calls import Calls, Database
from .listing import Filter, list_jobs
from .many import act_on_each, clear
from .reading import attempt_row, audit_row, blocked_group, job_count, job_row, origin_row, pause_row
from .rows import (
    ActedOn,
    AttemptRow,
    AuditRow,
    BlockedGroup,
    ExecutorRow,
    JobCount,
    JobDetails,
    JobRow,
    JobState,
    OriginRow,
    Orphan,
    PauseRow,
)

__all__ = ["Admin"]

_MOST_ROWS = 10_000
_COUNTED = 10_000  # jobs behind the head of a blocked group; of an origin, in each of three states
_MOVE_SECONDS = 3_600.0  # nobody waits for it: 20 to 60 µs for each job
_LAST_ID = 2**63 - 1
_DECLINED = ErrorInfo.of(Discard()).error_class  # as the history has it
_UNSUCCESSFUL = (OutcomeName.DISCARDED, OutcomeName.FOLLOWED, OutcomeName.CANCELLED, OutcomeName.SUPERSEDED)


class Admin:
    """Looks at jobs and changes them, while executors run or while none does::

        admin = Admin(pool, actor="alice")
        for group in await admin.blocked_groups():
            await admin.skip_head(group.origin, group.group, head=group.head, reason="no such carrier")

    Each action is one transaction, fenced against the executor that holds the origin. When it has returned, no job
    starts that it cancelled or paused; what it woke starts at the holder's next look, within a second. Each is written
    to the audit, with its `reason`. See docs/administration.md.

    Every method raises `PostgresUnavailable`, after which the audit tells whether an action was done, and
    `SchemaTooOld` where Sidings' tables are missing or old.

    Args:
        database: A connection of asyncpg without an open transaction, or a pool.
        actor: Who acts, for the audit. Not needed to look.
        schema: Where Sidings' tables live.
        timeout: Seconds for each statement, but those of `move`.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(self, database: Database, *, actor: str = "", schema: str = "sidings", timeout: float = 60.0) -> None:
        if not isinstance(timeout, int | float) or not timeout > 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"timeout={timeout!r}: give the seconds that one statement may take")
        self._calls = Calls(database, schema, timeout)
        self._actor = actor

    # -- looking --------------------------------------------------------------------------------------------------

    async def jobs(
        self,
        *,
        state: JobState | str | None = None,
        type: str | None = None,
        origin: str | None = None,
        group: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[JobRow]:
        """Stored jobs, a page at a time.

        First come those that have a place, by origin and position, then the delayed by due time, then the held. Those
        that back off come by their next attempt when asked for by state; behind them those that have never failed, and
        wait since the clock was set back: of each origin's first 1,000, or of all where `origin` is given. A filter by
        type alone has no index: it reads until the page is full.

        Args:
            group: Of the `origin`, which is then needed.
            limit: Most rows of the page, 10,000 at most.
            after: The `cursor` of the last row of the page before.

        Raises:
            ActionRefused: An argument makes no sense; the message says what to give.
        """
        _check_limit(limit)
        if group is not None and origin is None:
            raise ActionRefused(f"group={group!r} needs origin=: a group is one of an origin")
        wanted = Filter(None if state is None else _state(state), type, origin, group)
        return await list_jobs(self._calls, wanted, limit, after)

    async def counts(
        self,
        *,
        by: Collection[Literal["state", "type", "origin"]] = ("state", "type"),
        origin: str | None = None,
        type: str | None = None,
    ) -> list[JobCount]:
        """How many jobs there are, by state, type or origin or several of these.

        It reads every row (or those of one origin): a third of a second for a million.

        Raises:
            ActionRefused: `by` names something else.
        """
        if unknown := set(by) - {"state", "type", "origin"}:
            raise ActionRefused(f"by={sorted(unknown)!r} is unknown: give some of 'state', 'type', 'origin'")
        rows = await self._calls.rows("count_jobs", "state" in by, "type" in by, "origin" in by, origin, type)
        counts = map(job_count, rows)
        return sorted(counts, key=lambda count: (count.origin or "", count.type or "", count.state or ""))

    async def show(self, job_id: int) -> JobDetails:
        """One job with its payload, its attempts, what persons did to it, and what keeps it from starting.

        The job may have ended.

        Raises:
            JobNotFound: Nothing is known of it.
        """
        rows = await self._calls.rows("show_job", job_id)
        attempts = await self._calls.rows("job_attempts", job_id)
        if not rows and not attempts:
            raise JobNotFound(f"there is no job {job_id}, and the history knows of none: check the number")
        row = job_row(rows[0]) if rows else None
        kept = [attempt["payload"] for attempt in attempts if attempt["payload"] is not None]
        return JobDetails(
            job_id,
            row,
            rows[0]["payload"] if rows else (kept[-1] if kept else None),
            json.loads((rows or attempts)[-1]["headers"] or "{}"),
            tuple(attempt_row(attempt) for attempt in attempts),
            tuple(audit_row(action) for action in await self._calls.rows("audit_of_job", job_id)),
            () if row is None else tuple(pause for pause in await self.pauses() if _concerns(pause, row)),
        )

    async def ended(
        self,
        *,
        outcomes: Collection[OutcomeName | str] = _UNSUCCESSFUL,
        since: datetime | None = None,
        before: datetime | None = None,
        type: str | None = None,
        origin: str | None = None,
        limit: int = 100,
    ) -> list[AttemptRow]:
        """The last attempts of jobs that ended, newest first.

        Args:
            outcomes: Default: discarded, followed, cancelled, superseded.
            since: Default: a day ago, by Postgres' clock.
            before: The `finished_at` of the last row gives the next page. Default: no end.
            limit: Most rows, 10,000 at most; there are more, where several jobs ended with the last one in one instant,
                as those of a list do.

        Raises:
            ActionRefused: An argument makes no sense; the message says what to give.
        """
        rows = await self._calls.rows("ended_jobs", *_ended(outcomes, since, before, type, origin, limit))
        return [attempt_row(row) for row in rows]

    async def requeueable(
        self,
        *,
        outcomes: Collection[OutcomeName | str] = (OutcomeName.DISCARDED,),
        since: datetime | None = None,
        before: datetime | None = None,
        type: str | None = None,
        origin: str | None = None,
        limit: int = 100,
        force: bool = False,
        declined: bool | Literal["only"] = False,
    ) -> list[AttemptRow]:
        """The last attempts of jobs that ended and were not requeued yet, in the order in which they were enqueued.

        So each group keeps its order when they are requeued one after the other. What was requeued is here no more, nor
        is what has succeeded or whose payload was erased, nor a message that is delivered again since its consumer was
        reset, nor what its handler has ended by `Discard`; so ask again, with the same `since` and `before`, until
        there are none.

        Args:
            outcomes: Default: discarded. What was cancelled or superseded was not to run, and in the place of what was
                followed another job runs: name these where they are to run.
            since: Default: a day ago. Give the same time each time: with a later one, those before it are left behind.
            before: Only those that ended before this. Without it there may be no end: what was requeued, and ends so
                once more, is another job.
            limit: As in `ended`.
            force: Also those that were requeued, and messages that are delivered again.
            declined: True: also those that their handler has ended by `Discard`. ``"only"``: no others. One of a
                subclass of `Discard` counts as any other.

        Raises:
            ActionRefused: An argument makes no sense; the message says what to give.
        """
        if declined not in (False, True, "only"):
            raise ActionRefused(f"declined={declined!r}: give False, True or 'only'")
        ended = _ended(outcomes, since, before, type, origin, limit)
        which = None if declined is True else declined == "only"
        rows = await self._calls.rows("requeueable_jobs", *ended, force, _DECLINED, which)
        return [attempt_row(row) for row in rows]

    async def blocked_groups(self, *, origin: str | None = None, limit: int = 100) -> list[BlockedGroup]:
        """Groups that wait for their head, the longest first: it backs off, is blocked, or the group is paused.

        Groups of a paused origin or type are not listed one by one, see `pauses`.
        """
        _check_limit(limit)
        rows = await self._calls.walk("blocked_groups", origin, limit, _COUNTED)
        without = [row["head"] for row in rows if row["error"] is None and row["state"] != JobState.WAITING]
        found = await self._calls.rows("last_errors", without) if without else []
        errors: dict[int, str] = {row["job_id"]: row["error"] for row in found}
        return [blocked_group(row, row["error"] or errors.get(row["head"])) for row in rows]

    async def pauses(self) -> list[PauseRow]:
        """What is paused, by whom and why; the newest first."""
        return [pause_row(row) for row in await self._calls.rows("pauses")]

    async def origins(self) -> list[OriginRow]:
        """Every origin that has jobs, or was ever held or paused: who holds it, and what is there.

        It reads what fails, and of the rest the entries of indexes: a tenth of a second for a million jobs.
        """
        return [origin_row(row) for row in await self._calls.walk("origins", _COUNTED)]

    async def executors(self) -> list[ExecutorRow]:
        """The executors that hold origins, by host and process."""
        return [ExecutorRow(**dict(row)) for row in await self._calls.rows("executors")]

    async def orphans(self) -> list[Orphan]:
        """Origins that have jobs and that nobody holds. One that is being handed over appears for a moment."""
        return [Orphan(*row) for row in await self._calls.walk("orphans")]

    async def audit(
        self, *, limit: int = 100, before: int | None = None, actor: str | None = None, action: str | None = None
    ) -> list[AuditRow]:
        """What was done, newest first.

        Args:
            before: The `id` of the last row of the page before.
        """
        _check_limit(limit)
        last = _LAST_ID if before is None else before
        return [audit_row(row) for row in await self._calls.rows("audit", last, actor, action, limit)]

    # -- one job --------------------------------------------------------------------------------------------------

    async def cancel(self, job_id: int, *, reason: str | None = None) -> JobState:
        """End a job as cancelled, in whatever state it is.

        If it runs, or is just about to, its handler is cancelled within a second and its outcome counts for nothing.
        What a transactional handler did is rolled back; other effects stay. The payload is kept in the history.

        Returns:
            The state in which the job was.

        Raises:
            JobNotFound: There is no such job; the message says how it ended, if that is known.
            Busy: Somebody else's transaction holds its row. Nothing has changed: try again.
        """
        return JobState(await self._calls.value("cancel_job", job_id, self._actor, reason))

    async def discard(self, job_id: int, *, reason: str | None = None) -> JobState:
        """As `cancel`, but the job ends as discarded."""
        return JobState(await self._calls.value("discard_job", job_id, self._actor, reason))

    async def retry_now(self, job_id: int, *, reason: str | None = None) -> JobState:
        """Let a job that is delayed, backs off or is blocked run now; in its group it keeps its place.

        One that was blocked starts its retry policy anew.

        Returns:
            The state in which the job was.

        Raises:
            JobNotFound: There is no such job; the message says how it ended, if that is known.
            ActionRefused: It is in another state; the message says what to do instead.
            Busy: Somebody else's transaction holds its row. Nothing has changed: try again.
        """
        return JobState(await self._calls.value("retry_job_now", job_id, self._actor, reason))

    async def release(self, job_id: int, *, reason: str | None = None) -> None:
        """Let a held job run, at the end of its group's order, with its failures and losses forgotten.

        Raises:
            JobNotFound: There is no such job; the message says how it ended, if that is known.
            ActionRefused: It is not held.
            Busy: Somebody else's transaction holds its row. Nothing has changed: try again.
        """
        await self._calls.value("release_job", job_id, self._actor, reason)

    async def requeue(
        self, job_id: int, *, reason: str | None = None, force: bool = False, finished_at: datetime | None = None
    ) -> JobId:
        """Bring back a job that was discarded, cancelled or superseded, as a new job at the end of its group's order.
        Or one that was followed: then both take effect.

        Type, origin, group, priority, payload and headers are the old ones, and so is `Job.idempotency_key`, by which
        receivers know what took effect all the same. It runs whatever its type's policy says, and has no unique key. Of
        what ended before migration 0068 only the correlation id is known of the headers.

        Args:
            force: Also if that was done before, or it is a message that is delivered again since a reset.
            finished_at: Of its last attempt, as `requeueable` tells it: in a long history it is found many times
                faster.

        Returns:
            The new job's id.

        Raises:
            JobNotFound: Nothing is known of such a job.
            ActionRefused: It has not ended, has succeeded, was requeued already, is a message that is delivered again,
                or its payload is not known.
            Busy: Somebody else's transaction is in the way. Nothing has changed: try again.
        """
        return JobId(await self._calls.value("requeue_job", job_id, self._actor, reason, force, finished_at))

    async def each(
        self,
        action: Literal["cancel", "discard", "retry now", "release"],
        job_ids: Iterable[int],
        *,
        reason: str | None = None,
        state: JobState | str | None = None,
    ) -> AsyncGenerator[ActedOn]:
        """Do the same to many jobs, and yield what became of each::

            async for done in admin.each("release", [job.id for job in held], reason="the model is mended"):
                print(done.job_id, done.error or "released")

        2,000 jobs are one transaction, with a rest of a second behind it in which executors get on; one by one, they
        would get to nothing else. What has been yielded stays done, whatever comes after; an error then says of how
        many jobs that is.

        Args:
            action: That of `cancel`, `discard`, `retry_now` or `release`.
            state: Do it only to those that are still in this state when their turn comes; the others are refused.

        Yields:
            For each job, in the order given: what these methods raise for one job stands in `ActedOn.error`, and the
            others are done.

        Raises:
            ActionRefused: There is no such action, or state.
            Busy: Somebody else's transaction is in the way of the next 2,000. Try again with those that are left.
        """
        still = None if state is None else _state(state).value
        doing = act_on_each(self._calls, self._actor, action, job_ids, reason, still)
        async with aclosing(doing):
            async for done in doing:
                yield done

    # -- groups ---------------------------------------------------------------------------------------------------

    async def release_group(self, origin: str, group: str, *, reason: str | None = None) -> JobId:
        """Let the head of a group that backs off or is blocked run now.

        Returns:
            The head's id.

        Raises:
            ActionRefused: No job waits in the group, or its head neither backs off nor is blocked.
            Busy: Somebody else's transaction holds a row. Nothing has changed: try again.
        """
        return JobId(await self._calls.value("release_group", origin, group, self._actor, reason))

    async def skip_head(self, origin: str, group: str, *, head: int | None = None, reason: str | None = None) -> JobId:
        """Discard the head of a group that backs off, is blocked or is paused, so that the next job follows.

        Args:
            head: The job that is meant; refused if it is another one by now.

        Returns:
            The id of the job that was discarded.

        Raises:
            ActionRefused: The head is another one, or none that the group waits for.
            Busy: Somebody else's transaction holds a row. Nothing has changed: try again.
        """
        return JobId(await self._calls.value("skip_head", origin, group, self._actor, reason, head))

    async def clear_group(self, origin: str, group: str, *, reason: str | None = None, running: bool = False) -> int:
        """Cancel all waiting and delayed jobs of a group. Held jobs stay.

        Large groups are cleared in transactions of 10,000, from the last job to the head, so that their executor never
        waits for long.

        Args:
            running: Cancel the one that runs, too.

        Returns:
            How many jobs were cancelled.

        Raises:
            Busy: Somebody else's transaction holds a row; the message says how many are cancelled already. Try again.
        """
        return await clear(self._calls, self._actor, origin, group, reason, running=running)

    # -- pauses, origins ------------------------------------------------------------------------------------------

    async def pause(
        self,
        *,
        reason: str,
        type: str | None = None,
        origin: str | None = None,
        group: str | None = None,
        topic: str | None = None,
    ) -> None:
        """Let no further job start of a type, of an origin, or of a group of an origin; or let no further message of a
        topic be handled, in any instance.

        What runs goes on; what is enqueued waits, and what comes waits in Kafka. Instances learn of the pause of a
        topic within a second or so. It concerns consumers whose offsets are in Postgres: neither stateless ones nor
        directories, nor messages that wait as jobs (pause their type, ``message:<topic>``).

        Raises:
            ActionRefused: It is paused already, and the message says by whom; or it is not clear what is meant: give a
                type, an origin, an origin and a group, or a topic.
            Busy: Somebody else's transaction holds a row. Nothing has changed: try again.
        """
        if topic is None:
            await self._calls.value("pause_jobs", self._actor, reason, type, origin, group)
        else:
            _check_alone(topic, type, origin, group)
            await self._calls.value("pause_topic", topic, self._actor, reason)

    async def resume(
        self,
        *,
        type: str | None = None,
        origin: str | None = None,
        group: str | None = None,
        topic: str | None = None,
        reason: str | None = None,
    ) -> None:
        """End a pause.

        Raises:
            ActionRefused: It is not paused.
            Busy: Somebody else's transaction holds a row. Nothing has changed: try again.
        """
        if topic is None:
            await self._calls.value("resume_jobs", self._actor, reason, type, origin, group)
        else:
            _check_alone(topic, type, origin, group)
            await self._calls.value("resume_topic", topic, self._actor, reason)

    async def move(self, origin: str, to: str, *, reason: str | None = None, lease_seconds: float = 60.0) -> int:
        """Give all jobs of an orphaned origin to another one, in the same order, behind what waits there.

        Jobs that others enqueue for the old origin meanwhile stay there: call it again. All are moved in one
        transaction, for order's sake: a million take a minute or so, and up to an hour is given.

        Args:
            to: An origin that some executor has held before.
            lease_seconds: The longest lease of the executors. An expired lease is believed only when Postgres has been
                up for that long; what stands there after a failover, only when an executor has known the new server
                for that long.

        Returns:
            How many jobs were moved.

        Raises:
            ActionRefused: An executor holds the origin, or may hold it; or none has ever held `to`.
            Busy: Somebody else's transaction is in the way. Nothing has changed: try again.
            ConfigurationError: `lease_seconds` is no such number.
        """
        if not 0 <= lease_seconds <= 1_000_000_000:
            raise ConfigurationError(f"lease_seconds={lease_seconds!r}: give the seconds of the longest lease")
        lease = timedelta(seconds=lease_seconds)
        return await self._calls.value("move_jobs", origin, to, self._actor, reason, lease, seconds=_MOVE_SECONDS)


def _ended(
    outcomes: Collection[OutcomeName | str],
    since: datetime | None,
    before: datetime | None,
    type: str | None,
    origin: str | None,
    limit: int,
) -> tuple[object, ...]:
    """The arguments by which both kinds of ended jobs are asked for."""
    _check_limit(limit)
    return [_outcome(outcome).value for outcome in outcomes], since, before, type, origin, limit


def _check_limit(limit: int) -> None:
    if not isinstance(limit, int) or not 1 <= limit <= _MOST_ROWS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ActionRefused(f"limit={limit!r}: give 1 to {_MOST_ROWS}")


def _state(state: JobState | str) -> JobState:
    try:
        return JobState(state)
    except ValueError:
        raise ActionRefused(f"state={state!r} is none: give one of {', '.join(JobState)}") from None


def _outcome(outcome: OutcomeName | str) -> OutcomeName:
    if outcome not in [name for name in OutcomeName if name.terminal]:
        raise ActionRefused(f"outcome {outcome!r} ends no job: give some of {', '.join(_UNSUCCESSFUL)}, succeeded")
    return OutcomeName(outcome)


def _check_alone(topic: str, *others: str | None) -> None:
    if any(other is not None for other in others):
        raise ActionRefused(
            f"topic={topic!r}: it is not clear what is meant: give it alone, without type=, origin= and group="
        )


def _concerns(pause: PauseRow, job: JobRow) -> bool:
    if pause.type is not None:
        return pause.type == job.type
    return pause.origin == job.origin and pause.group in (None, job.group)
