"""Everything at once, for a minute or more: `make chaos`.

The seed is printed; SIDINGS_CHAOS_SEED repeats a run (as far as the machine lets it), SIDINGS_CHAOS_SECONDS sets how
long it goes on.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import asyncpg
import pytest
from sidings.devstack import Postgres, ServerState
from sidings.devstack.databases import create_database, ensure_template
from sidings.devstack.fixtures import OwnPostgres
from sidings.errors import JobNotFound, SidingsError
from sidings.jobs.admin import Admin
from sidings.schema import migrations

from .chaos_worker import SERVICE
from .faulty_proxy import KINDS, FaultyProxy, Moment
from .fleet import AWAY, Fleet, Member, shares, until
from .support import fetch, value

ROOT = Path(__file__).resolve().parents[1]
ORIGINS = [f"t/{number}" for number in range(24)]
SETTINGS = {
    "lease_seconds": 2.0,
    "drain_seconds": 0.5,
    "shutdown_seconds": 1.0,
    "stall_seconds": 1.0,
    "audit_seconds": 5.0,
}


class Chaos:
    """Members behind proxies of their own, and what can happen to them. All choices come from one random generator."""

    size = 4  # members
    takeover_seconds = 5.0  # in which others take over what a member has that stands still
    kinds = ("step",) * 5 + ("single", "flaky", "transfer", "thread")

    def __init__(self, fleet: Fleet, server: Postgres, seed: int) -> None:
        self.fleet = fleet
        self.server = server
        self.random = random.Random(seed)
        self.proxies: list[FaultyProxy] = []
        self.members: list[Member] = []
        self.stopping: set[Member] = set()
        self.generation = 1
        self.dealt: dict[int, list[str]] = {}
        self.enqueued = 0
        self.done: list[str] = []
        self.busy = asyncio.Lock()  # on the server: a pause must not meet a kill

    async def run(self, seconds: float) -> None:
        """Produce, and let things happen; then let all heal."""
        for number in range(self.size):
            self.proxies.append(FaultyProxy(self.fleet.dsn))
            await self.proxies[-1].start()
            self.members.append(self.spawn(number))
        self.reassign()
        tasks = [
            asyncio.create_task(coroutine) for coroutine in (self.produce(), self.restart_the_dead(), self.happen())
        ]
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:  # none ends by itself: what it raised says why
                task.result()
            assert not done, done
        finally:
            async with self.busy:  # the thread that kills or pauses the server has come to its end
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        await self.heal()

    async def heal(self) -> None:
        for proxy in self.proxies:
            proxy.faults.clear()
            proxy.heal()
            proxy.let_go()
        for number, member in enumerate(self.members):
            if member.paused:
                member.resume()
            if member.exit_code is not None or member in self.stopping:
                self.members[number] = self.spawn(number)
        if self.server.status().state is ServerState.PAUSED:
            await asyncio.to_thread(self.server.resume)
        await asyncio.to_thread(self.server.start)
        self.reassign()

    def spawn(self, number: int) -> Member:
        name = f"member{number}-{len(self.fleet.members)}"
        return self.fleet.spawn(
            name, self.dealt.get(number, []), self.generation, dsn=self.proxies[number].dsn, enough=self.enough()
        )

    def enough(self) -> int:
        """There is not so much to do that two cycles would ever be in flight by themselves."""
        return self.random.choice([1, 10, 300])

    def reassign(self, *, stale: int | None = None) -> None:
        """Deal the origins anew; a stale member does not hear of it."""
        self.generation += 1
        order = self.random.sample(ORIGINS, len(ORIGINS))
        share = shares(order, self.members[: self.random.randint(1, self.size)])
        for number, member in enumerate(self.members):
            self.dealt[number] = share.get(member, [])
            if number != stale:
                member.assign(self.dealt[number], self.generation)

    async def produce(self) -> None:
        while True:
            kind = self.random.choice(self.kinds)
            try:
                self.enqueued += len(
                    await self.fleet.enqueue(
                        kind,
                        self.random.sample(ORIGINS, 6),
                        groups=self.random.randint(1, 4),
                        each=self.random.randint(1, 3),
                        group=kind,
                        delay=self.random.choice([None, None, None, 0.5]) if kind == "single" else None,
                        ms=self.random.choice([0, 10, 50, 200]),
                        fail=self.random.choice([0, 1, 2]),
                    )
                )
            except (*AWAY, asyncpg.PostgresError):
                async with self.busy:
                    pass  # the server, where it was killed or paused, is back
            while self.enqueued > 400 + len({record["job"] for record in self.fleet.started()}):
                await asyncio.sleep(0.1)
            await asyncio.sleep(self.random.uniform(0, 0.1))

    async def restart_the_dead(self) -> None:
        while True:
            for number, member in enumerate(self.members):
                if member.exit_code is not None:
                    self.members[number] = self.spawn(number)
            await asyncio.sleep(0.1)

    def things(self) -> list[Callable[[int], Awaitable[None]]]:
        """What may happen to a member of that number, as often as it stands here."""
        return (
            [self.kill] * 4 + [self.pause] * 3 + [self.outlast] * 3 + [self.stop] * 2 + [self.shuffle] * 3
            + [self.fault] * 4
            + [self.leave_stale, self.cut, self.silence, self.depose, self.kill_server, self.pause_server]
        )  # fmt: skip

    async def happen(self) -> None:
        """One thing after the other; what takes its time goes on beside the next."""
        things = self.things()
        async with asyncio.TaskGroup() as group:
            while True:
                thing = self.random.choice(things)
                number = self.random.randrange(self.size)
                self.done.append(f"{thing.__name__}({number})")
                group.create_task(_do(thing, number))
                await asyncio.sleep(self.random.uniform(0.1, 2))

    async def kill(self, number: int) -> None:
        if self.members[number].exit_code is None:
            await asyncio.to_thread(self.members[number].kill)

    async def pause(self, number: int) -> None:
        member = self.members[number]
        if not member.paused and member.exit_code is None:
            member.pause()
            await asyncio.sleep(self.random.uniform(0.2, 4))
            if member.paused:
                member.resume()

    async def outlast(self, number: int) -> None:
        """A cycle stands still on its way, and its sender with it, until others have taken of its origins over."""
        member, proxy = self.members[number], self.proxies[number]
        kept = proxy.arm("cycle", Moment.KEPT)
        with suppress(AssertionError):
            await until(lambda: kept.hits, "a cycle", timeout=2.0)
        if kept.hits and not member.paused and member.exit_code is None:
            member.pause()
            self.reassign()
            with suppress(AssertionError):
                before = await self.fence(member)
                await until(lambda: self.fenced(member, before), "a takeover", timeout=self.takeover_seconds)
                self.done.append("it arrives")
            proxy.let_go()
            await asyncio.sleep(self.random.uniform(0, 1))
            if member.paused:
                member.resume()
        kept.left = 0
        proxy.let_go()

    async def fence(self, member: Member) -> int | None:
        """None where nobody tells."""
        try:
            return await value(self.fleet.dsn, "SELECT fence FROM sidings.executor WHERE pid = $1", member.pid)
        except (*AWAY, asyncpg.PostgresError):
            return None

    async def fenced(self, member: Member, before: int | None) -> bool:
        return await self.fence(member) not in (None, before)

    async def stop(self, number: int) -> None:
        self.stopping.add(self.members[number])
        self.members[number].send({"stop": True})

    async def shuffle(self, _: int) -> None:
        self.reassign()

    async def leave_stale(self, number: int) -> None:
        self.reassign(stale=number)

    async def cut(self, number: int) -> None:
        self.proxies[number].cut()
        await asyncio.sleep(self.random.uniform(0, 3))
        self.proxies[number].heal()

    async def silence(self, number: int) -> None:
        self.proxies[number].silence()
        await asyncio.sleep(self.random.uniform(0, 3))
        self.proxies[number].heal()

    async def fault(self, number: int) -> None:
        kind = self.random.choice(list(KINDS))
        self.proxies[number].arm(kind, self.random.choice(list(Moment)), self.random.randint(1, 2))

    async def depose(self, _: int) -> None:
        try:
            await self.fleet.fetch("DELETE FROM sidings.executor WHERE pid = $1", self.members[0].pid)
        except (*AWAY, asyncpg.PostgresError):
            self.done.append("in vain")

    async def kill_server(self, _: int) -> None:
        async with self.busy:
            await asyncio.to_thread(self.server.kill)
            await asyncio.sleep(self.random.choice([0, 0, 1, 3]))
            await asyncio.to_thread(self.server.start)

    async def pause_server(self, _: int) -> None:
        async with self.busy:
            await asyncio.to_thread(self.server.pause)
            await asyncio.sleep(self.random.uniform(0.2, 3))
            await asyncio.to_thread(self.server.resume)


class Features(Chaos):
    """All kinds of jobs, members with other settings, and persons who interfere, among servers and processes that are
    killed."""

    kinds = (
        *("step", "step", "single", "flaky", "transfer", "nested", "thread", "blocking", "chain", "chain", "tangle"),
        *("many", "many", "newest", "newest", "loose", "timed", "sulky", "moody", "moody"),
    )

    def things(self) -> list[Callable[[int], Awaitable[None]]]:
        return [
            *super().things(), *[self.shuffle] * 8, *[self.cancel_job, self.hurry_job, self.pause_jobs, self.lock] * 2,
            self.terminate, self.interrupt, self.restart_server, self.crash_backend,
        ]  # fmt: skip

    def spawn(self, number: int) -> Member:
        return self.fleet.spawn(
            f"member{number}-{len(self.fleet.members)}",
            self.dealt.get(number, []),
            self.generation,
            dsn=self.proxies[number].dsn,
            postgres={"pgbouncer": number == 1},
            release=self.release(),
            notify=number == 2,
            concurrency=self.random.choice([2, 16, 100]),
            enough=self.enough(),
        )

    def release(self) -> Path | None:
        """What a new member runs with; None: this one."""
        return None

    async def heal(self) -> None:
        await super().heal()
        connection = await asyncpg.connect(self.fleet.dsn, timeout=20, command_timeout=20)
        admin = Admin(connection, actor="test")
        for pause in await admin.pauses():
            await admin.resume(type=pause.type, origin=pause.origin, group=pause.group, topic=pause.topic)
        connection.terminate()

    async def person(self, act: Callable[[Admin, asyncpg.Connection], Awaitable[object]]) -> None:
        """Somebody acts, and may be told that it cannot be done."""
        try:
            connection = await asyncpg.connect(self.fleet.dsn, timeout=5, command_timeout=10)
        except (*AWAY, asyncpg.PostgresError):
            return
        try:
            await act(Admin(connection, actor="test", timeout=5), connection)
        except (*AWAY, asyncpg.PostgresError, SidingsError) as error:
            self.done.append(f"in vain: {type(error).__name__}")
        finally:
            connection.terminate()

    async def a_job(self, connection: asyncpg.Connection) -> asyncpg.Record:
        [row] = await connection.fetch(
            'SELECT id, type, origin, "group" FROM sidings.job ORDER BY random() LIMIT 1'
        ) or [None]
        if row is None:
            raise JobNotFound("there is none")
        return row

    async def cancel_job(self, _: int) -> None:
        async def act(admin: Admin, connection: asyncpg.Connection) -> None:
            job = await self.a_job(connection)
            await self.random.choice([admin.cancel, admin.discard])(job["id"])

        await self.person(act)

    async def hurry_job(self, _: int) -> None:
        async def act(admin: Admin, connection: asyncpg.Connection) -> None:
            blocked = await admin.blocked_groups()
            if blocked and self.random.random() < 0.5:
                group = self.random.choice(blocked)
                await self.random.choice([admin.skip_head, admin.release_group, admin.clear_group])(
                    group.origin, group.group
                )
            else:
                await admin.retry_now((await self.a_job(connection))["id"])

        await self.person(act)

    async def pause_jobs(self, _: int) -> None:
        async def act(admin: Admin, connection: asyncpg.Connection) -> None:
            job = await self.a_job(connection)
            whats = [{"type": job["type"]}, {"origin": job["origin"]}]
            if job["group"] is not None:
                whats.append({"origin": job["origin"], "group": job["group"]})
            what = self.random.choice(whats)
            await admin.pause(reason="test", **what)
            await asyncio.sleep(self.random.uniform(0, 2))
            await admin.resume(**what)

        await self.person(act)

    async def lock(self, _: int) -> None:
        """Somebody's transaction holds rows."""
        rows = self.random.choice(["job", "job", "origin", "executor"])

        async def act(_: Admin, connection: asyncpg.Connection) -> None:
            async with connection.transaction():
                await connection.execute(f"SELECT FROM sidings.{rows} LIMIT 3 FOR UPDATE")
                await asyncio.sleep(self.random.uniform(0, 5))

        await self.person(act)

    async def terminate(self, _: int) -> None:
        await self.person(lambda _, c: c.execute(f"SELECT pg_terminate_backend(pid) {_SOME_BACKENDS}"))

    async def interrupt(self, _: int) -> None:
        await self.person(lambda _, c: c.execute(f"SELECT pg_cancel_backend(pid) {_SOME_BACKENDS}"))

    async def restart_server(self, _: int) -> None:
        async with self.busy:
            await asyncio.to_thread(self.server.restart)

    async def crash_backend(self, _: int) -> None:
        """The server ends all sessions then, and recovers."""
        async with self.busy:
            pids: list[int] = []

            async def act(_: Admin, connection: asyncpg.Connection) -> None:
                pids.extend(row["pid"] for row in await connection.fetch(f"SELECT pid {_SOME_BACKENDS} LIMIT 1"))

            await self.person(act)
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


