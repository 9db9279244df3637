"""A fleet of whole services (consumers, jobs, outbox, a directory table and its directory) for a minute, while
processes, servers and connections die or stand still and persons interfere. Then all drains, and what has happened is
what the guarantees say.

SIDINGS_CHAOS_SEED chooses what happens, as far as the machine lets it; SIDINGS_CHAOS_SECONDS how much: a thing a
second, but after each some jobs have to run before the next, so a busy machine takes longer.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from aiokafka import TopicPartition
from sidings import migrate
from sidings.devstack import Kafka, Postgres
from sidings.devstack.topics import create_topic
from sidings.errors import JobNotFound, SidingsError
from sidings.jobs.admin import Admin

from .consumer_support import add_partitions, stored_offsets
from .faulty_proxy import FaultyProxy, Moment
from .fleet import AWAY, Fleet, Member, runs_of
from .stress_support import CHAOS_SECONDS, Flow, committed_log, restart_broker
from .support import connected, eventually, fetch, value
from .test_chaos import Features

WORKER = Path(__file__).with_name("soak_worker.py")
SEED = int(os.environ.get("SIDINGS_CHAOS_SEED", "1"))
PATIENCE = 150.0  # seconds in which nothing moves, on a machine that does other things as well
STEP = 25  # runs of jobs between two things that happen
LEASE = 6.0  # as in the worker
ENTITIES = [f"e{number}" for number in range(24)]
PARTITIONS = {"orders": 2, "isolated": 2, "bulk": 2, "loop": 2, "terminal": 2}
GROWN = {"orders": 4}
DEDUPED = ("isolated", "loop")
TPS = [TopicPartition(t, p) for t, n in PARTITIONS.items() for p in range(GROWN.get(t, n)) if t != "terminal"]

# The ledger has each job that was committed, in the order of the commits of its group: whoever enqueues has locked the
# entity before. Parked messages do not, and what leaves its place (held, released, late) is in no order.
TABLES = """
    CREATE TABLE entity (id text PRIMARY KEY, sent int NOT NULL DEFAULT 0);
    CREATE TABLE terminal (id text PRIMARY KEY, version int NOT NULL, is_active boolean NOT NULL);
    CREATE TABLE handled (id bigserial, topic text, partition int, "offset" bigint, key text, n int);
    CREATE TABLE owned (origin text, epoch bigint, owner uuid);
    CREATE SEQUENCE place;
    CREATE INDEX ON ledger (job);
    CREATE FUNCTION placed() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        its_lane text := CASE WHEN NEW."group" LIKE 'h%' THEN split_part(NEW.origin, '/', 1) ELSE NEW.origin END;
        ordered  boolean := NEW.position IS NOT NULL AND NEW.type NOT LIKE 'message:%';
    BEGIN
        IF TG_OP = 'INSERT' THEN
            INSERT INTO public.ledger
            VALUES (NEW.id, NEW.type, its_lane, CASE WHEN ordered THEN NEW."group" END, nextval('public.place'));
        ELSIF NEW.origin <> OLD.origin THEN
            UPDATE public.ledger SET origin = its_lane WHERE job = NEW.id;
        ELSE
            UPDATE public.ledger SET "group" = NULL WHERE job = NEW.id;
        END IF;
        RETURN NULL;
    END $$;
    CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.owned VALUES (NEW.origin, NEW.epoch, NEW.owner);
        RETURN NULL;
    END $$;
    CREATE TRIGGER noted AFTER UPDATE ON sidings.origin FOR EACH ROW
        WHEN (NEW.epoch <> OLD.epoch) EXECUTE FUNCTION noted();
    CREATE TRIGGER inserted AFTER INSERT ON sidings.job FOR EACH ROW EXECUTE FUNCTION placed();
    CREATE TRIGGER replaced AFTER UPDATE ON sidings.job FOR EACH ROW
        WHEN (NEW.position IS DISTINCT FROM OLD.position OR NEW.origin <> OLD.origin) EXECUTE FUNCTION placed();
