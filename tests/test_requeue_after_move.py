"""A job that ended in an origin whose jobs were moved since comes back where its group is now."""

import asyncio
from itertools import pairwise

import pytest
from sidings import Admin, Busy

from .admin_support import a_holder, a_job
from .support import connected, value
from .test_admin_locks import acting, waits

GIVEN_BACK = "UPDATE sidings.origin SET owner = NULL, lease_until = NULL"


async def test_a_job_comes_back_where_its_group_was_moved_to(database: str, admin: Admin) -> None:
    """It came back in the orphaned origin, where nothing runs, and out of its group's order."""
    await a_holder(database, "new/0")
    ended = await a_job(database, origin="old/5")
    await admin.cancel(ended)
    await a_job(database, origin="old/5")
    await admin.move("old/5", "new/0")
    back = await admin.requeue(ended)
    assert await value(database, "SELECT origin FROM sidings.job WHERE id = $1", back) == "new/0"
    assert await admin.orphans() == []


@pytest.mark.parametrize("held", [False, True], ids=["nobody has it", "somebody has held it since"])
async def test_it_follows_as_far_as_its_group_was_moved(database: str, admin: Admin, held: bool) -> None:
    await a_holder(database, "new/0", "newer/0")
    ended = await a_job(database, origin="old/5")
    await admin.cancel(ended)
    await admin.move("old/5", "new/0")
    async with connected(database) as connection:
        await connection.execute(GIVEN_BACK)
        await admin.move("new/0", "newer/0")
        if held:  # and given it back, as in a handover
            await connection.execute("UPDATE sidings.origin SET epoch = epoch + 1 WHERE origin = 'old/5'")
    back = await admin.requeue(ended)
    found = await value(database, "SELECT origin FROM sidings.job WHERE id = $1", back)
    assert found == ("old/5" if held else "newer/0")


@pytest.mark.parametrize(
    "moves", [("a/0", "b/0", "a/0"), ("a/0", "b/0", "c/0", "a/0")], ids=["there and back", "round"]
)
@pytest.mark.parametrize("begin", [0, 1, 2])
async def test_it_goes_where_its_group_stands_after_moves_that_came_back(
    database: str, admin: Admin, moves: tuple[str, ...], begin: int
) -> None:
    """It was sent round ten times, and stayed wherever that ended: where nothing runs, and out of its group's order."""
    origin = moves[begin % (len(moves) - 1)]
    await a_holder(database, *set(moves))
    async with connected(database) as connection:
        await connection.execute(GIVEN_BACK)
    ended = await a_job(database, origin=origin)
    await admin.cancel(ended)
    behind = await a_job(database, origin="a/0")
    for former, new in pairwise(moves):
        await admin.move(former, new)
    back = await admin.requeue(ended)
    found = [await value(database, "SELECT origin FROM sidings.job WHERE id = $1", job) for job in (behind, back)]
    assert found == ["a/0", "a/0"]


async def test_a_move_before_its_group_came_there_counts_for_nothing(database: str, admin: Admin) -> None:
    """It went on with what had been moved away before."""
    await a_holder(database, "b/0", "c/0")
    async with connected(database) as connection:
        await connection.execute(GIVEN_BACK)
    ended = await a_job(database, origin="a/0")
    await admin.cancel(ended)
    behind = await a_job(database, origin="a/0")
    await admin.move("b/0", "c/0")
    await admin.move("a/0", "b/0")
    back = await admin.requeue(ended)
    found = [await value(database, "SELECT origin FROM sidings.job WHERE id = $1", job) for job in (behind, back)]
    assert found == ["b/0", "b/0"]


async def test_a_move_after_its_group_has_left_counts_for_nothing(database: str, admin: Admin) -> None:
    await a_holder(database, "b/0", "c/0", "d/0")
    async with connected(database) as connection:
        await connection.execute(GIVEN_BACK)
    ended = await a_job(database, origin="a/0")
    await admin.cancel(ended)
    behind = await a_job(database, origin="a/0")
    await admin.move("a/0", "b/0")
    await admin.move("b/0", "c/0")
    await admin.move("b/0", "d/0")
    back = await admin.requeue(ended)
    found = [await value(database, "SELECT origin FROM sidings.job WHERE id = $1", job) for job in (behind, back)]
    assert found == ["c/0", "c/0"]


