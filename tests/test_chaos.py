"""Everything at once, for a minute or more: `make chaos`.

The seed is printed; SIDINGS_CHAOS_SEED repeats a run (as far as the machine lets it), SIDINGS_CHAOS_SECONDS sets how
long it goes on.
"""

import asyncio
import os
import random
from pathlib import Path

import asyncpg
import pytest
from sidings.devstack import Postgres, ServerState
from sidings.devstack.databases import create_database, ensure_template
from sidings.devstack.fixtures import OwnPostgres

from .chaos_worker import SERVICE
from .faulty_proxy import KINDS, FaultyProxy, Moment
from .fleet import AWAY, Fleet, Member, shares

ORIGINS = [f"t/{number}" for number in range(24)]
MEMBERS = 4
SETTINGS = {
    "lease_seconds": 2.0,
    "drain_seconds": 0.5,
    "shutdown_seconds": 1.0,
    "stall_seconds": 1.0,
    "audit_seconds": 5.0,
}


class Chaos:
    """Members behind proxies of their own, and what can happen to them. All choices come from one random generator."""

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
        for number in range(MEMBERS):
            self.proxies.append(FaultyProxy(self.fleet.dsn))
            await self.proxies[-1].start()
            self.members.append(self.spawn(number))
        self.reassign()
        tasks = [
            asyncio.create_task(coroutine) for coroutine in (self.produce(), self.restart_the_dead(), self.happen())
        ]
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
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
        return self.fleet.spawn(name, self.dealt.get(number, []), self.generation, dsn=self.proxies[number].dsn)

    def reassign(self, *, stale: int | None = None) -> None:
        """Deal the origins anew; a stale member does not hear of it."""
        self.generation += 1
        order = self.random.sample(ORIGINS, len(ORIGINS))
        share = shares(order, self.members[: self.random.randint(1, MEMBERS)])
        for number, member in enumerate(self.members):
            self.dealt[number] = share.get(member, [])
            if number != stale:
                member.assign(self.dealt[number], self.generation)

    async def produce(self) -> None:
        while True:
            kind = self.random.choice(["step"] * 5 + ["single", "flaky", "transfer", "thread"])
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

    async def happen(self) -> None:
        """One thing after the other; what takes its time goes on beside the next."""
        async with asyncio.TaskGroup() as group:
            while True:
                thing = self.random.choice(
                    [self.kill] * 4 + [self.pause] * 3 + [self.stop] * 2 + [self.shuffle] * 3 + [self.fault] * 4
                    + [self.leave_stale, self.cut, self.silence, self.depose, self.kill_server, self.pause_server]
                )  # fmt: skip
                number = self.random.randrange(MEMBERS)
                self.done.append(f"{thing.__name__}({number})")
                group.create_task(thing(number))
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


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_chaos(own_postgres: OwnPostgres, tmp_path: Path):
    seed = int(os.environ.get("SIDINGS_CHAOS_SEED") or random.randrange(1_000_000))
    seconds = float(os.environ.get("SIDINGS_CHAOS_SECONDS") or 80)
    print(f"SIDINGS_CHAOS_SEED={seed}")
    server = await asyncio.to_thread(own_postgres)
    template = await ensure_template(server.dsn, service=SERVICE)
    dsn = await create_database(server.dsn, "chaos", template=template)
    settings = {**SETTINGS, "poison_after": 10_000}
    async with Fleet(dsn, tmp_path, executor=settings, postgres={"call_seconds": 1.0, "connect_seconds": 1.0}) as fleet:
        chaos = Chaos(fleet, server, seed)
        try:
            await chaos.run(seconds)
            await fleet.finish(timeout=120)
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