"""
# Neither held, nor of an origin that nobody has, nor behind a job that blocks its group until a person comes.
DUE = """
    SELECT j.id, j.type, j.origin, j."group", j.run_at, j.attempt, j.failures, j.losses FROM sidings.job j
    WHERE j.held IS NULL AND j.origin <> 'legacy/0' AND j.run_at IS DISTINCT FROM 'infinity' AND NOT EXISTS (
        SELECT FROM sidings.job b
        WHERE b.origin = j.origin AND b."group" = j."group" AND b.position < j.position AND b.run_at = 'infinity'
    )
"""
# Jobs, messages of the partition that is furthest behind, and those that were published. $1: messages sent
WAITING = f"""
    SELECT (SELECT count(*) FROM ({DUE}) due) + $1 - coalesce(min(f.n), 0)
           + (SELECT sum(sent) FROM entity) - (SELECT count(*) FROM handled WHERE topic = 'loop')
    FROM (SELECT max(n) AS n FROM handled WHERE topic <> 'loop' GROUP BY topic, partition) f
"""
# If the first attempt to acquire an origin arrives late, its executor takes it over from itself: all that runs begins
# again, as the same attempt, also if another executor comes before that.
FROM_ITSELF = """
    SELECT o.owner::text, split_part(o.origin, '/', 1) AS topic, o.epoch FROM owned o
    JOIN owned n ON n.origin = o.origin AND n.epoch = o.epoch + 1 AND n.owner = o.owner
"""
JOB = """
    SELECT id, type, origin, "group" FROM sidings.job WHERE type NOT LIKE 'message:%' ORDER BY random() LIMIT 1
"""
LEGACY = """
    SELECT sidings.enqueue('step', json_build_object('g', $1::text), origin => 'legacy/0', "group" => $1)
    FROM generate_series(1, 3)
"""
HOME = """
    SELECT sidings.enqueue($1, json_build_object('g', $2::text, 'more', 1), "group" => $2,
                           origin => sidings.origin_for($2, 'orders'))
"""
CHANGE = "UPDATE terminal SET version = version + 1, is_active = random() < 0.8 WHERE id = $1"
PUBLISH = """
    WITH next AS (UPDATE entity SET sent = sent + 1 WHERE id = $1 RETURNING sent)
    SELECT sidings.publish('loop', $1, json_build_object('n', sent)) FROM next