async def test_it_comes_back_with_its_group_though_somebody_has_held_the_place_between(
    database: str, admin: Admin
) -> None:
    """It stayed there."""
    await a_holder(database, "a/0", "b/0")
    async with connected(database) as connection:
        await connection.execute(GIVEN_BACK)
        ended = await a_job(database, origin="a/0")
        await admin.cancel(ended)
        behind = await a_job(database, origin="a/0")
        await admin.move("a/0", "b/0")
        await admin.move("b/0", "a/0")
        await connection.execute("UPDATE sidings.origin SET epoch = epoch + 1 WHERE origin = 'b/0'")
    back = await admin.requeue(ended)
    found = [await value(database, "SELECT origin FROM sidings.job WHERE id = $1", job) for job in (behind, back)]
    assert found == ["a/0", "a/0"]


async def test_it_waits_for_a_move_that_is_under_way(database: str, admin: Admin) -> None:
    """It saw nothing of it, and came back in the origin that was being emptied: an orphan, beside its group."""
    await a_holder(database, "new/0")
    ended = await a_job(database, origin="old/5")
    await admin.cancel(ended)
    async with connected(database) as mover, acting(database) as (other, pid):
        async with mover.transaction():
            await mover.execute("SELECT sidings.move_jobs('old/5', 'new/0', 'bob')")
            requeueing = asyncio.create_task(other.requeue(ended))
            await waits(database, pid)
        back = await requeueing
    assert await value(database, "SELECT origin FROM sidings.job WHERE id = $1", back) == "new/0"
    assert await admin.orphans() == []


async def test_a_move_waits_for_it(database: str, admin: Admin) -> None:
    """The move saw nothing of it, and left it behind."""
    await a_holder(database, "new/0")
    ended = await a_job(database, origin="old/5")
    await admin.cancel(ended)
    async with connected(database) as requeueing, acting(database) as (other, pid):
        async with requeueing.transaction():
            back = await requeueing.fetchval("SELECT sidings.requeue_job($1, 'bob')", ended)
            moving = asyncio.create_task(other.move("old/5", "new/0"))
            await waits(database, pid)
        assert await moving == 1
    assert await value(database, "SELECT origin FROM sidings.job WHERE id = $1", back) == "new/0"


async def test_where_it_follows_to_it_waits_as_well(database: str, admin: Admin) -> None:
    await a_holder(database, "new/0", "newer/0")
    async with connected(database) as mover, acting(database) as (other, pid):
        await mover.execute(GIVEN_BACK)
        ended = await a_job(database, origin="old/5")
        await admin.cancel(ended)
        await admin.move("old/5", "new/0")
        async with mover.transaction():
            await mover.execute("SELECT sidings.move_jobs('new/0', 'newer/0', 'bob')")
            requeueing = asyncio.create_task(other.requeue(ended))
            await waits(database, pid)
        back = await requeueing
    assert await value(database, "SELECT origin FROM sidings.job WHERE id = $1", back) == "newer/0"


async def test_where_jobs_are_that_nobody_has_ever_run_it_waits_as_well(database: str, admin: Admin) -> None:
    """A topic has grown, and its group's jobs are in a partition that no executor has held."""
    await value(database, "INSERT INTO sidings.topic (topic, partitions, former) VALUES ('old', 3, '{2}') RETURNING 1")
    [here, there] = await value(
        database,
        "SELECT array_agg('old/' || n ORDER BY n = sidings.partition_for('g', 3, 'murmur2')) FROM unnest("
        "ARRAY[sidings.partition_for('g', 2, 'murmur2'), sidings.partition_for('g', 3, 'murmur2')]) n",
    )
    await a_holder(database, "new/0")
    ended = await a_job(database, origin=here)
    await admin.cancel(ended)
    await a_job(database, origin=there)
    async with connected(database) as mover, acting(database) as (other, pid):
        async with mover.transaction():
            await mover.execute("SELECT sidings.move_jobs($1, 'new/0', 'bob')", there)
            requeueing = asyncio.create_task(other.requeue(ended))
            await waits(database, pid)
        back = await requeueing
    assert await value(database, "SELECT origin FROM sidings.job WHERE id = $1", back) == "new/0"


async def test_a_move_that_takes_long_is_told_of(database: str, admin: Admin) -> None:
    await a_holder(database, "new/0")
    ended = await a_job(database, origin="old/5")
    await admin.cancel(ended)
    async with connected(database) as mover, mover.transaction():
        await mover.execute("SELECT sidings.move_jobs('old/5', 'new/0', 'bob')")
        with pytest.raises(Busy, match="try again"):
            await admin.requeue(ended)
