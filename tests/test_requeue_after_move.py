"""A job that ended in an origin whose jobs were moved since comes back where its group is now."""

import pytest
from sidings import Admin

from .admin_support import a_holder, a_job
from .support import connected, value


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
        await connection.execute("UPDATE sidings.origin SET owner = NULL, lease_until = NULL WHERE origin = 'new/0'")
        await admin.move("new/0", "newer/0")
        if held:  # and given it back, as in a handover
            await connection.execute("UPDATE sidings.origin SET epoch = epoch + 1 WHERE origin = 'old/5'")
    back = await admin.requeue(ended)
    found = await value(database, "SELECT origin FROM sidings.job WHERE id = $1", back)
    assert found == ("old/5" if held else "newer/0")