"""


class Soak(Features):
    """What happens to the services, and what comes in meanwhile."""

    size = 3
    takeover_seconds = 4 * LEASE

    def __init__(self, fleet: Fleet, server: Postgres, kafka: Kafka, directory: Path, seed: int) -> None:
        super().__init__(fleet, server, seed)
        self.kafka, self.directory = kafka, directory
        self.sent = self.happened = 0
        self.grown = False

    def things(self) -> list[Callable[[int], Coroutine[Any, Any, None]]]:
        return [
            *[self.kill, self.stop, self.pause, self.outlast, self.act, *[self.fault] * 4] * 4,
            *[self.cancel_job, self.pause_jobs, self.requeue, self.move, self.terminate, self.lock] * 2,
            *[self.cut, self.silence, self.interrupt, self.kill_server, self.pause_server, self.restart_server],
            *[self.restart_broker, self.pause_broker],
        ]

    # -- the services

    def spawn(self, number: int) -> Member:
        name = f"service{len(self.fleet.members)}"
        log = self.directory / f"{name}.log"
        arguments = (self.proxies[number].dsn, self.kafka.bootstrap, str(self.directory), name)
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, str(WORKER), *arguments], stdout=output, stderr=output)
        self.fleet.members.append(Member(self.fleet, name, process, log))
        return self.fleet.members[-1]

    def reassign(self, *, stale: int | None = None) -> None:
        """Kafka does that."""

    async def run(self, seconds: float) -> None:
        for number in range(self.size):
            self.proxies.append(FaultyProxy(self.fleet.dsn))
            await self.proxies[-1].start()
            self.members.append(self.spawn(number))
        self.flow = Flow(self.kafka.bootstrap, self.random.randrange(1_000_000), self.message, pauses=(0.3, 0.5, 1.0))
        happening = asyncio.create_task(self.happen_often(int(seconds)))
        tasks = [asyncio.create_task(coroutine) for coroutine in (self.produce(), self.restart_the_dead())]
        try:
            done, _ = await asyncio.wait([happening, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            async with self.busy:
                for task in (happening, *tasks):
                    task.cancel()
                await asyncio.gather(happening, *tasks, return_exceptions=True)
            await self.flow.stop()
        await self.heal()

    async def happen_often(self, times: int) -> None:
        async def handled() -> bool:
            return await value(self.fleet.dsn, "SELECT count(DISTINCT topic) FROM handled") == 4

        await eventually(handled, "messages of all topics are handled", seconds=PATIENCE)
        async with asyncio.TaskGroup() as group:
            for self.happened in range(times):
                thing, number = self.random.choice(self.things()), self.random.randrange(self.size)
                self.done.append(f"{thing.__name__}({number})")
                started = len(self.fleet.started())
                group.create_task(thing(number))
                await asyncio.sleep(self.random.uniform(0.1, 1.5))
                await eventually(lambda n=started: len(self.fleet.started()) > n + STEP, "jobs run", seconds=PATIENCE)

    async def heal(self) -> None:
        """All is well from now on."""
        (self.directory / "calm").touch()
        await super().heal()

    async def stop(self, number: int) -> None:
        self.stopping.add(self.members[number])
        self.members[number].terminate()

    async def pause(self, number: int) -> None:
        member = self.members[number]
        if not member.paused and member.exit_code is None:
            member.pause()
            await asyncio.sleep(self.random.choice([0.3, 1, LEASE + 2, 2 * LEASE]))
            if member.paused:
                member.resume()

    # -- what comes in

    def message(self, _: bool) -> tuple[str, dict[str, Any]]:
        """Numbered; some have the number of an earlier one."""
        self.sent += 1
        number = self.sent if self.random.random() < 0.85 else max(1, self.sent - self.random.randrange(40))
        return self.random.choice(["orders", "orders", "isolated", "bulk"]), {
            "key": self.random.choice(ENTITIES).encode(),
            "value": json.dumps({"n": self.sent}).encode(),
            "headers": [("sidings-id", str(number).encode())],
        }

    async def produce(self) -> None:
        """Jobs and messages out of SQL, some for an origin that nobody holds; and one topic grows."""
        while True:
            await asyncio.sleep(self.random.uniform(0.1, 0.6))
            with suppress(*AWAY, asyncpg.PostgresError):
                await self.write(self.random.choice(ENTITIES))
            with suppress(*AWAY, asyncpg.PostgresError):
                await self.hold_back()
            if self.happened > CHAOS_SECONDS / 2 and not self.grown:
                async with self.busy:
                    await add_partitions(self.kafka.bootstrap, "orders", GROWN["orders"])
                    self.grown = True

    async def hold_back(self) -> None:
        """No more comes in than the machine has time for."""
        if await value(self.fleet.dsn, WAITING, self.sent) > 200:
            await self.flow.rest()
        else:
            self.flow.go_on()

    async def write(self, entity: str) -> None:
        async with connected(self.fleet.dsn) as connection, connection.transaction():
            await connection.execute("SELECT FROM entity WHERE id = $1 FOR UPDATE", entity)
            match self.random.randrange(5):
                case 0:
                    await connection.execute(PUBLISH, entity)
                case 1:
                    await connection.execute(LEGACY, f"m{entity}")
                case _:
                    await connection.execute(HOME, self.random.choice(["homely", "transfer"]), f"h{entity}")
            await connection.execute(CHANGE, self.random.choice(ENTITIES))
            await asyncio.sleep(self.random.choice([0, 0, 0.1, 0.5]))

    # -- servers

    async def restart_broker(self, _: int) -> None:
        async with self.busy:
            await restart_broker(self.random, self.kafka)

    async def pause_broker(self, _: int) -> None:
        async with self.busy:
            await asyncio.to_thread(self.kafka.pause)
            await asyncio.sleep(self.random.choice([1, 4]))
            await asyncio.to_thread(self.kafka.resume)

    async def fault(self, number: int) -> None:
        """Mostly so that nobody can tell whether something was committed, or will be in a moment."""
        kind = self.random.choice(["commit"] * 3 + ["cycle"] * 2 + ["finish", "acquire", "renew", "read"])
        moments = [Moment.LATE] * 4 + [moment for moment in Moment if moment not in (Moment.HELD, Moment.KEPT)]
        self.proxies[number].arm(kind, self.random.choice(moments), self.random.randint(1, 6))

    # -- persons, who leave messages alone: each is to have its effects

    async def a_job(self, connection: asyncpg.Connection) -> asyncpg.Record:
        row = await connection.fetchrow(JOB)
        if row is None:
            raise JobNotFound("there is none")
        return row

    async def act(self, _: int) -> None:
        """Release what is held, and see to groups that are blocked."""

        async def act(admin: Admin, connection: asyncpg.Connection) -> None:
            for row in await connection.fetch("SELECT id FROM sidings.job WHERE held IS NOT NULL LIMIT 3"):
                await admin.release(row["id"])
            for group in (await admin.blocked_groups())[:3]:
                head = await value(self.fleet.dsn, "SELECT type FROM sidings.job WHERE id = $1", group.head) or ""
                skip = not head.startswith("message:") and self.random.random() < 0.5
                await (admin.skip_head if skip else admin.release_group)(group.origin, group.group)

        await self.person(act)

    async def requeue(self, _: int) -> None:
        """Ended jobs once more, while nobody else writes: so they have their place in the ledger."""

        async def act(admin: Admin, _: asyncpg.Connection) -> None:
            async with connected(self.fleet.dsn) as other, other.transaction():
                await other.execute("SET LOCAL lock_timeout = '5s'; LOCK TABLE entity IN EXCLUSIVE MODE")
                for job in (await admin.requeueable(limit=30, declined=True))[: self.random.randint(1, 8)]:
                    if not job.type.startswith("message:"):
                        await admin.requeue(job.job_id, finished_at=job.finished_at)

        await self.person(act)

    async def move(self, _: int) -> None:
        async def act(admin: Admin, _: asyncpg.Connection) -> None:
            await admin.move("legacy/0", "orders/0", lease_seconds=LEASE)

        await self.person(act)


class Truth:
    """What is to become of it all, and what has."""

    def __init__(self, soak: Soak, kafka: Kafka) -> None:
        self.soak, self.dsn, self.bootstrap = soak, soak.fleet.dsn, kafka.bootstrap
        self.left: Any = None

    async def reach(self, condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        """Wait for it while anything runs or is handled."""
        moved: Any = None
        while moved != (
            moved := (len(self.soak.fleet.started()), await value(self.dsn, "SELECT max(id) FROM handled"))
        ):
            with suppress(AssertionError):
                return await eventually(condition, seconds=PATIENCE)
        raise AssertionError(f"not so: {condition.__doc__} {self.left}")

    async def drained(self) -> bool:
        """Without a person, all is done but what waits for one."""
        due = await fetch(self.dsn, DUE)
        unsent = await value(self.dsn, "SELECT count(*) FROM sidings.outbox")
        stored = await stored_offsets(self.dsn)
        ends = {(r.topic, r.partition): r.offset for r in await committed_log(self.bootstrap, TPS)}
        behind = {place: (stored.get(place), end) for place, end in ends.items() if stored.get(place, -1) <= end}
        self.left = {"due": len(due), "of these": due[:10], "unsent": unsent, "behind": behind}
        return not due and not unsent and not behind

    async def all_ended(self) -> bool:
        """With a person who releases what waits for one, no job is left."""
        async with connected(self.dsn) as connection:
            admin = Admin(connection, actor="test")
            with suppress(SidingsError):
                await admin.move("legacy/0", "orders/0", lease_seconds=LEASE)
            for row in await connection.fetch("SELECT id FROM sidings.job WHERE held IS NOT NULL"):
                with suppress(SidingsError):
                    await admin.release(row["id"])
            for group in await admin.blocked_groups():
                with suppress(SidingsError):
                    await admin.release_group(group.origin, group.group)
            self.left = await connection.fetch("SELECT * FROM sidings.job LIMIT 10")
        return not self.left and await self.drained()

    async def all_agree(self) -> bool:
        """Every directory has what the table says, and nothing complains."""
        rows = await fetch(self.dsn, "SELECT id, version FROM terminal WHERE is_active")
        wanted = {"terminals": {row["id"]: row["version"] for row in rows}, "problems": []}
        looks = [self.soak.directory / f"look-{member.name}" for member in self.soak.members]
        found = [json.loads(path.read_text()) for path in looks if path.exists()]
        self.left = {"wanted": wanted, "found": found}
        return found == [wanted] * len(looks)

    async def what_is_wrong(self) -> list[str]:
        """What `Fleet.verify` finds; attempts that were not told apart; effects of messages that are not there once, in
        the order of their keys; and holes in what was sent."""
        wrong: list[str] = []
        try:
            await self.soak.fleet.verify()
        except AssertionError as error:
            wrong.append(str(error))
        effects: dict[tuple[str, int, int], int] = defaultdict(int)
        in_order: dict[tuple[str, int, str], list[int]] = defaultdict(list)
        for row in await fetch(self.dsn, "SELECT * FROM handled ORDER BY id"):
            effects[row["topic"], row["partition"], row["offset"]] += 1
            in_order[row["topic"], row["partition"], row["key"]].append(row["offset"])
        log = await committed_log(self.bootstrap, TPS)
        alike: dict[object, int] = defaultdict(int)
        sent: dict[str, list[int]] = defaultdict(list)
        for record in sorted(log, key=lambda record: (record.topic, record.partition, record.offset)):
            place, id = (record.topic, record.partition, record.offset), dict(record.headers)["sidings-id"]
            first = (record.topic, id) not in alike
            alike[(record.topic, id) if record.topic in DEDUPED else place] += effects.pop(place, 0)
            if record.topic == "loop" and first:
                sent[record.key.decode()].append(json.loads(record.value)["n"])
        wrong += [f"effects of {which}: {count}" for which, count in alike.items() if count != 1]
        wrong += [f"effects of what is not in the log: {place}" for place in effects]
        for lane, offsets in in_order.items():
            wrong += [f"{lane}: {later} before {former}" for later, former in pairwise(offsets) if former < later]
        for row in await fetch(self.dsn, "SELECT id, sent FROM entity"):
            if sent[row["id"]] != list(range(1, row["sent"] + 1)):
                wrong.append(f"of {row['id']} {row['sent']} were published; the topic has {sent[row['id']]}")
        runs, outcomes = runs_of(self.soak.fleet.records()), await self.soak.fleet.outcomes()
        from_itself = {tuple(row) for row in await fetch(self.dsn, FROM_ITSELF)}
        attempts: dict[tuple[int, int], list[tuple[str, str, int]]] = defaultdict(list)
        for run in runs:
            attempts[run.job, run.attempt].append((run.executor, run.origin.partition("/")[0], run.epoch))
        for (job, n), by in attempts.items():
            if len(set(by)) < len(by) or len(set(by) - from_itself) > 1:
                wrong.append(f"attempt {n} of job {job} began more than once: {by}")
        print(f"{len(log)} records, {len(runs)} runs of jobs, {Counter(outcomes)}")
        return wrong


@pytest.mark.chaos
@pytest.mark.timeout(1500)
async def test_a_fleet_of_services(own_postgres, own_kafka, tmp_path):
    print(f"SIDINGS_CHAOS_SEED={SEED}")
    server = await asyncio.to_thread(own_postgres, {"deadlock_timeout": "100ms"})
    kafka = await asyncio.to_thread(own_kafka)
    await migrate(server.dsn, service="test")
    for topic, partitions in PARTITIONS.items():
        config = {"cleanup.policy": "compact"} if topic == "terminal" else None
        await create_topic(kafka.bootstrap, topic, partitions=partitions, config=config)
    async with Fleet(server.dsn, tmp_path) as fleet:
        async with connected(server.dsn) as connection:
            await connection.execute(TABLES)
            await connection.executemany("INSERT INTO entity VALUES ($1)", [(id,) for id in ENTITIES])
            await connection.executemany("INSERT INTO terminal VALUES ($1, 0, true)", [(id,) for id in ENTITIES])
            await connection.execute(
                "SELECT sidings.directory_table('terminal', topic => 'terminal', key => '{id}', active => 'is_active')"
            )
        soak = Soak(fleet, server, kafka, tmp_path, SEED)
        truth = Truth(soak, kafka)
        try:
            await soak.run(CHAOS_SECONDS)
            for condition in (truth.drained, truth.all_ended, truth.all_agree):
                await truth.reach(condition)
            for member in soak.members:
                await asyncio.to_thread(member.kill)
            wrong = await truth.what_is_wrong()
            assert not wrong, "\n".join(wrong[:30])
        finally:
            print(*soak.done)
            for proxy in soak.proxies:
                await proxy.stop()
