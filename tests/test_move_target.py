"""Jobs are moved only to where some executor can run them."""

import pytest
from sidings import ActionRefused, Admin

from .admin_support import a_holder, a_job
from .cli_support import cli, cli_json
from .support import value


@pytest.mark.parametrize("made_by", ["a pause", "a cancelled job", "a move from there"])
async def test_an_origin_that_only_an_action_has_made_is_no_target(database: str, admin: Admin, made_by: str) -> None:
    """It has a row, and nobody has ever held it."""
    await a_holder(database, "new/0")
    await a_job(database, origin="old/0")
    match made_by:
        case "a pause":
            await admin.pause(origin="nwe/0", reason="look")
        case "a cancelled job":
            await admin.cancel(await a_job(database, origin="nwe/0"))
        case _:
            await admin.move("nwe/0", "new/0")
    with pytest.raises(ActionRefused, match="no executor has ever held nwe/0"):
        await admin.move("old/0", "nwe/0")
    assert await admin.move("old/0", "new/0") == 1


async def test_a_slot_of_the_outbox_is_no_target(database: str, admin: Admin) -> None:
    """A relay holds it, so its jobs are no orphans, and nobody runs them."""
    await a_holder(database, "outbox/3")
    await a_job(database, origin="old/0")
    with pytest.raises(ActionRefused, match="outbox/3 is a slot of the outbox"):
        await admin.move("old/0", "outbox/3")
    assert await value(database, "SELECT origin FROM sidings.job") == "old/0"


async def test_jobs_that_sql_has_put_into_a_slot_of_the_outbox_are_an_orphan_s_and_can_be_moved(database: str) -> None:
    """`status` sent one to a list that did not have them, and they were not moved, as if they ran there."""
    relay = await a_holder(database, "outbox/3")
    await a_holder(database, "new/0")
    for run_at in ("now()", "now() + interval '1 hour'"):
        await value(database, f"SELECT sidings.enqueue('ride', '{{}}', 'outbox/3', run_at => {run_at})")
    told = (await cli(database, "status", exit_code=4)).stdout
    assert "! jobs wait in origins that nobody holds: outbox/3: sidings origins list --orphans" in told
    (row,) = (await cli_json(database, "origins", "list", "--orphans"))["origins"]
    assert (row["origin"], row["leased"], row["owner"]) == ("outbox/3", False, None)
    assert "None" not in (await cli(database, "origins", "list")).stdout
    assert "moved 2 jobs" in (await cli(database, "origins", "move", "outbox/3", "new/0", "--yes")).stdout
    assert await value(database, "SELECT count(*) FROM sidings.job WHERE origin = 'new/0'") == 2
    kept = "SELECT owner = $1 AND epoch = 7 AND lease_until > now() FROM sidings.origin WHERE origin = 'outbox/3'"
    assert await value(database, kept, relay), "the relay goes on"
