"""Postgres fails over to an asynchronous standby that has lost commits: ids are handed out a second time there."""

import asyncio
import importlib
import json
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client import CollectorRegistry
from sidings import ActionRefused, Admin, Message, Service, StaticAssignment, Transaction
from sidings.cli.pages import pages
from sidings.devstack import Postgres
from sidings.devstack.accounts import open_directory, server_account
from sidings.devstack.binaries import postgres_program
from sidings.devstack.databases import create_database, ensure_template
from sidings.devstack.fixtures import ServerDirectory
from sidings.devstack.process import clean_environment
from sidings.errors import PostgresUnavailable
from sidings.executor import Executor, ExecutorSettings, PostgresSettings, now
from sidings.jobs import Job, Registry
from sidings.schema import migrate

from .cli_support import cli
from .consumer_support import Number, a_service, produce
from .directory_support import COMPACTED
from .faulty_proxy import FaultyProxy, Moment, proxied
from .outbox_support import assert_complete, emptied, numbered, publish, publishing, records, relaying
from .support import SECONDS, connected, drained, enqueue, eventually, fetch, value

ORIGINS = ["t/0", "t/1"]
LOST = 60  # more than the 32 values by which a sequence is ahead on a standby, so that ids of lost commits come again
migrate_module = importlib.import_module("sidings.schema.migrate")  # the package's `migrate` is the function
SETTINGS = {"fsync": "off", "shared_buffers": "32MB"}


class Line:
    """A primary, and its successors: each a copy that follows it asynchronously until it takes its place."""

    def __init__(self, directory: ServerDirectory) -> None:
        self._directory = directory
        self.primary = Postgres(directory("first"), settings=SETTINGS)
        self.made = [self.primary]
        self.primary.start()
        self._account = urlsplit(self.primary.dsn).netloc.rpartition("@")[0]

    def dsn(self, server: Postgres, database: str = "postgres") -> str:
        return f"postgresql://{self._account}@127.0.0.1:{server.port}/{database}"

    def add_standby(self) -> Postgres:
        folder = self._directory("standby").resolve()
        folder.mkdir(exist_ok=True)
        account = server_account()
        data = open_directory(folder / "data", account)
        subprocess.run(
            [
                *(postgres_program("pg_basebackup"), "--pgdata", str(data), "--dbname", self.dsn(self.primary)),
                *("--write-recovery-conf", "--checkpoint", "fast", "--wal-method", "stream", "--no-sync"),
            ],
            check=True,
            capture_output=True,
            env=clean_environment(LC_ALL="C"),
            cwd=data,
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
            timeout=120,
        )
        standby = Postgres(folder, settings=SETTINGS)
        self.made.append(standby)
        standby.start()
        return standby


@pytest.fixture(scope="module")
def line(sidings_server_directory: ServerDirectory) -> Iterator[Line]:
    line = Line(sidings_server_directory)
    try:
        yield line
    finally:
        for server in line.made:
            server.remove()


class Failover:
    """Executors talk to `proxy`, which leads to the primary until `happen` or `switch`."""

    def __init__(self, line: Line, standby: Postgres, database: str, proxy: FaultyProxy) -> None:
        self.line = line
        self.proxy = proxy
        self.former, self.standby = line.primary, standby
        self.old, self.new = line.dsn(line.primary, database), line.dsn(standby, database)

    async def keep_what_was(self) -> None:
        """What was committed until now is on the standby."""
        reached = await value(self.old, "SELECT pg_current_wal_flush_lsn()::text")
        async with connected(self.line.dsn(self.standby)) as standby:
            caught_up = f"SELECT pg_last_wal_replay_lsn() >= '{reached}'"
            await eventually(lambda: standby.fetchval(caught_up), "the standby has caught up")

    async def lose_what_follows(self) -> None:
        """What was committed until now is on the standby; what is committed from now on will be lost."""
        await self.keep_what_was()
        async with connected(self.line.dsn(self.standby)) as standby:
            await standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
            await standby.execute("SELECT pg_reload_conf()")
            gone = "SELECT count(*) = 0 FROM pg_stat_wal_receiver"
            await eventually(lambda: standby.fetchval(gone), "the standby receives nothing more")

    async def switch(self) -> None:
        """The standby is promoted, and new connections lead to it. The former primary lives on."""
        assert await value(self.new, "SELECT pg_promote(true, 60)")
        self.proxy.switch(self.new)
        self.line.primary = self.standby

    async def happen(self) -> None:
        """The primary dies, then `switch`. Until `proxy.heal`, nobody gets a connection."""
        self.proxy.cut()
        await asyncio.to_thread(self.former.kill)
        await self.switch()

    @asynccontextmanager
    async def executor(self, registry: Registry, origins: list[str], **options: Any) -> AsyncIterator[Executor]:
        postgres = PostgresSettings(dsn=self.proxy.dsn, call_seconds=SECONDS, connect_seconds=SECONDS)
        settings = ExecutorSettings(**{"poll_seconds": 0.02, "shutdown_seconds": 2.0, "lease_seconds": 60.0, **options})
        executor = Executor("test", registry, postgres, settings, prometheus=CollectorRegistry())
        await executor.start()
        try:
            executor.assign(origins, 1)
            await executor.settled(SECONDS)
            yield executor
        finally:
            async with asyncio.timeout(SECONDS):
                await executor.stop()


