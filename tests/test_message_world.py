"""The whole life of messages, from topics through handlers, Postgres, outbox and relays into topics and directories,
while everything dies, pauses and comes back: each has its effects once, in order, and nothing stands still at the end.

What happens is chosen by a seed, which is printed; SIDINGS_CHAOS_SEED repeats it, as far as the machine lets it.
SIDINGS_CHAOS_SECONDS sets how long faults happen.
"""

import asyncio
import logging
import os

import pytest

from .message_world import World, network_to, plan
from .stress_support import a_seed

FAULT_SECONDS = float(os.environ.get("SIDINGS_CHAOS_SECONDS", "30"))
RUNS = 1 if "SIDINGS_CHAOS_SEED" in os.environ else 3


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", range(RUNS))
async def test_whatever_happens_all_messages_have_their_effects_once_and_in_order(
    run, own_postgres, own_kafka, tmp_path, caplog
):
    caplog.set_level(logging.CRITICAL, "aiokafka")  # the test's own producers meet all of it, too
    seed = a_seed()
    postgres = await asyncio.to_thread(own_postgres, {"deadlock_timeout": "100ms"})
    async with network_to(own_kafka) as (kafka, network):
        world = World(seed, tmp_path, postgres, kafka, network)
        try:
            await world.start()
            await world.run(plan(seed, FAULT_SECONDS))
            await world.settle()
            assert not world.wrong, "\n".join(world.wrong[:20])
        finally:
            print(*world.log, sep="\n")
            await world.end()