_SOME_BACKENDS = (
    "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < 0.3"
)


async def _do(thing: Callable[[int], Awaitable[None]], number: int) -> None:
    await thing(number)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [Chaos, Features])
async def test_chaos(own_postgres: OwnPostgres, tmp_path: Path, kind: type[Chaos]):
    await _prove(kind, own_postgres, tmp_path)


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_an_earlier_release_beside_this_one(own_postgres: OwnPostgres, database: str, tmp_path: Path):
    """What `runs_with` in `sidings.migration` says: while instances are rolled, or rolled back, and die meanwhile."""
    rows = await fetch(database, "SELECT version, coalesce(runs_with, version) FROM sidings.migration")
    earlier = _earlier_release(tmp_path / "earlier", {row[0]: row[1] for row in rows})

    class Rolled(Features):
        def release(self) -> Path | None:
            path = self.random.choice([earlier, None])
            self.done.append("(earlier)" if path else "(this)")
            return path

    await _prove(Rolled, own_postgres, tmp_path)


def _earlier_release(folder: Path, runs_with: dict[int, int]) -> Path:
    """The folder above the package of the oldest release that starts on the schema as it is now."""
    known = [migration.version for migration in migrations()]
    names = {migration.version: migration.name for migration in migrations()}
    oldest = min(last for last in known if all(runs_with[later] <= last for later in known if later > last))
    if oldest == known[-1]:
        pytest.skip("by its migrations, no earlier release runs with this schema")
    file = f"schema/migrations/{oldest + 1:04}_{names[oldest + 1]}.sql"
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "log", "-1", "--format=%H~1", "--diff-filter=A", "--", file], capture_output=True)
    commit = found.stdout.decode().strip()
    if not commit or subprocess.run([*git, "cat-file", "-e", commit], capture_output=True).returncode:
        pytest.skip("the earlier release is in git's history, which is not all here")
    package = folder / "sidings"
    package.mkdir(parents=True)
    archive = subprocess.run([*git, "archive", commit], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(package)], input=archive.stdout, check=True)
    python = [sys.executable, "-c", "import sidings.schema as s; print(s.__file__, s.migrations()[-1].version)"]
    says = subprocess.run(python, capture_output=True, check=True, env=os.environ | {"PYTHONPATH": str(folder)})
    assert says.stdout.decode().split() == [str(package / "schema/__init__.py"), str(oldest)]
    return folder