@pytest.fixture
async def failover(line: Line) -> AsyncIterator[Failover]:
    standby = await asyncio.to_thread(line.add_standby)
    database = f"failover_{token_hex(4)}"
    template = await ensure_template(line.dsn(line.primary), service="test")
    await create_database(line.dsn(line.primary), database, template=template)
    async with proxied(line.dsn(line.primary, database)) as proxy:
        there = Failover(line, standby, database, proxy)
        async with connected(there.old) as connection:
            await connection.execute("CREATE TABLE effect (token text)")
            await connection.execute("CREATE TABLE ledger (job bigint, token text, type text)")
            # The template is of a former timeline: the primary is the server that was promoted in the last test.
            await connection.execute("UPDATE sidings.service SET timeline = sidings.timeline()")
        await there.keep_what_was()  # the database, above all: without it the standby cannot even be promoted
        yield there
        await asyncio.to_thread((standby if line.primary is there.former else there.former).kill)


def quiet(executor: Executor) -> bool:
    return not (executor.workers.running() or executor.workers.finished or executor.cycles.busy_seconds())


async def succeeded(dsn: str) -> Counter[int]:
    rows = await fetch(dsn, "SELECT job_id FROM sidings.job_history WHERE outcome = 'succeeded'")
    return Counter(row["job_id"] for row in rows)


@pytest.mark.parametrize("when", ["they ran", "the cycle that names them was under way"])
async def test_outcomes_of_lost_jobs_end_no_jobs_that_have_got_their_ids(failover: Failover, when: str):
    registry, ran, gate = Registry(), [], asyncio.Event()

    @registry.job()
    async def step(job: Job[str]) -> None:
        ran.append(job.payload)
        if job.payload.startswith("lost"):
            await gate.wait()

    proxy = failover.proxy
    async with failover.executor(registry, ORIGINS[:1]) as executor:
        await failover.lose_what_follows()
        epoch = executor.held[ORIGINS[0]]
        naming = None if when == "they ran" else proxy.arm("cycle", Moment.SILENT_BEFORE)
        lost = await enqueue(failover.old, step, [f"lost {n}" for n in range(LOST)], origin=ORIGINS[0])
        await eventually(lambda: naming.hits if naming else executor.workers.running() == LOST)
        await failover.happen()
        kept = await enqueue(failover.new, step, [f"kept {n}" for n in range(LOST)], origin=ORIGINS[0])
        assert set(lost) & set(kept)
        reading = proxy.arm("read", Moment.SILENT_BEFORE)  # so that a cycle is the first to meet the new server
        proxy.heal()
        await eventually(lambda: reading.hits)
        gate.set()
        await eventually(lambda: executor.held.get(ORIGINS[0]) != epoch or (len(ran) == LOST and quiet(executor)))
        proxy.heal()
        await drained(failover.new)
        assert Counter(token for token in ran if "kept" in token) == Counter(f"kept {n}" for n in range(LOST))
        assert ("lost 0" in ran) == (when == "they ran")
        assert await succeeded(failover.new) == Counter(kept)


