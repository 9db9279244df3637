"""Executors under all that jobs can be, at once: types and policies in the same groups, unique keys, lists,
transactions that do not commit, jobs that enqueue jobs, persons, and processes, servers and connections that die or
stand still.

What happened to each row stands in the table `event`, which a trigger writes, with the transaction's id: so it is known
when it committed. What handlers did stands in the journal. `Proof` compares both with the history.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import asyncpg
from sidings.errors import ActionRefused, SidingsError
from sidings.executor import now
from sidings.jobs.admin import Admin

from .executor_worker import (
    BATCH,
    FOLLOWED,
    GROUPS,
    LOCK,
    OF_LATEST,
    OF_PARALLEL,
    OF_SERIAL,
    TRANSACTIONAL,
    Work,
    registry_of,
)
from .fleet import AWAY, Fleet, Member, Run, runs_of, shares
from .support import answers, connected, eventually
from .test_chaos import Features

WORKER = Path(__file__).with_name("executor_worker.py")
ORIGINS = [f"t/{number}" for number in range(6)]
ORPHAN = "legacy/0"  # nobody holds it
LEASE = 2.0
STILL = 60.0  # seconds in which nothing moves
ENOUGH = 200  # jobs that are due, before less comes in
TERMINAL = ("succeeded", "discarded", "followed", "cancelled", "superseded")
NEVER_GIVES_UP = ("step", "lists", "thread", "timed", "transfer", "newest", "loose", "owed")
TABLES = """
    CREATE TABLE entity (id text PRIMARY KEY, n int NOT NULL DEFAULT 0);
    CREATE TABLE person (id int PRIMARY KEY, n int NOT NULL);
    INSERT INTO person SELECT i, 0 FROM generate_series(0, 11) i;
    CREATE TABLE at_commit (what text);
    CREATE TABLE event (seq bigserial, kind text, job bigint, type text, origin text, "group" text, policy int,
                        position bigint, attempt int, at timestamptz, xid xid8, after bigint);
    CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        j sidings.job := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
    BEGIN
        INSERT INTO public.event (kind, job, type, origin, "group", policy, position, attempt, at, xid, after)
        VALUES (TG_OP, j.id, j.type, j.origin, j."group", j.policy, j.position, j.attempt, clock_timestamp(),
                pg_current_xact_id(), CASE WHEN NOT j.headers ? 'sidings-idempotency-key'  -- else it was requeued
                                      THEN (j.headers ->> 'sidings-job-id')::bigint END);
        RETURN NULL;
    END $$;
    CREATE TRIGGER noted AFTER INSERT OR UPDATE OR DELETE ON sidings.job FOR EACH ROW EXECUTE FUNCTION noted();
    CREATE FUNCTION refused() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF NEW.what = 'gone' THEN
            PERFORM pg_terminate_backend(pg_backend_pid());
        ELSIF NEW.what = 'sleep' THEN
            PERFORM pg_sleep(2);
        ELSE
            RAISE 'as if' USING ERRCODE = NEW.what;
        END IF;
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER refused AFTER INSERT ON at_commit DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW EXECUTE FUNCTION refused();
"""
EVENTS = """
    SELECT *, date_part('epoch', at)::float8 AS at_s,
           date_part('epoch', pg_xact_commit_timestamp(xid::xid))::float8 AS committed
    FROM event ORDER BY seq
"""
LEFT = """
    SELECT id, type, origin, "group", policy, position, run_at, attempt, failures, losses, held FROM sidings.job
    ORDER BY origin, "group", position LIMIT 12
"""
# Neither held, nor of an origin that nobody has, nor behind a job that blocks its group until a person comes.
DUE = f"""
    SELECT count(*) FROM sidings.job j
    WHERE j.held IS NULL AND j.origin <> '{ORPHAN}' AND j.run_at IS DISTINCT FROM 'infinity' AND (
        j.policy = 2 OR NOT EXISTS (
            SELECT FROM sidings.job b
            WHERE b.origin = j.origin AND b."group" = j."group" AND b.position < j.position AND b.run_at = 'infinity'
        )
    )
