"""The executor's world for a minute: `executor_world.py`.

SIDINGS_CHAOS_SEED repeats a run, as far as the machine lets it; SIDINGS_CHAOS_SECONDS sets how long it goes on.
"""

import asyncio
import os
import random
from pathlib import Path

import pytest
from sidings.devstack.databases import create_database, ensure_template
from sidings.devstack.fixtures import OwnPostgres

from .chaos_worker import SERVICE
from .executor_world import TABLES, BusyWorld, ExecutorWorld, what_is_wrong
from .fleet import Fleet
from .test_chaos import SETTINGS


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [ExecutorWorld, BusyWorld])
async def test_all_that_jobs_can_be_at_once(own_postgres: OwnPostgres, tmp_path: Path, kind: type[ExecutorWorld]):
    seed = int(os.environ.get("SIDINGS_CHAOS_SEED") or random.randrange(1_000_000))
    seconds = float(os.environ.get("SIDINGS_CHAOS_SECONDS") or 30)
    print(f"SIDINGS_CHAOS_SEED={seed}")
    server = await asyncio.to_thread(own_postgres, {"track_commit_timestamp": "on", "deadlock_timeout": "100ms"})
    template = await ensure_template(server.dsn, service=SERVICE)
    dsn = await create_database(server.dsn, "world", template=template)
    settings = {**SETTINGS, "poison_after": 3}
    async with Fleet(dsn, tmp_path, executor=settings, postgres={"call_seconds": 1.0, "connect_seconds": 1.0}) as fleet:
        await fleet.execute(TABLES)
        world = kind(fleet, server, seed, directory=tmp_path)
        try:
            await world.run(seconds)
            await world.settle()
            for member in fleet.members:
                if member in world.members:
                    await member.stop()
                await member.ended()
            wrong = await what_is_wrong(fleet)
            assert not wrong, "\n".join(wrong[:30])
            log = "".join(member.log.read_text(errors="replace") for member in fleet.members)
            assert "the audit found jobs" not in log
        finally:
            print(*world.done)
            for proxy in world.proxies:
                await proxy.stop()