async def test_a_transactional_handler_commits_nothing_for_a_job_that_has_got_the_id_of_its_own(failover: Failover):
    registry, ran = Registry(), []

    @registry.job()
    async def filler(job: Job[str]) -> None:
        ran.append(job.payload)

    @registry.job(transactional=True)
    async def move(job: Job[str]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1)", job.payload)

    async with failover.executor(registry, ORIGINS[:1]) as executor:
        await failover.lose_what_follows()
        await enqueue(failover.old, filler, ["filler"] * LOST, origin=ORIGINS[0])
        await eventually(lambda: len(ran) == LOST)
        failover.proxy.hold()  # the handlers are about to open their transactions
        lost = await enqueue(failover.old, move, [f"lost {n}" for n in range(3)], origin=ORIGINS[0])
        await eventually(lambda: executor.workers.running() == len(lost) <= failover.proxy.waiting)
        await failover.happen()
        kept = await enqueue(failover.new, move, [f"kept {n}" for n in range(2 * LOST)], origin=ORIGINS[0])
        assert set(lost) < set(kept)
        reading = failover.proxy.arm("read", Moment.SILENT_BEFORE)
        failover.proxy.heal()
        failover.proxy.pass_on()  # they begin on the new server, before anything has noticed that it is another one
        await eventually(lambda: reading.hits and not executor.workers.running())
        failover.proxy.heal()
        await drained(failover.new)
        rows = await fetch(failover.new, "SELECT token FROM effect")
        assert Counter(row["token"] for row in rows) == Counter(f"kept {n}" for n in range(2 * LOST))
        assert await succeeded(failover.new) == Counter(kept)