"""
BY_SQL = """
    SELECT sidings.enqueue('step', json_build_object('g', $2::text, 'n', $3::int), origin => $1, "group" => $2)
"""
RUNNING = """
    SELECT j.id, j.origin, j."group" FROM sidings.executor e, unnest(e.running) r (id) JOIN sidings.job j USING (id)
    ORDER BY random() LIMIT 1
"""
HELD = "SELECT id FROM sidings.job WHERE held IS NOT NULL"


class ExecutorWorld(Features):
    """What happens, and what comes in meanwhile."""

    takeover_seconds = 10.0
    pause_seconds = 1.5  # between two things that happen, at most
    between_seconds = 0.1  # between two transactions that come in, at most

    def __init__(self, *arguments: Any, directory: Path) -> None:
        super().__init__(*arguments)
        self.directory = directory
        self.number = 0
        self.types = registry_of(self.fleet.journal)
        self.orphans: list[str] = []

    def things(self) -> list[Callable[[int], Awaitable[None]]]:
        return [
            *[self.kill, self.pause, self.stop, self.shuffle, self.shuffle, self.leave_stale] * 2,
            *[self.outlast] * 12,
            *[self.fault] * 8,
            *[self.cut, self.silence, self.kill_server, self.pause_server, self.restart_server, self.crash_backend],
            *self.what_persons_do(),
            self.depose,
        ]

    def what_persons_do(self) -> list[Callable[[int], Awaitable[None]]]:
        return [
            *[self.cancel_job, self.cancel_running, self.hurry_job, self.pause_jobs, self.see_to, self.see_to] * 3,
            *[self.requeue, self.move, self.move, self.lock, self.terminate, self.interrupt, self.enqueue_many] * 2,
        ]

    async def happen(self) -> None:
        things = self.things()
        async with asyncio.TaskGroup() as group:
            while True:
                thing, number = self.random.choice(things), self.random.randrange(self.size)
                self.done.append(f"{thing.__name__}({number})")
                group.create_task(_do(thing, number))
                await asyncio.sleep(self.random.uniform(0.05, self.pause_seconds))

    def spawn(self, number: int) -> Member:
        name = f"member{number}-{len(self.fleet.members)}"
        log = self.directory / f"{name}.log"
        concurrency = self.random.choice([2, 5, 30])
        executor = self.fleet.executor | {"concurrency": concurrency, "notify": number == 2}
        command = [
            *(sys.executable, str(WORKER), self.proxies[number].dsn, str(self.directory / "journal"), name),
            *("--executor", json.dumps(executor)),
            *("--postgres", json.dumps(self.fleet.postgres | {"pgbouncer": number == 1})),
            *("--origins", json.dumps(sorted(self.dealt.get(number, []))), "--generation", str(self.generation)),
            *("--enough", str(self.enough())),
        ]
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=env)
        self.fleet.members.append(Member(self.fleet, name, process, log))
        return self.fleet.members[-1]

    def reassign(self, *, stale: int | None = None) -> None:
        """Deal the origins anew; now and then some go to nobody."""
        calm = (self.directory / "calm").exists()
        self.orphans = [] if calm else [name for name in ORIGINS[1:] if self.random.random() < 0.1]
        self.generation += 1
        order = [name for name in self.random.sample(ORIGINS, len(ORIGINS)) if name not in self.orphans]
        share = shares(order, self.members[: self.random.randint(1, self.size)])
        for number, member in enumerate(self.members):
            self.dealt[number] = share.get(member, [])
            if number != stale:
                member.assign(self.dealt[number], self.generation)

    # -- what comes in

    async def produce(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(self.produce_some())

    async def produce_some(self) -> None:
        while True:
            with suppress(*AWAY, asyncpg.PostgresError):
                async with connected(self.fleet.dsn) as connection:
                    while True:
                        await self.write(connection)
                        enough = await connection.fetchval(DUE) >= ENOUGH
                        await asyncio.sleep(0.5 if enough else self.random.uniform(0, self.between_seconds))
            async with self.busy:
                pass  # the server, where it was killed or paused, is back
            await asyncio.sleep(0.1)

    async def write(self, connection: asyncpg.Connection) -> None:
        """Some jobs of a group or two in one transaction, behind the locks of the groups; now and then for nothing."""
        rng = self.random
        transaction = connection.transaction()
        await transaction.start()
        for _ in range(rng.choice([1, 1, 2])):
            origin, group = rng.choice(ORIGINS) if rng.random() < 0.95 else ORPHAN, rng.choice(GROUPS)
            await connection.execute(LOCK, f"{origin} {group}")
            for _ in range(rng.choice([1, 1, 2, 4])):
                await self.enqueue_one(connection, origin, group)
        await asyncio.sleep(rng.choice([0, 0, 0, 0.05, 0.3]))
        await (transaction.rollback() if rng.random() < 0.05 else transaction.commit())

    async def enqueue_one(self, connection: asyncpg.Connection, origin: str, group: str) -> None:
        rng = self.random
        name = rng.choice([*OF_SERIAL, *OF_LATEST * 2, *OF_PARALLEL, "single", "transfer", "transfer"])
        self.number += 1
        if rng.random() < 0.05:
            await connection.execute(BY_SQL, origin, group, self.number)
            return
        await self.types["deadly" if rng.random() < 0.004 else name].enqueue(
            connection,
            Work(g=group, n=self.number, more=2 if rng.random() < 0.3 else 0),
            origin=origin,
            delay=rng.choice([None] * 5 + [0.1, 0.5, 2.0]),
            priority=rng.choice([0, 0, 0, 10, -10]),
            unique_key=f"k{rng.randrange(3)}" if rng.random() < 0.15 else None,
        )

    async def enqueue_many(self, _: int) -> None:
        """A long queue in one group."""
        with suppress(*AWAY, asyncpg.PostgresError):
            async with connected(self.fleet.dsn) as connection, connection.transaction():
                origin, group = self.random.choice(ORIGINS), self.random.choice(GROUPS)
                await connection.execute(LOCK, f"{origin} {group}")
                self.number += 150
                works = [Work(g=group, n=self.number - number) for number in range(150)]
                name = self.random.choice(["newest", "lists", "loose_lists", "step", "newest_lists"])
                await self.types[name].enqueue_many(connection, works, origin=origin)

    # -- persons

    async def see_to(self, _: int) -> None:
        """Release what is held, and see to groups that are blocked."""

        async def act(admin: Admin, connection: asyncpg.Connection) -> None:
            for row in await connection.fetch(f"{HELD} LIMIT 3"):
                await admin.release(row["id"])
            for group in (await admin.blocked_groups())[:4]:
                await self.random.choice([admin.skip_head, admin.release_group])(group.origin, group.group)

        await self.person(act)

    async def cancel_running(self, _: int) -> None:
        """What runs, or what stands in its group."""

        async def act(admin: Admin, connection: asyncpg.Connection) -> None:
            for row in await connection.fetch(RUNNING):
                if row["group"] is None or self.random.random() < 0.5:
                    await self.random.choice([admin.cancel, admin.discard])(row["id"])
                else:
                    await admin.clear_group(row["origin"], row["group"], running=self.random.random() < 0.5)

        await self.person(act)

    async def requeue(self, _: int) -> None:
        async def act(admin: Admin, _: asyncpg.Connection) -> None:
            ended = await admin.requeueable(outcomes=TERMINAL[1:], limit=30, declined=True)
            for job in ended[: self.random.randint(1, 4)]:
                await admin.requeue(job.job_id, finished_at=job.finished_at)

        await self.person(act)

    async def move(self, _: int) -> None:
        await self.person(lambda admin, _: self.move_orphans(admin))

    async def move_orphans(self, admin: Admin) -> None:
        for name in [ORPHAN, *self.orphans]:
            with suppress(ActionRefused):  # somebody holds it still
                moved = await admin.move(name, ORIGINS[0], lease_seconds=LEASE)
                self.done.append(f"moved {moved} of {name}")

    # -- the end

    async def heal(self) -> None:
        """All is well from now on."""
        (self.directory / "calm").touch()
        await eventually(lambda: answers(self.fleet.dsn), "Postgres is back")
        await super().heal()

    async def settle(self) -> None:
        """Until nothing is left: first what needs nobody, then with a person who releases what waits for one. On a busy
        machine a watchdog may still end a member whose leases have run out; it is started again, as by a supervisor."""
        supervisor = asyncio.create_task(self.restart_the_dead())
        try:
            await self._settle()
        finally:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)

    async def _settle(self) -> None:
        for condition in (self.drained, self.all_ended):
            moved: Any = None
            while moved != (moved := len(self.fleet.started())):
                with suppress(AssertionError):
                    await eventually(condition, seconds=STILL)
                    break
            else:
                left = [dict(row) for row in await self.fleet.fetch(LEFT)]
                told = [await member.ask() for member in self.members if member.exit_code is None]
                raise AssertionError(f"not so: {condition.__doc__}\n{left}\n{await self.fleet.owners()}\n{told}")

    async def drained(self) -> bool:
        """Without a person, all is done but what waits for one."""
        try:
            return await self.fleet.fetchval(DUE) == 0
        except AWAY:
            return False

    async def all_ended(self) -> bool:
        """With a person who releases what waits for one, no job is left."""
        async with connected(self.fleet.dsn) as connection:
            admin = Admin(connection, actor="test")
            await self.move_orphans(admin)
            for row in await connection.fetch(HELD):
                with suppress(SidingsError):
                    await admin.release(row["id"])
            for group in await admin.blocked_groups():
                with suppress(SidingsError):
                    await admin.release_group(group.origin, group.group)
            return await connection.fetchval("SELECT count(*) FROM sidings.job") == 0


class BusyWorld(ExecutorWorld):
    """More jobs and more persons, and only connections that die: two executors."""

    size = 2
    pause_seconds = 0.4
    between_seconds = 0.02

    def things(self) -> list[Callable[[int], Awaitable[None]]]:
        return [*self.what_persons_do(), self.fault, self.shuffle]


async def _do(thing: Callable[[int], Awaitable[None]], number: int) -> None:
    await thing(number)


# -- the proof


async def what_is_wrong(fleet: Fleet) -> list[str]:
    """What has happened and must not have, in words."""
    events = await fleet.fetch(EVENTS)
    history = await fleet.fetch("SELECT * FROM sidings.job_history ORDER BY attempt")
    effects = [(row["job"], row["attempt"]) for row in await fleet.fetch("SELECT * FROM public.effect")]
    return Proof(fleet.records(), events, history, effects).wrong


@dataclass
class Place:
    """A job in the order of its group: at: its position had been drawn then; since, until: of the commits."""

    job: int
    lane: tuple[str, str]
    position: int
    at: float
    since: float
    until: float = inf


@dataclass
class Story:
    """A job: as it was stored and as it went; all its places, origins and attempts."""

    new: Any
    gone: Any = None
    places: list[Place] = field(default_factory=list)
    origins: set[str] = field(default_factory=set)
    rows: list[Any] = field(default_factory=list)


class Proof:
    """wrong: what is, in words. Times are the server's, which has the clock of the machine."""

    def __init__(
        self, records: list[dict[str, Any]], events: list[Any], history: list[Any], effects: list[tuple[int, int]]
    ) -> None:
        self.wrong: list[str] = []
        self.ahead = time.time() - now()  # of the journal's clock
        self.starts = [record for record in records if record["event"] == "start"]
        self.runs = runs_of(records)
        self.jobs: dict[int, Story] = {}
        self.followed = 0
        self._cut_at_pauses(records)
        self._tell(events, history)
        self._each_ended_once()
        self._outcomes_are_what_handlers_wanted()
        self._failures_are_counted()
        self._none_overlapped()
        self._all_in_order()
        self._the_newest_is_left()
        self._lists_were_short()
        self._what_gave_up_was_followed_once()
        self._effects_happened_once(effects)
        outcomes = Counter(row["outcome"] for row in history)
        print(f"{len(self.jobs)} jobs, {len(self.runs)} runs, {dict(outcomes)}, {self.followed} were followed")

    def _cut_at_pauses(self, records: list[dict[str, Any]]) -> None:
        """A line of the journal may be written after a pause that its time is before."""
        begun: dict[int, float] = {}
        pauses: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for record in records:
            if record["event"] == "paused":
                begun[record["of"]] = record["t"]
            elif record["event"] in ("resumed", "died") and record["of"] in begun:
                pauses[record["of"]].append((begun.pop(record["of"]), record["t"]))
        for run in self.runs:
            for begin, end in pauses[run.pid]:
                if run.start < end and begin < run.end:
                    run.alone = min(run.alone, max(run.start, begin))

    def _tell(self, events: list[Any], history: list[Any]) -> None:
        for e in events:
            story = self.jobs.setdefault(e["job"], Story(e))
            place, lane = story.places[-1] if story.places else None, (e["origin"], e["group"])
            story.origins.add(e["origin"])
            if e["kind"] == "DELETE":
                story.gone = e
            ordered = e["group"] is not None and e["policy"] != 2 and e["position"] is not None and not story.gone
            if place is not None and place.until == inf:
                if ordered and (place.position, place.lane) == (e["position"], lane):
                    continue
                place.until = e["committed"]
            if ordered:
                story.places.append(Place(e["job"], lane, e["position"], e["at_s"], e["committed"]))
        for row in history:
            if row["job_id"] in self.jobs:
                self.jobs[row["job_id"]].rows.append(row)
            else:
                self.wrong.append(f"job {row['job_id']} is in the history but was never committed")

    def _each_ended_once(self) -> None:
        for id, story in self.jobs.items():
            outcomes = [row["outcome"] for row in story.rows]
            ends = [outcome in TERMINAL for outcome in outcomes]
            if sum(ends) != 1 or not ends[-1] or not story.gone:
                self.wrong.append(f"job {id} ({story.new['type']}): {outcomes}, {'gone' if story.gone else 'left'}")
            elif [row["attempt"] for row in story.rows] != list(range(1, story.gone["attempt"] + 1)):
                self.wrong.append(f"job {id} has attempts {[row['attempt'] for row in story.rows]}")

    def _outcomes_are_what_handlers_wanted(self) -> None:
        """Unless a process died, or a person came; or the end of a transaction was refused."""
        by: dict[tuple[int, int], list[Run]] = defaultdict(list)
        for run in self.runs:
            by[run.job, run.attempt].append(run)
        for (job, attempt), runs in by.items():
            # An executor whose first asking for an origin arrives late takes it over from itself, and goes on.
            if len({run.executor for run in runs}) > 1 or len({run.epoch for run in runs}) < len(runs):
                self.wrong.append(f"attempt {attempt} of job {job} began more than once: {[*map(str, runs)]}")
        for id, story in self.jobs.items():
            kind = story.new["type"]
            for row in story.rows:
                outcome, runs = row["outcome"], by.get((id, row["attempt"]), [])
                by_person = (row["error_message"] or "").startswith("by test")
                theirs = [run for run in runs if (run.executor, run.epoch) == (str(row["executor"]), row["epoch"])]
                done = any(run.how == "done" for run in theirs)
                if (
                    (outcome == "succeeded" and not done)
                    or (outcome == "superseded" and runs)
                    or (outcome in ("retried", "held", "snoozed") and done and kind not in TRANSACTIONAL)
                    or (outcome in ("discarded", "followed") and done and not by_person and kind not in TRANSACTIONAL)
                    or (outcome == "cancelled" and not by_person)
                    or (outcome == "followed" and kind not in FOLLOWED)
                    or (outcome == "discarded" and not by_person and kind in NEVER_GIVES_UP + FOLLOWED
                        and not row["error_class"].endswith("Discard"))
                ):  # fmt: skip
                    self.wrong.append(f"job {id} ({kind}) {dict(row)}, its runs: {[*map(str, runs)]}")

    def _failures_are_counted(self) -> None:
        """A job that was held begins anew, and the newest one inherits."""
        for start in self.starts:
            story = self.jobs[start["job"]]
            before = [row["outcome"] for row in story.rows if row["attempt"] < start["attempt"]]
            if story.new["policy"] != 1 and "held" not in before and start["failures"] != before.count("retried"):
                self.wrong.append(f"{start['failures']} failures after {before}: {start}")

    def _none_overlapped(self) -> None:
        groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in sorted(self.runs, key=lambda run: run.start):
            if run.group is not None:
                groups[run.origin, run.group].append(run)
        for members in groups.values():
            last = members[0]
            for after in members[1:]:
                if after.start < last.alone:
                    self.wrong.append(f"overlap:\n    {last} ({last.type})\n    {after} ({after.type})")
                last = max(last, after, key=lambda run: run.alone)

    def _all_in_order(self) -> None:
        """None started while one stood before it that had been committed before it was enqueued."""
        lanes: dict[tuple[str, str], list[Place]] = defaultdict(list)
        for story in self.jobs.values():
            for place in story.places:
                lanes[place.lane].append(place)
        for run in self.runs:
            start = run.start + self.ahead
            places = [place for place in self.jobs[run.job].places if place.since <= start]
            if run.group is None or not places or places[-1].until < start:
                continue  # it is void: it was ended or taken over
            own = places[-1]
            for other in lanes[run.origin, run.group]:
                if other.position < own.position and other.since < own.at and start < other.until - 0.02:
                    self.wrong.append(f"order: {run} ({run.type}) at {start:.3f}, before it stood {other}, own: {own}")

    def _the_newest_is_left(self) -> None:
        """What was superseded, a newer one had followed, which had not ended long before."""
        kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
        for id, story in self.jobs.items():
            if story.new["policy"] == 1:
                kinds[story.new["group"], story.new["type"]].append(id)
        for ids in kinds.values():
            for id in ids:
                gone, rows = self.jobs[id].gone, self.jobs[id].rows
                if not gone or not rows or rows[-1]["outcome"] != "superseded":
                    continue
                newer = [self.jobs[other] for other in ids if other > id and gone["origin"] in self.jobs[other].origins]
                if not any(
                    other.new["committed"] <= gone["committed"]
                    and (not other.gone or other.gone["committed"] > gone["committed"] - 2)
                    for other in newer
                ):
                    self.wrong.append(f"job {id} was superseded by none: {dict(gone)}")

    def _lists_were_short(self) -> None:
        for start in self.starts:
            if start["size"] > BATCH or (start["size"] > 1 and start["failures"]):
                self.wrong.append(f"a list: {start}")

    def _what_gave_up_was_followed_once(self) -> None:
        """In the transaction that ended it, at the end of its group; and what else has ended was not followed."""
        after = Counter(story.new["after"] for story in self.jobs.values() if story.new["type"] == "owed")
        for id, story in self.jobs.items():
            end = story.rows[-1] if story.rows else None
            gave_up = end is not None and end["outcome"] == "followed"
            self.followed += gave_up
            if after[id] != gave_up:
                self.wrong.append(f"job {id} ({story.new['type']}) was followed by {after[id]}: {end and dict(end)}")
            former = self.jobs.get(story.new["after"])
            if former is not None and (
                [story.new[name] for name in ("xid", "origin", "group")]
                != [former.gone and former.gone[name] for name in ("xid", "origin", "group")]
            ):
                self.wrong.append(f"job {id} follows another in another place: {dict(story.new)}, {former.gone}")

    def _effects_happened_once(self, effects: list[tuple[int, int]]) -> None:
        wanted = Counter(
            (id, story.rows[-1]["attempt"])
            for id, story in self.jobs.items()
            if story.new["type"] in TRANSACTIONAL and story.rows and story.rows[-1]["outcome"] == "succeeded"
        )
        if wanted != (happened := Counter(effects)):
            self.wrong.append(f"effects: too many {[*(happened - wanted)][:5]}, missing {[*(wanted - happened)][:5]}")
