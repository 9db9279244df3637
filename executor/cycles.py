"""The cycle loop: one statement after the other, each recording what has finished and naming what runs next.

The next cycle starts when the last one has returned and gathers all that has happened meanwhile: batches grow under
load, latency stays low when idle. Where a good deal has finished before the answer is there, a second cycle follows the
first on another connection; the server lets it wait for the first, so neither side stands idle while the other works.
Their answers count in the order of their numbers. As soon as one is void, refused or missing, nothing new is sent until
it is known what has become of both (docs/decisions/0018-two-cycles.md).
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from math import inf
from typing import Any
from uuid import UUID

import asyncpg

from ..errors import PostgresUnavailable
from ..jobs import SUCCEEDED, Again, Committed, End, Hold, Registry
from ..legible import told
from ..outage import Outage
from ..schema import int_array, load_sql
from ..waiting import set_within
from .attempts import Finished, poison
from .clock import now
from .deferral import Deferral
from .expected import Expected
from .flights import Batch, Flight, applied, merged
from .link import Backoff, Link, refuses_writes, rest_after
from .metrics import ExecutorMetrics
from .queues import NOTHING_PAUSED, Entry
from .recording import cycle_arguments, follows, plain, without_follow_ups
from .scheduler import Scheduler
from .standing import Standing
from .workers import Workers, runs_alone

__all__ = ["CycleLoop"]

log = logging.getLogger("sidings.executor")

_MAX_AHEAD = 2000  # jobs named beyond the free workers; a kill charges them all
# Outcomes that are put off, since their rows are locked or Postgres refuses them, before nothing more starts: all that
# has run would run again, and be a suspect, should this process end.
_MOST_PUT_OFF = 2_000
_ENOUGH = 300  # outcomes that are worth a second cycle while the first is under way
_REFUSED_RETRY_SECONDS = 30.0
_QUICK_READ = 0.05  # seconds that a cycle may take which reads; all outcomes wait for it
# What some rows bring about and others do not: values, constraints, a text too long for an index that somebody has put
# on the history, a trigger there that raises.
_REFUSED = (
    *(asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.ProgramLimitExceededError),
    *(asyncpg.PLPGSQLError, asyncpg.ExternalRoutineError, asyncpg.WithCheckOptionViolationError),
)


class CycleLoop:
    """Owns the executor's row: its `cycle` number and the set of jobs that it names.

    links: one for each cycle that may be in flight at once.
    on_fenced: called with the origins that turned out to be another's, before the rest of the cycle is repeated.
    on_replaced: the server has been replaced by another one, which may have lost commits; forget all that was read.
    on_read: the reader should read what a person has changed, what was put back, what a cycle was to read, or what
    follows a job that was given up.
    on_forgotten: all that waits is to be read anew.
    on_delayed: called with the due time of a job that is to be promoted later. on_hungry: the reader should read if
    there is more.
    """

    def __init__(
        self,
        links: Sequence[Link],
        scheduler: Scheduler,
        workers: Workers,
        registry: Registry,
        metrics: ExecutorMetrics,
        *,
        schema: str,
        poison_after: int,
        on_fenced: Callable[[list[str]], None],
        on_replaced: Callable[[], None],
        on_read: Callable[[], None],
        on_forgotten: Callable[[], None],
        on_delayed: Callable[[float], None],
        on_hungry: Callable[[], None],
    ) -> None:
        self.executor_id: UUID | None = None
        self.paused = False  # choose nothing new: the executor is stopping
        self._links = links
        self._link = links[0]
        self._scheduler = scheduler
        self._workers = workers
        self._metrics = metrics
        self._registry = registry
        self._poison_after = poison_after
        self._on_read = on_read
        self._on_delayed = on_delayed
        self._on_hungry = on_hungry
        self._following_sql = load_sql(__package__, "cycle", schema)
        self._sql = without_follow_ups(self._following_sql)
        self._name_sql = load_sql(__package__, "name", schema)
        self._name_and_read_sql = load_sql(__package__, "name_and_read", schema)
        self._cycle = 0
        self._ahead = 0.0
        self._tried_again = 0  # outcomes that were put off, and go out with the cycle that is under way
        self._uncounted: list[list[Finished]] = []
        self._took: list[float] = []  # seconds of cycles that are not counted yet
        self.outage = Outage(log, "what became of jobs could not be recorded")
        self._named: dict[int, Entry] = {}
        self._unnamed = False  # what was put back may stand in the row, and no cycle has been gathered since
        self._refused: dict[Entry, str] = {}  # outcomes that Postgres refuses in any form, and why
        self._expected = Expected(scheduler)
        self._reads_from = 0.0  # until then no cycle reads: the last one that did has taken long
        self._barriers: list[asyncio.Future[None]] = []
        self._signal = workers.changed
        self._flights: deque[Flight] = deque()
        self._deferral = Deferral(self._link, schema=schema, holds=scheduler.holds)
        self.standing = Standing(
            self._link,
            scheduler,
            workers,
            metrics,
            schema=schema,
            put_back=self._put_back,
            on_fenced=on_fenced,
            on_replaced=on_replaced,
            on_read=on_read,
            on_forgotten=on_forgotten,
            signal=self.signal,
        )

    def begin(self, executor_id: UUID) -> None:
        """Start with a fresh row."""
        self.executor_id, self._cycle = executor_id, 0
        self.standing.begin(executor_id)
        self._named.clear()
        self._unnamed = False
        self._refused.clear()
        self._expected = Expected(self._scheduler)
        self._deferral.clear()
        self._flights.clear()

    def signal(self) -> None:
        """Something has finished or become ready."""
        self._signal.set()

    def expect(self, jobs: Mapping[str, Sequence[int]]) -> bool:
        """These jobs, by origin, have just been committed: name them at once, if they could start then. Returns whether
        the cycle brings them as well; else they are to be read meanwhile."""
        scheduler = self._scheduler
        if self.paused or scheduler.pauses is not NOTHING_PAUSED or scheduler.runnable() or scheduler.waits_for_room():
            return False
        self._signal.set()
        all_named = self._expected.tell(jobs, self._workers.capacity())
        if not all_named or self._flights or self._workers.finished or now() < self._reads_from:
            return False
        self._expected.unread.update(id for ids in jobs.values() for id in ids)
        return True

    def busy_seconds(self) -> float:
        """How long the oldest cycle that is under way has been waiting for its end; 0 when none is."""
        flights = list(self._flights)  # any thread may ask: the cycle may end between two looks
        return now() - flights[0].sent if flights else 0.0

    def stuck(self) -> bool:
        """Whether nothing starts, because too many outcomes cannot be recorded."""
        return len(self._deferral) + self._tried_again >= _MOST_PUT_OFF

    def refused(self) -> dict[int, str]:
        """Ids of jobs whose outcomes Postgres refuses in any form, each with the reason. Any thread may ask."""
        holds = self._scheduler.holds  # an origin may go while a cycle with such an outcome is under way
        return {entry.id: error for entry, error in list(self._refused.items()) if holds(entry)}

    def under_way(self) -> set[str]:
        """Origins of the cycles whose fate is not known yet."""
        contents = [content for flight in self._flights for content in flight.contents]
        ending = {f[0].origin.name for finished, _ in contents for f in finished}
        return ending | {entry.origin.name for _, chosen in contents for entry in chosen}

    async def barrier(self) -> None:
        """Return when a cycle that started after this call has been acknowledged."""
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._barriers.append(reached)
        self._signal.set()
        await reached

    async def run(self) -> None:
        """Cycle for ever. Raises `Deposed` when the executor's row is gone."""
        try:
            while True:
                if not self._signal.is_set():
                    await self._wait()
                self._signal.clear()
                if self._flights and self._flights[0].answer.done():
                    await self._land()
                if not self._flights:
                    due = await self._deferral.take_due() if self._deferral else []
                    self._workers.finished += due
                    self._tried_again = len(due)
                    if self.standing.doubtful:
                        await self.standing.look_up()
                if self._may_send():
                    batch = self._gather()
                    if batch is not None:
                        self._send(batch)
                    asyncio.get_running_loop().call_soon(self._look_after)  # behind what was sent, or has been claimed
                    if batch is None and self._workers.claimed:
                        await asyncio.sleep(0)
        finally:
            for flight in self._flights:
                flight.answer.cancel()
            await asyncio.gather(*(flight.answer for flight in self._flights), return_exceptions=True)

    def _may_send(self) -> bool:
        """The second of two cycles has to be worth it; and what has to wait for a quiet moment must get one."""
        if not self._flights:
            return True
        if len(self._flights) == len(self._links) or self.standing.doubtful or self._deferral or self._barriers:
            return False
        return len(self._workers.finished) >= _ENOUGH

    def _look_after(self) -> None:
        """What nobody waits for: metrics, and whether the reader should read."""
        if self._scheduler.hungry or self._scheduler.crowded or self._scheduler.memory.low():
            self._on_hungry()
        took, self._took = self._took, []
        for seconds in took:
            self._metrics.cycle_seconds.observe(seconds)
        uncounted, self._uncounted = self._uncounted, []
        for finished in uncounted:
            self._metrics.record(finished)

    async def _wait(self) -> None:
        dues = () if self._flights else (self._scheduler.next_due(), self._expected.due(), self._deferral.due())
        due = min((t for t in dues if t is not None), default=None)
        await set_within(self._signal, None if due is None else max(0.0, due - now()))

    # -- what goes into a cycle -----------------------------------------------------------------------------------

    def _gather(self) -> Batch | None:
        scheduler, workers, time = self._scheduler, self._workers, now()
        if workers.expired:
            self._put_back(workers.expired, time)
            workers.expired = []
        finished, workers.finished = workers.finished, []
        if finished and any(
            scheduler.origins.get(queue.name) is not queue for queue in {f[0].origin for f in finished}
        ):
            finished = [f for f in finished if scheduler.holds(f[0])]
        flying = [flight.batch for flight in self._flights]
        slow, limited, back = workers.share_out([batch.chosen for batch in flying])
        scheduler.share_out(slow, limited)
        self._put_back(back, time)
        scheduler.wake_due(time)
        chosen: list[Entry] = []
        if not self.paused and not self.stuck():
            recent = len(finished) + sum(len(batch.finished) for batch in flying)
            self._ahead = min(_MAX_AHEAD, max(2.0 * recent, self._ahead * 0.9 - 1))
            limit = workers.capacity() + int(self._ahead) - sum(len(batch.chosen) for batch in flying)
            if limit > 0 and scheduler.runnable():
                chosen = self._start_named(self._without_poison(scheduler.choose(limit, time), finished), time)
            if finished and limit > len(chosen):
                chosen += self._successors(finished, limit - len(chosen), time)
            if chosen and workers.batch_sizes:
                chosen += self._fill_batches(chosen, time)
        if not (finished or chosen or self._unnamed or self._barriers or self._expected.has_news(time)):
            return None
        self._unnamed = False
        early = {} if self._flights else self._expected.sending()
        if self.paused or scheduler.pauses is not NOTHING_PAUSED:  # what is paused their ids alone do not tell
            early = {}
        unread, self._expected.unread = self._expected.unread, set()
        reads = [] if finished else [id for id in early if id in unread]
        if len(reads) < len(unread):
            self._on_read()
        barriers, self._barriers = self._barriers, []
        named = self._named
        for f in finished:
            named.pop(f[0].id, None)
        for entry in chosen:
            named[entry.id] = entry
        return Batch(finished, chosen, barriers, scheduler.timeline, early, reads)

    def _start_named(self, chosen: list[Entry], time: float) -> list[Entry]:
        """Start what the last cycle has named already; returns the others. Only here, in the task that also looks at
        what has gone wrong: never while a cycle or a look is on its way."""
        start = self._expected.started(chosen, time)
        if start:
            self._named |= {entry.id: entry for entry in start}
            self._workers.claim(start)
            chosen = [entry for entry in chosen if entry not in start]
        return chosen

    def _successors(self, finished: list[Finished], limit: int, time: float) -> list[Entry]:
        """The next jobs of groups whose running job's success goes out with this cycle. They come last: a group that
        has been waiting for its turn goes first."""
        ending = [
            entry
            for entry, outcome, _, _ in finished
            if entry.lane is not None and (outcome is SUCCEEDED or isinstance(outcome, Committed))
        ]
        return self._scheduler.hand_over(ending, limit, time)

    def _fill_batches(self, chosen: list[Entry], time: float) -> list[Entry]:
        """More jobs for those that run in batches: a batch takes one worker, however large it is."""
        sizes = self._workers.batch_sizes
        together = (e for e in chosen if e.type in sizes and not runs_alone(e))
        counts = Counter((entry.origin, entry.type) for entry in together)
        wanted = {key: left for key, count in counts.items() if (left := -count % sizes[key[1]])}
        room = _MAX_AHEAD - len(self._named) - len(chosen)
        return self._scheduler.choose_more(wanted, room, time) if wanted and room > 0 else []

    def _without_poison(self, chosen: list[Entry], finished: list[Finished]) -> list[Entry]:
        """A job that keeps killing executors does not start."""
        entry = self._scheduler.suspects.running  # no other job that has been chosen has any losses
        if entry is None or entry.losses <= self._poison_after or entry not in chosen:
            return chosen
        finished.append((entry, poison(self._registry.get(entry.type), entry), now(), now()))
        return [other for other in chosen if other is not entry]

    def _put_back(self, entries: list[Entry], time: float) -> None:
        for entry in entries:
            if self._named.get(entry.id) is entry:  # to persons it runs, and a kill charges it, until a cycle goes out
                del self._named[entry.id]
                self._unnamed = True
            if self._scheduler.holds(entry):
                self._scheduler.put_back(entry, time)
                if not entry.origin.draining and not self._scheduler.knows(entry.id):  # it is to be read again
                    self._on_read()

    def unname(self, entries: list[Entry]) -> None:
        """Claimed jobs that will not start after all: put back, and named no more from the next cycle on."""
        self._put_back(entries, now())
        self._signal.set()

    def forget(self, origin: str) -> None:
        """The origin is not ours any more: name none of its jobs."""
        for entry in [e for e in self._named.values() if e.origin.name == origin]:
            del self._named[entry.id]
        for entry in [e for e in self._refused if e.origin.name == origin]:
            del self._refused[entry]

    # -- sending it -----------------------------------------------------------------------------------------------

    def _send(self, batch: Batch) -> None:
        number, sent = self._cycle + 1 + len(self._flights), now()
        taken = [flight.link for flight in self._flights]
        link = next(link for link in self._links if link not in taken)  # the second only where there are two cycles
        answer = asyncio.create_task(self._ask(link, batch, number, sent), name="sidings cycle")
        answer.add_done_callback(lambda _: self._signal.set())
        self._flights.append(Flight(batch, number, sent, link, answer, [(batch.finished, batch.chosen)]))

    def _ask(self, link: Link, batch: Batch, number: int, sent: float) -> Coroutine[Any, Any, asyncpg.Record | None]:
        if batch.finished:
            recorded = self._arguments(batch, number, sent)
            return link.fetchrow(self._following_sql if follows(recorded) else self._sql, *recorded)
        named = int_array([*self._named, *batch.early])
        arguments = self.executor_id, number, self.standing.fence, named, batch.timeline
        return (
            self._name_and_read(link, batch, *arguments) if batch.reads else link.fetchrow(self._name_sql, *arguments)
        )

    async def _name_and_read(self, link: Link, batch: Batch, *arguments: object) -> asyncpg.Record | None:
        began = now()
        try:
            batch.rows = await link.fetch(self._name_and_read_sql, *arguments, int_array(batch.reads))
        finally:
            if (took := now() - began) > _QUICK_READ:
                self._reads_from = now() + rest_after(took)
        return batch.rows[0] if batch.rows else None

    def _leave_to_reader(self, batch: Batch) -> None:
        """What it was to read does not come with it."""
        if batch.reads:
            batch.reads = []
            self._on_read()

    async def _land(self) -> None:
        """Deal with the answer of the oldest cycle."""
        flight = self._flights[0]
        if flight.applied():
            self._landed(flight)
        elif len(self._flights) == 1:
            flight.batch.early = {}
            self._leave_to_reader(flight.batch)
            self._expected.doubt()
            flight.number = await self._commit(flight.batch, flight.number, flight.answer)
            self._landed(flight)
        else:
            await self._settle()
        self._signal.set()
        if self._workers.claimed and not self._flights and not self._workers.finished:
            await asyncio.sleep(0)  # let the workers that were just given jobs run before the next gathering

    async def _settle(self) -> None:
        """The first of two cycles in flight has gone wrong: find out what has become of both, then record in one cycle
        what has not been recorded. The second one needs the first; if it is committed, both are."""
        flights = list(self._flights)
        for flight in flights:
            self._leave_to_reader(flight.batch)
        await asyncio.wait([flight.answer for flight in flights])
        if not flights[-1].applied() and any(flight.unknown() for flight in flights):
            reached, timeline = await self.standing.disown([flight.batch for flight in flights])
        elif flights[-1].applied():
            reached, timeline = flights[-1].number, flights[-1].batch.timeline
        else:
            reached, timeline = self._cycle, None
        while flights and flights[0].number <= reached and flights[0].batch.timeline in (None, timeline):
            self._landed(flights.pop(0))
        if flights:
            first = flights[0]
            first.batch = merged([flight.batch for flight in flights])
            first.batch.finished = [f for f in first.batch.finished if self._scheduler.holds(f[0])]
            first.contents = [content for flight in flights for content in flight.contents]
            self._flights = deque([first])
            number, sent = self._cycle + 1, now()
            first.number = await self._commit(first.batch, number, self._ask(self._link, first.batch, number, sent))
            self._landed(first)

    def _landed(self, flight: Flight) -> None:
        """It is committed, and so are all before it."""
        self._flights.remove(flight)
        self._cycle = flight.number
        self._took.append(now() - flight.sent)
        applied = flight.applied()
        matched = applied and not self._count_unmatched(flight.batch, flight.answer.result())
        self._acknowledged(flight.batch, heard=matched)
        if applied and not self._flights:
            self._expected.acknowledged(flight.batch.early)
            if self._expected.read(flight.batch.reads, flight.batch.rows):
                flight.batch.reads = []
        self._leave_to_reader(flight.batch)

    def _count_unmatched(self, batch: Batch, row: asyncpg.Record | None) -> int:
        """How many of its outcomes have found no job: somebody else has ended it, whatever its handler still said."""
        if row is None or not (missing := len(batch.finished) - row["succeeded"] - row["other"]):
            return 0
        missing -= sum(isinstance(f[1], Committed) for f in batch.finished)
        self._metrics.unmatched.inc(missing)
        return missing

    async def _commit(self, batch: Batch, number: int, answer: Awaitable[asyncpg.Record | None]) -> int:
        """Send the batch again until it is known to be committed; `answer` is that of the first sending. Returns its
        number then. It is the only cycle under way."""
        backoff = Backoff()
        while True:
            try:
                row = await answer
                self.outage.over()
                if applied(row):
                    self._count_unmatched(batch, row)
                    return number
                following = await self._resolve(batch, number)
                if following is None:
                    return number
                number = following
            except PostgresUnavailable as error:
                # Whether it has committed is unknown. The same number goes out again: only one of the two can apply.
                self.outage.failed(error)
                await backoff.sleep()
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
                if not await self._leave_out_locked(batch):  # a whole table, say
                    self.outage.failed(f"{type(error).__name__}: {told(error)}")
                    await backoff.sleep()
            except asyncpg.PostgresError as error:
                if batch.finished and isinstance(error, _REFUSED) and not refuses_writes(error):
                    self._bisect(batch, error)
                else:  # perhaps a full disk, or a trigger that somebody has put on the executor's row
                    self.outage.failed(f"{type(error).__name__}: {told(error)}")
                    await backoff.sleep()
            answer = self._ask(self._link, batch, number, now())

    async def _resolve(self, batch: Batch, number: int) -> int | None:
        """The compare-and-set did not match: find out why.

        Returns None if an earlier sending of this batch has committed, else the number to send the rest of it with.
        """
        cycle, timeline = await self.standing.find_out([batch])
        if cycle == number and batch.timeline in (None, timeline):
            return None
        batch.finished = [f for f in batch.finished if self._scheduler.holds(f[0])]
        batch.timeline = self._scheduler.timeline
        return cycle + 1  # not always `number`: a database restored from a backup may have gone back

    def _arguments(self, batch: Batch, number: int, sent: float) -> tuple[object, ...]:
        silent = self._registry.silent()
        return cycle_arguments(
            self.executor_id,
            number,
            self.standing.fence,
            [*self._named, *batch.early],
            batch.finished,
            silent,
            sent,
            batch.timeline,
        )

    async def _leave_out_locked(self, batch: Batch) -> bool:
        """Somebody else's transaction holds a row: record the rest, and that row a little later. False: there is no
        such row."""
        locked = await self._deferral.locked(batch.finished)
        if locked:
            log.warning("jobs %s are locked by another transaction; their outcomes wait", sorted(locked)[:5])
            self._leave_out(batch, [f for f in batch.finished if f[0].id in locked], self._deferral.locked_seconds)
        return bool(locked)

    def _bisect(self, batch: Batch, error: Exception) -> None:
        """Postgres refuses a value: halve the batch until the culprit stands alone, then record it without its texts.

        What is refused even so (a constraint that somebody put on the history, say) is tried again now and then; its
        group waits, the others do not.
        """
        why = f"{type(error).__name__}: {told(error)}"
        log.error("a cycle was refused (%s); %s outcomes", why, len(batch.finished))
        if len(batch.finished) > 1:
            self._leave_out(batch, batch.finished[len(batch.finished) // 2 :], 0.0)
            return
        without_texts = plain(batch.finished[0])
        if without_texts[1] == batch.finished[0][1]:
            self._refused[without_texts[0]] = why
            self._leave_out(batch, batch.finished, _REFUSED_RETRY_SECONDS)
        else:
            batch.finished = [without_texts]

    def _leave_out(self, batch: Batch, finished: list[Finished], seconds: float) -> None:
        """Record these outcomes of the batch later, and name no successors of theirs until then."""
        left = {f[0] for f in finished}
        batch.finished = [f for f in batch.finished if f[0] not in left]
        early = {e for e in batch.chosen if e.lane is not None and e.lane.ending in left}
        if early:
            batch.chosen = [e for e in batch.chosen if e not in early]
            self._put_back(list(early), now())
        for entry, *_ in self._deferral.add(finished, seconds):
            self._named[entry.id] = entry  # until its outcome is recorded, the attempt stays named

    # -- what follows from it -------------------------------------------------------------------------------------

    def _acknowledged(self, batch: Batch, *, heard: bool) -> None:
        """It is committed. heard: it was the answer that said so, and all outcomes have found their jobs."""
        if batch.finished:
            self._recorded(batch, heard)
        if batch.chosen:
            self._start(batch.chosen)
        for reached in batch.barriers:
            if not reached.done():
                reached.set_result(None)

    def _recorded(self, batch: Batch, heard: bool) -> None:
        """Where the outcomes were not heard, somebody may have ended what failed, or let it go on since, and what was
        read of that is known already: a group whose head is to run again is read once more."""
        scheduler, time = self._scheduler, now()
        self._uncounted.append(batch.finished)
        if self._refused:
            for f in batch.finished:
                self._refused.pop(f[0], None)
        succeeded = [f[0] for f in batch.finished if f[1] is SUCCEEDED]
        scheduler.all_ended(succeeded, time)
        for entry, outcome, _, _ in batch.finished if len(succeeded) < len(batch.finished) else ():
            if outcome is SUCCEEDED:
                continue
            if isinstance(outcome, Again):
                due = time + outcome.delay
                scheduler.again(entry, due if heard else time)
                if entry.lane is None:
                    self._on_delayed(due)
            elif isinstance(outcome, Hold) and outcome.blocks:
                scheduler.again(entry, inf if heard else time)
            else:
                scheduler.ended(entry, time)
                if isinstance(outcome, End) and outcome.follow_up is not None:
                    self._on_read()  # it is there already

    def _start(self, start: list[Entry]) -> None:
        held, queues, time = self._scheduler.origins, {entry.origin for entry in start}, now()
        live = {q for q in queues if held.get(q.name) is q and not q.draining and time < q.deadline and not self.paused}
        if len(live) < len(queues):
            self.unname([entry for entry in start if entry.origin not in live])
            start = [entry for entry in start if entry.origin in live]
        if start:
            self._workers.claim(start)