async def test_all_that_the_new_timeline_has_ends_there_exactly_once(failover: Failover):
    registry, ran = Registry(), []

    @registry.job(group="group")
    async def step(job: Job[dict[str, str]]) -> None:
        ran.append(job.payload["token"])
        await asyncio.sleep(0.01)

    @registry.job(group="group", transactional=True)
    async def move(job: Job[dict[str, str]]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1)", job.payload["token"])
        ran.append(job.payload["token"])

    async def write(dsn: str, label: str) -> set[int]:
        """Enqueue jobs; what has committed stands in the ledger."""
        written: set[int] = set()
        for number in range(LOST // 5):
            async with connected(dsn) as connection, connection.transaction():
                for job_type in (step, move):
                    tokens = [f"{label} {job_type.name} {number} {n}" for n in range(5)]
                    payloads = [{"group": f"g{number % 3}", "token": token} for token in tokens]
                    ids = await job_type.enqueue_many(connection, payloads, origin=ORIGINS[number % 2])
                    rows = [(id, token, job_type.name) for id, token in zip(ids, tokens, strict=True)]
                    await connection.executemany("INSERT INTO ledger VALUES ($1, $2, $3)", rows)
                    written |= set(ids)
        return written

    async with (
        failover.executor(registry, ORIGINS[:1], concurrency=8),
        failover.executor(registry, ORIGINS[1:], concurrency=8),
    ):
        await write(failover.old, "early")
        await eventually(lambda: len(ran) >= LOST // 2)
        await failover.lose_what_follows()
        lost = await write(failover.old, "lost")
        await eventually(lambda: sum("lost" in token for token in ran) >= LOST)
        await failover.happen()
        failover.proxy.heal()
        late = await write(failover.new, "late")
        assert lost & late
        await drained(failover.new)
        ledger = await fetch(failover.new, "SELECT * FROM ledger")
        assert await succeeded(failover.new) == Counter(row["job"] for row in ledger)
        assert {row["token"] for row in ledger} <= set(ran)
        effects = await fetch(failover.new, "SELECT token FROM effect")
        moved = Counter(row["token"] for row in ledger if row["type"] == "move")
        assert Counter(row["token"] for row in effects) == moved


async def test_when_one_connection_has_met_the_new_server_all_work_goes_on_there(failover: Failover):
    """The former primary lives on, as it may behind a proxy that moves new connections only."""
    registry, ran = Registry(), []

    @registry.job()
    async def step(job: Job[str]) -> None:
        ran.append(job.payload)

    async with failover.executor(registry, ORIGINS, lease_seconds=2.0):
        await enqueue(failover.old, step, ["early"], origin=ORIGINS[0])
        await drained(failover.old)
        await failover.lose_what_follows()
        await failover.switch()
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        cycles = f"SELECT pg_terminate_backend(pid) {others} AND query ~ 'THE CYCLE'"
        assert await fetch(failover.old, cycles)  # one or two: cycles alternate between two connections
        await enqueue(failover.old, step, ["lost"], origin=ORIGINS[0])  # has the next cycle sent
        await enqueue(failover.new, step, ["late"], origin=ORIGINS[1])
        await drained(failover.new)
        assert ran == ["early", "late"]
        seen: dict[tuple[str, int], Any] = {}

        async def renewed() -> bool:
            leases = await fetch(failover.new, "SELECT origin, epoch, lease_until FROM sidings.origin")
            return all(row[2] > seen.setdefault((row[0], row[1]), row[2]) for row in leases)

        await eventually(renewed, "the leases are renewed there")


async def meets_the_new_server(failover: Failover, query: str) -> None:
    """The connection of this query is cut, and leads to the new server from now on; the others to the former one."""
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    assert await fetch(failover.old, f"SELECT pg_terminate_backend(pid) {others} AND query ~ '{query}'")


async def is_anothers_on_the_new_server(failover: Failover, origin: str) -> None:
    acquire = "SELECT 1 FROM sidings.acquire(gen_random_uuid(), ARRAY[$1], 9, '1 hour', false)"
    assert await value(failover.new, acquire, origin)


@pytest.mark.parametrize("when", ["before the answer", "at the first read"])
async def test_a_lease_that_a_former_primary_has_granted_is_none(failover: Failover, when: str):
    """It was asked for before anything had met the new server."""
    registry, ran = Registry(), []

    @registry.job()
    async def step(job: Job[str]) -> None:
        ran.append(job.payload)

    ours, others = ORIGINS
    at_first = [] if when == "at the first read" else [ours]
    async with failover.executor(registry, at_first, lease_seconds=3.0) as executor:
        await failover.lose_what_follows()
        asked = failover.proxy.arm("acquire", Moment.HELD)
        executor.assign([*at_first, others], 2)
        granted = "SELECT owner FROM sidings.origin WHERE origin = $1"
        await eventually(lambda: value(failover.old, granted, others))
        await failover.switch()
        await is_anothers_on_the_new_server(failover, others)
        if at_first:
            await meets_the_new_server(failover, "THE READ")
            await eventually(lambda: not executor.held)
        assert asked.hits
        failover.proxy.let_go()
        await enqueue(failover.new, step, ["another one's"], origin=others)
        waits = "SELECT wanted_by FROM sidings.origin WHERE origin = $1"

        async def knows() -> bool:
            return await value(failover.new, waits, others) == executor.id

        await eventually(knows, "it has asked the new server")
        await enqueue(failover.new, step, ["ours"], origin=ours)
        executor.assign(ORIGINS, 3)
        await eventually(lambda: "ours" in ran)
        assert ran == ["ours"]
        assert executor.held.keys() == {ours}


async def test_what_another_may_have_under_a_lease_that_got_lost_is_not_acquired_within_it(failover: Failover):
    """On the new server the origin was free, and ran beside its owner's jobs at once."""
    async with failover.executor(Registry(), ORIGINS[1:], lease_seconds=3.0) as executor:
        await failover.lose_what_follows()
        acquire = "SELECT acquired FROM sidings.acquire(gen_random_uuid(), ARRAY[$1], 9, '3 s', true)"
        assert await value(failover.old, acquire, ORIGINS[0])
        granted = now()
        await failover.happen()
        failover.proxy.heal()
        executor.assign(ORIGINS, 10)
        await eventually(lambda: executor.held.keys() == {*ORIGINS})
        assert now() > granted + 3.0


async def test_jobs_of_what_another_may_have_under_a_lease_that_got_lost_are_not_moved_within_it(failover: Failover):
    """On the new server the origin was free: its jobs were moved, and ran elsewhere, beside those that ran already."""
    async with failover.executor(Registry(), ORIGINS[1:], lease_seconds=2.0):
        await failover.lose_what_follows()
        acquire = "SELECT acquired FROM sidings.acquire(gen_random_uuid(), ARRAY[$1], 9, '2 s', true)"
        assert await value(failover.old, acquire, ORIGINS[0])
        granted = now()
        await failover.happen()
        async with connected(failover.new) as connection:
            admin = Admin(connection, actor="alice")

            async def moved() -> bool:
                with suppress(ActionRefused):
                    return await admin.move(*ORIGINS, lease_seconds=2.0) == 0
                return False

            with pytest.raises(ActionRefused, match="the server that this one has replaced: no executor has known"):
                await admin.move(*ORIGINS, lease_seconds=2.0)
            failover.proxy.heal()
            await eventually(moved)
            assert now() > granted + 2.0


async def test_what_had_run_out_before_the_failover_may_be_anothers_although_the_new_server_has_it_as_ones_own(
    failover: Failover,
):
    async with failover.executor(Registry(), ORIGINS[:1], lease_seconds=2.0) as executor:
        await failover.lose_what_follows()
        failover.proxy.cut()
        acquire = "SELECT acquired FROM sidings.acquire(gen_random_uuid(), ARRAY[$1], 9, '2 s', true)"
        await eventually(lambda: value(failover.old, acquire, ORIGINS[0]), "the lease has run out, and is another's")
        granted = now()
        await failover.happen()
        failover.proxy.heal()
        await eventually(lambda: executor.held)
        assert now() > granted + 2.0


async def test_who_starts_after_a_failover_waits_once_for_leases_that_may_have_got_lost(failover: Failover):
    """On the new server the origin was free to who started, and ran beside its owner's jobs at once."""
    await failover.lose_what_follows()
    acquire = "SELECT acquired FROM sidings.acquire(gen_random_uuid(), ARRAY[$1], 9, '3 s', true)"
    assert await value(failover.old, acquire, ORIGINS[0])
    granted = now()
    await failover.happen()
    failover.proxy.heal()
    async with failover.executor(Registry(), ORIGINS[:1], lease_seconds=3.0):
        assert now() > granted + 3.0
    asked = failover.proxy.arm("acquire", Moment.SLOW, 100)
    async with failover.executor(Registry(), ORIGINS[:1], lease_seconds=3.0):
        assert asked.hits == 1


async def test_a_timeline_known_since_a_time_to_come_makes_nobody_wait_for_that(failover: Failover):
    """The clock was wrong, and has been set back."""
    async with connected(failover.old) as connection:
        ahead = "UPDATE sidings.service SET timeline_since = clock_timestamp() + interval '1 hour'"
        await connection.execute(ahead)
    async with failover.executor(Registry(), ORIGINS, lease_seconds=0.5) as executor:
        assert executor.held


async def test_where_a_schema_is_made_after_a_failover_nobody_waits(failover: Failover):
    await failover.happen()
    database = await create_database(failover.line.dsn(failover.standby), f"later_{token_hex(4)}")
    await migrate(database, service="test")
    since = "SELECT timeline_since > now() - interval '15 s' FROM sidings.service"
    assert not await value(database, f"{since} WHERE timeline = sidings.timeline()")


async def test_the_fencing_token_grows_although_the_new_server_lacks_takeovers(failover: Failover):
    """Else a receiver refuses who holds the origin there, or believes both."""
    registry, tokens = Registry(), []

    @registry.job()
    async def step(job: Job[str]) -> None:
        tokens.append(job.fence)

    async with failover.executor(registry, ORIGINS[:1], lease_seconds=2.0) as executor:
        await failover.lose_what_follows()
        for generation in range(2, 6):
            executor.assign(ORIGINS[:1] if generation % 2 else [], generation)
            await executor.settled(SECONDS)
        await enqueue(failover.old, step, ["lost"], origin=ORIGINS[0])
        await eventually(lambda: tokens)
        await failover.happen()
        await enqueue(failover.new, step, ["late"], origin=ORIGINS[0])
        failover.proxy.heal()
        await eventually(lambda: len(tokens) == 2)
    assert tokens[0] < tokens[1]


async def test_leases_are_renewed_where_they_were_granted(failover: Failover):
    """The former primary has granted it, too, in an answer that got lost, and says that it is none of ours."""
    registry = Registry()
    async with failover.executor(registry, ORIGINS[:1], lease_seconds=1.0) as executor:
        first = await value(failover.old, "SELECT lease_until FROM sidings.origin")

        async def renewed() -> bool:
            return await value(failover.old, "SELECT lease_until FROM sidings.origin") > first

        await eventually(renewed, "the lease thread has its connection")
        executor.assign([], 2)
        await executor.settled(SECONDS)
        await failover.lose_what_follows()
        await failover.switch()
        failover.proxy.arm("acquire", Moment.AFTER)
        executor.assign(ORIGINS[1:], 3)
        await executor.settled(SECONDS)
        lease = "SELECT lease_until FROM sidings.origin WHERE origin = $1"
        at_first = await value(failover.new, lease, ORIGINS[1])

        async def renewed_there() -> bool:
            return await value(failover.new, lease, ORIGINS[1]) > at_first

        granted = executor.held
        await eventually(renewed_there, "the lease is renewed on the new server")
        assert executor.held == granted


async def test_renewals_may_be_the_first_to_meet_the_new_server(failover: Failover):
    registry, ran = Registry(), []

    @registry.job()
    async def step(job: Job[str]) -> None:
        ran.append(job.payload)

    async with failover.executor(registry, ORIGINS[:1], lease_seconds=2.0):
        await enqueue(failover.old, step, ["early"], origin=ORIGINS[0])
        await drained(failover.old)
        renewals = "SELECT count(*) FROM pg_stat_activity WHERE query ~ 'Renew the listed' AND pid <> pg_backend_pid()"
        await eventually(lambda: value(failover.old, renewals), "the lease thread has its connection")
        await failover.lose_what_follows()
        await failover.switch()
        await meets_the_new_server(failover, "Renew the listed")
        await enqueue(failover.new, step, ["late"], origin=ORIGINS[0])
        await drained(failover.new)
    assert ran == ["early", "late"]


async def test_transactional_handlers_do_not_go_on_with_connections_to_a_former_primary(failover: Failover):
    registry, ran = Registry(), []

    @registry.job(transactional=True)
    async def move(job: Job[str]) -> None:
        ran.append(job.payload)
        await job.tx.execute("INSERT INTO effect VALUES ($1)", job.payload)

    async with failover.executor(registry, ORIGINS[:1]):
        await enqueue(failover.old, move, ["early"], origin=ORIGINS[0])
        await drained(failover.old)
        await failover.lose_what_follows()
        await failover.switch()
        await meets_the_new_server(failover, "THE READ")
        await enqueue(failover.new, move, ["late"], origin=ORIGINS[0])
        await drained(failover.new)
        rows = await fetch(failover.new, "SELECT token FROM effect")
        assert [row["token"] for row in rows] == ["early", "late"]
        assert ran == ["early", "late"]


async def test_a_transactional_end_may_be_the_first_to_meet_the_new_server(failover: Failover):
    """Its connection is a young one; all others lead to the former primary, which would grant the lease again."""
    registry = Registry()

    @registry.job()
    async def step(_: Job[str]) -> None: ...

    @registry.job(transactional=True)
    async def move(job: Job[str]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1)", job.payload)

    async with failover.executor(registry, ORIGINS[:1], lease_seconds=2.0):
        await enqueue(failover.old, step, ["early"], origin=ORIGINS[0])
        await drained(failover.old)
        renewals = "SELECT count(*) FROM pg_stat_activity WHERE query ~ 'Renew the listed' AND pid <> pg_backend_pid()"
        await eventually(lambda: value(failover.old, renewals), "the lease thread has its connection")
        await failover.lose_what_follows()
        await failover.switch()
        await enqueue(failover.old, move, ["lost"], origin=ORIGINS[0])
        await enqueue(failover.new, move, ["late"], origin=ORIGINS[0])
        await drained(failover.new)
        rows = await fetch(failover.new, "SELECT token FROM effect")
        assert [row["token"] for row in rows] == ["late"]


async def test_an_executor_of_which_the_new_server_does_not_know_registers_there(failover: Failover):
    """And not with the former primary, to which its first connection still leads."""
    registry, ran = Registry(), []

    @registry.job()
    async def step(job: Job[str]) -> None:
        ran.append(job.payload)

    await failover.lose_what_follows()
    async with failover.executor(registry, ORIGINS[:1]):
        await enqueue(failover.old, step, ["early"], origin=ORIGINS[0])
        await drained(failover.old)
        await failover.switch()
        await meets_the_new_server(failover, "THE CYCLE")
        await enqueue(failover.old, step, ["lost"], origin=ORIGINS[0])  # has the next cycle sent
        await enqueue(failover.new, step, ["late"], origin=ORIGINS[0])
        await drained(failover.new)
    assert ran == ["early", "late"]


async def test_a_services_transactions_leave_a_former_primary(failover: Failover):
    """What they wrote there would be lost, without a word."""
    service = Service(
        "test",
        postgres=PostgresSettings(dsn=failover.proxy.dsn),
        assignment=StaticAssignment(ORIGINS[:1]),
        prometheus=CollectorRegistry(),
    )
    ran = asyncio.Event()

    @service.job()
    async def step(job: Job[str]) -> None:
        ran.set()

    async def write(token: str) -> None:
        async with service.transaction() as tx:
            await tx.execute("INSERT INTO effect VALUES ($1)", token)

    async with service:
        await service.executor.settled(SECONDS)
        await write("early")
        await failover.lose_what_follows()
        await failover.switch()
        await meets_the_new_server(failover, "THE READ")
        await enqueue(failover.new, step, ["x"], origin=ORIGINS[0])
        await asyncio.wait_for(ran.wait(), SECONDS)
        await write("late")
    rows = await fetch(failover.new, "SELECT token FROM effect")
    assert [row["token"] for row in rows] == ["early", "late"]


def a_recorder(failover: Failover, kafka: str, topic: str, *, lease_seconds: float) -> Service:
    """A service whose messages each leave their number in `effect`."""
    settings = {"fetch_seconds": 0.05, "group": topic}
    service = a_service(failover.proxy.dsn, kafka, settings=settings, executor={"lease_seconds": lease_seconds})

    @service.consumer(topic)
    async def record(message: Message[Number], tx: Transaction) -> None:
        await tx.execute("INSERT INTO effect VALUES ($1)", str(message.value.n))

    return service


async def recorded(dsn: str, numbers: range) -> bool:
    rows = await fetch(dsn, "SELECT token FROM effect ORDER BY token")
    return [row["token"] for row in rows] == [str(number) for number in numbers]


async def test_a_consumer_leaves_a_former_primary_and_does_there_anew_what_was_lost(
    failover: Failover, topic: Any, sidings_kafka: str
):
    name = await topic()
    service = a_recorder(failover, sidings_kafka, name, lease_seconds=60.0)
    async with service:
        await produce(sidings_kafka, name, range(1, 4))
        await eventually(lambda: recorded(failover.old, range(1, 4)))
        await service.executor.settled(SECONDS)
        await failover.lose_what_follows()
        await produce(sidings_kafka, name, range(4, 7))
        await eventually(lambda: recorded(failover.old, range(1, 7)))
        before = service.executor.held[f"{name}/0"]
        await failover.switch()
        await meets_the_new_server(failover, "THE READ")
        await eventually(lambda: service.executor.held.get(f"{name}/0", 0) > before, "the executor goes on there")
        await produce(sidings_kafka, name, range(7, 9))
        await eventually(lambda: recorded(failover.new, range(1, 9)), "all of them have their effects there, once")


@pytest.mark.parametrize("former", ["dies", "lives on"])
async def test_a_consumer_does_anew_what_was_lost_of_a_partition_in_which_nothing_happens_any_more(
    failover: Failover, topic: Any, sidings_kafka: str, former: str
):
    """It went on where it was, until the next message came, and left out what the new server lacks till then."""
    name = await topic()
    service = a_recorder(failover, sidings_kafka, name, lease_seconds=3.0)
    async with service:
        await produce(sidings_kafka, name, range(1, 4))
        await eventually(lambda: recorded(failover.old, range(1, 4)))
        await failover.lose_what_follows()
        await produce(sidings_kafka, name, range(4, 7))
        await eventually(lambda: recorded(failover.old, range(1, 7)))
        if former == "dies":
            await failover.happen()
            failover.proxy.heal()
        else:
            await failover.switch()
            await meets_the_new_server(failover, "THE READ")
        await eventually(lambda: recorded(failover.new, range(1, 7)), "all of them have their effects there, once")


@pytest.mark.long
async def test_an_executor_that_starts_on_a_server_just_promoted_believes_no_expiry(failover: Failover):
    """The standby has an old lease: its renewals got lost. The handler goes on under the last of them."""
    registry, seen = Registry(), []

    @registry.job()
    async def step(job: Job[str]) -> None:
        seen.append(f"attempt {job.attempt} starts")
        try:
            if job.attempt == 1:
                await asyncio.Event().wait()
        finally:
            seen.append(f"attempt {job.attempt} ends")

    lease = {"lease_seconds": 3.0}
    async with failover.executor(registry, ORIGINS[:1], **lease):
        await enqueue(failover.old, step, ["x"], origin=ORIGINS[0])
        await eventually(lambda: seen)
        await failover.lose_what_follows()
        expired = "SELECT bool_and(lease_until < clock_timestamp()) FROM sidings.origin"
        await eventually(lambda: value(failover.new, expired))
        await failover.happen()
        standby = PostgresSettings(dsn=failover.new)
        fresh = Executor(
            "test", registry, standby, ExecutorSettings(**lease, poll_seconds=0.02), prometheus=CollectorRegistry()
        )
        await fresh.start()
        try:
            fresh.assign(ORIGINS[:1], 2)
            await drained(failover.new)
        finally:
            await fresh.stop()
        failover.proxy.heal()
    assert seen == ["attempt 1 starts", "attempt 1 ends", "attempt 2 starts", "attempt 2 ends"]


async def test_who_looks_at_a_standby_is_told_what_it_may_lack(failover: Failover):
    """It was said, as if of now, that leases have run out and nobody holds what was held all the time."""
    async with failover.executor(Registry(), ORIGINS[:1], lease_seconds=4.0) as executor:
        await failover.lose_what_follows()
        expired = "SELECT bool_and(lease_until < clock_timestamp()) FROM sidings.origin"
        await eventually(lambda: value(failover.new, expired))
        status = await cli(failover.new, "status", exit_code=4)
        assert "! no executor holds an origin" in status.stdout
        assert "this is a standby, and may lack what is newer than its last transaction, committed at" in status.stderr
        assert "standby" not in (await cli(failover.old, "status")).output
        for dsn, is_one in ((failover.new, True), (failover.old, False)):
            for command in (("status",), ("jobs", "list"), ("consumers", "list")):
                found = await cli(dsn, *command, "--json", exit_code=4 if is_one and "status" in command else 0)
                assert json.loads(found.stdout)["standby"] is is_one
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(pages(PostgresSettings(dsn=failover.new))), base_url="http://pages"
        ) as browser:
            assert "this is a standby, and may lack" in (await browser.get("/origins")).text
        assert executor.held


async def test_a_message_that_was_lost_does_not_pass_for_acknowledged(failover: Failover):
    """Its ids are others' on the new server."""
    async with publishing(failover.proxy.dsn) as (outbox, connection):
        await failover.lose_what_follows()
        async with connection.transaction():
            receipt = await outbox.publish(connection, "etas", key="a", value=b"lost")
        await failover.happen()
        failover.proxy.heal()
        while await value(failover.new, "SELECT pg_current_xact_id()::text::bigint") <= receipt.txid:
            pass
        with pytest.raises(PostgresUnavailable, match="whether it was kept is not known"):
            await outbox.published(receipt, timeout=SECONDS)


async def test_a_relay_says_that_topics_of_directory_tables_may_have_what_was_lost(
    failover: Failover, sidings_kafka: str, topic, caplog: pytest.LogCaptureFixture
) -> None:
    """Services kept the lost value until the row's next change, and nobody knew."""
    rates = await topic("rates", config=COMPACTED)
    async with connected(failover.old) as connection:
        await connection.execute("CREATE TABLE rate (id text PRIMARY KEY, cents int)")
        await connection.execute(f"SELECT sidings.directory_table('rate', topic => '{rates}', key => '{{id}}')")
        await connection.execute("INSERT INTO rate VALUES ('a', 1), ('b', 1)")
    async with relaying(failover.proxy.dsn, sidings_kafka, lease_seconds=2.0) as relay:
        await emptied(failover.old)
        await failover.lose_what_follows()
        async with connected(failover.old) as connection:
            await connection.execute("UPDATE rate SET cents = 2 WHERE id = 'a'")
        await emptied(failover.old)
        await failover.happen()
        await eventually(lambda: not relay.held, "the leases have run out")
        failover.proxy.heal()
        await eventually(lambda: len(relay.held) == 16)
        assert f"so call directory_republish: {rates}" in caplog.text
        await value(failover.new, "SELECT sidings.directory_republish('rate')")
        await emptied(failover.new)
    sent = [json.loads(record.value)["cents"] for record in await records(sidings_kafka, rates) if record.key == b"a"]
    assert sent[:2] == [1, 2]
    assert sent[-1] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "first",
    ["relay.s heartbeat|sidings.acquire", "THE READ"],
    ids=["that of the slots", "that of the reads"],
)
async def test_a_relay_of_which_one_connection_has_met_the_new_server_sends_what_is_published_there(
    failover: Failover, sidings_kafka: str, topic, first: str
) -> None:
    """The former primary lives on. A relay that read on one server what it had leased on another sent nothing any more,
    or sent it again and again."""
    etas = await topic("etas", partitions=3)
    async with relaying(failover.proxy.dsn, sidings_kafka, lease_seconds=2.0) as relay:
        await publish(failover.old, etas, numbered(0, 400))
        await emptied(failover.old)
        await failover.lose_what_follows()
        await failover.switch()
        await meets_the_new_server(failover, first)
        await publish(failover.new, etas, numbered(400, 400))
        await emptied(failover.new)
        await eventually(lambda: len(relay.held) == 16)
    assert_complete(await records(sidings_kafka, etas), 800)