async def _prove(kind: type[Chaos], own_postgres: OwnPostgres, tmp_path: Path) -> None:
    seed = int(os.environ.get("SIDINGS_CHAOS_SEED") or random.randrange(1_000_000))
    seconds = float(os.environ.get("SIDINGS_CHAOS_SECONDS") or 80)
    print(f"SIDINGS_CHAOS_SEED={seed}")
    server = await asyncio.to_thread(own_postgres)
    template = await ensure_template(server.dsn, service=SERVICE)
    dsn = await create_database(server.dsn, "chaos", template=template)
    settings = {**SETTINGS, "poison_after": 10_000}
    async with Fleet(dsn, tmp_path, executor=settings, postgres={"call_seconds": 1.0, "connect_seconds": 1.0}) as fleet:
        chaos = kind(fleet, server, seed)
        try:
            await chaos.run(seconds)
            restarting = asyncio.create_task(chaos.restart_the_dead())  # a handler may yet outlast a lease
            try:
                await fleet.finish(timeout=120)
            finally:
                restarting.cancel()
            for member in fleet.members:
                if member in chaos.members:
                    await member.stop()
                await member.ended()
            runs = await fleet.verify()
            log = "".join(member.log.read_text(errors="replace") for member in fleet.members)
            assert "the audit found jobs" not in log
            outcomes = await fleet.outcomes()
            print(
                f"{chaos.enqueued} jobs, {len(runs)} runs, {outcomes.count('lost')} lost, {len(fleet.members)} members"
            )
        finally:
            print(*chaos.done)
            for proxy in chaos.proxies:
                await proxy.stop()
