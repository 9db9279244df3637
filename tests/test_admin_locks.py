"""Administration beside executors: lock orders, takeovers, cycles in flight. Executors are made by hand, so that every
interleaving happens as it is written here."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from sidings import ActionRefused, Admin, Busy, JobNotFound
from sidings.jobs.admin import JobState
from sidings.schema import load_sql

from .admin_support import GROUP, a_holder, a_job, fence, patient, some_jobs, the_job
from .support import ORIGIN, connected, eventually, fetch, history

ACTIONS: dict[str, Callable[[Admin, int], Coroutine[Any, Any, object]]] = {
    "cancel": lambda admin, job: admin.cancel(job),
    "discard": lambda admin, job: admin.discard(job),
    "retry now": lambda admin, job: admin.retry_now(job),
    "release group": lambda admin, job: admin.release_group(ORIGIN, GROUP),
    "skip head": lambda admin, job: admin.skip_head(ORIGIN, GROUP),
    "clear group": lambda admin, job: admin.clear_group(ORIGIN, GROUP),
    "pause group": lambda admin, job: admin.pause(origin=ORIGIN, group=GROUP, reason="x"),
    "pause origin": lambda admin, job: admin.pause(origin=ORIGIN, reason="x"),
    "pause type": lambda admin, job: admin.pause(type="ride", reason="x"),
}


@pytest.fixture
async def database(database: str) -> str:
    """One whose actions wait for locks as long as these tests take."""
    await patient(database)
    return database


@asynccontextmanager
async def acting(dsn: str) -> AsyncIterator[tuple[Admin, int]]:
    """An `Admin`, and the server's process id of its connection."""
    async with connected(dsn) as connection:
        yield Admin(connection, actor="alice"), connection.get_server_pid()


async def waits(dsn: str, pid: int) -> None:
    """Return when that connection waits for a lock."""
    query = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock')"
    async with connected(dsn) as connection:
        await eventually(lambda: connection.fetchval(query, pid), f"{pid} waits for a lock")


async def cycle(connection: asyncpg.Connection, me: UUID, number: int, its_fence: int, running: list[int]) -> int:
    """A cycle that names these jobs and records nothing; returns whether it was applied."""
    ids = "{" + ",".join(map(str, running)) + "}"
    arguments = (me, number, its_fence, ids, "{}", "{}", "{}", "{}", "{}", "[]", [], None, None)
    row = await connection.fetchrow(load_sql("sidings.executor", "cycle"), *arguments)
    return row["applied"]


async def acquire(connection: asyncpg.Connection, me: UUID, *origins: str) -> list[str]:
    query = load_sql("sidings.testing", "acquire")
    rows = await connection.fetch(query, me, origins or [ORIGIN], 1, timedelta(0), True)
    return [row["acquired"] for row in rows]


@pytest.mark.parametrize("name", ACTIONS)
async def test_an_action_waits_for_the_cycle_in_flight_and_voids_what_was_planned_before_it(database: str, name: str):
    id = await a_job(database, "backing off")
    me = await a_holder(database, ORIGIN)
    async with connected(database) as executor, acting(database) as (admin, pid):
        transaction = executor.transaction()
        await transaction.start()
        assert await cycle(executor, me, 1, 0, []) == 1
        action = asyncio.create_task(ACTIONS[name](admin, id))
        await waits(database, pid)
        await transaction.commit()
        await action
        assert await fence(database, me) == 1
        assert await cycle(executor, me, 2, 0, [id]) == 0
        assert await cycle(executor, me, 2, 1, []) == 1


async def test_an_action_sees_what_the_cycle_in_flight_has_named(database: str):
    """With the snapshot of its beginning it would take the job for one that waits."""
    id = await a_job(database)
    me = await a_holder(database, ORIGIN)
    async with connected(database) as executor, acting(database) as (admin, pid):
        async with executor.transaction():
            await cycle(executor, me, 1, 0, [id])
            action = asyncio.create_task(admin.cancel(id))
            await waits(database, pid)
        assert await action is JobState.RUNNING
    [row] = await history(database)
    assert (row["executor"], row["epoch"]) == (me, 7)


async def test_a_job_that_ends_in_the_cycle_in_flight_has_ended(database: str):
    id = await a_job(database)
    me = await a_holder(database, ORIGIN, running=[id])
    ended = (me, 1, 0, "{}", f"{{{id}}}", "{}", "{}", "{1000000}", "{0}", "[]", [], 7, None)
    async with connected(database) as executor, acting(database) as (admin, pid):
        async with executor.transaction():
            await executor.fetchrow(load_sql("sidings.executor", "cycle"), *ended)
            action = asyncio.create_task(admin.cancel(id))
            await waits(database, pid)
        with pytest.raises(JobNotFound, match="succeeded at"):
            await action
    assert [row["outcome"] for row in await history(database)] == ["succeeded"]


async def test_an_action_waits_for_a_takeover_and_fences_the_new_owner(database: str):
    id = await a_job(database)
    former = await a_holder(database, ORIGIN, lease="-1 hour")
    heir = await a_holder(database)
    async with connected(database) as executor, acting(database) as (admin, pid):
        async with executor.transaction():
            await executor.execute("SELECT FROM sidings.origin WHERE origin = $1 FOR UPDATE", ORIGIN)
            action = asyncio.create_task(admin.cancel(id))
            await waits(database, pid)
            await executor.execute(
                "UPDATE sidings.origin SET owner = $2, epoch = epoch + 1 WHERE origin = $1", ORIGIN, heir
            )
        await action
    assert (await fence(database, former), await fence(database, heir)) == (0, 1)


async def test_a_takeover_leaves_an_origin_alone_while_an_action_is_under_way(database: str):
    id = await a_job(database)
    await a_holder(database, ORIGIN, lease="-1 hour")
    heir = await a_holder(database)
    async with connected(database) as connection, connected(database) as executor, connection.transaction():
        await connection.execute("SELECT sidings.cancel_job($1, 'alice')", id)
        assert await acquire(executor, heir) == []


async def test_whoever_acquires_an_origin_that_was_never_held_waits_for_the_action(database: str):
    """Else it would read the job, and start it, although the action has returned."""
    id = await a_job(database)
    heir = await a_holder(database)
    async with connected(database) as connection, connected(database) as executor:
        async with connection.transaction():
            await connection.execute("SELECT sidings.cancel_job($1, 'alice')", id)
            acquired = asyncio.create_task(acquire(executor, heir))
            await waits(database, executor.get_server_pid())
        assert await acquired == [ORIGIN]
        assert await executor.fetchval("SELECT count(*) FROM sidings.job") == 0


async def test_an_action_takes_no_lease_and_no_finish_away(database: str):
    id, other = await a_job(database), await a_job(database)
    me = await a_holder(database, ORIGIN, "t/1")
    finish = "SELECT sidings.finish($1, $2, 7, $3, 1, 0.0, true)"
    async with connected(database) as connection, connected(database) as executor:
        async with connection.transaction():
            await connection.execute("SELECT sidings.cancel_job($1, 'alice')", id)
            renew = load_sql("sidings.executor", "renew")
            rows = await executor.fetch(renew, me, [ORIGIN, "t/1"], "{7, 7}", timedelta(hours=2))
            assert {row["origin"]: (row["renewed"], row["held"]) for row in rows} == {
                ORIGIN: (False, True),  # the next renewal comes soon; the lease is still there
                "t/1": (True, True),
            }
            await executor.execute(finish, me, ORIGIN, other)
        with pytest.raises(asyncpg.PostgresError) as over:
            await executor.execute(finish, me, ORIGIN, id)
        assert over.value.sqlstate == "SD002"
    assert {row["job_id"]: row["outcome"] for row in await history(database)} == {id: "cancelled", other: "succeeded"}


async def test_a_reset_takes_no_lease_away_however_long_it_takes(database: str):
    """To cancel a million jobs takes longer than a lease, which ran out: the process of a plain handler ended."""
    id = await a_job(database, type="'message:transports'", payload="""'{"partition": 0, "offset": 7}'""")
    me, heir = await a_holder(database, ORIGIN), await a_holder(database)
    async with connected(database) as connection, connected(database) as executor, acting(database) as (admin, pid):
        async with connection.transaction():
            reset = "SELECT cancelled FROM sidings.reset_offsets('transports', '{0}', '{0}', 'alice', 'why')"
            assert await connection.fetchval(reset) == 1
            [row] = await executor.fetch(load_sql("sidings.executor", "renew"), me, [ORIGIN], "{7}", timedelta(hours=2))
            assert (row["renewed"], row["held"]) == (True, True)
            await executor.execute("UPDATE sidings.origin SET lease_until = now() - interval '1 hour'")
            assert await acquire(executor, heir) == []
            await executor.execute("UPDATE sidings.origin SET lease_until = now() + interval '1 hour'")
            action = asyncio.create_task(admin.cancel(id))
            await waits(database, pid)
        with pytest.raises(JobNotFound, match="cancelled at"):
            await action
        assert await cycle(executor, me, 1, 0, [id]) == 0
    assert await fence(database, me) == 1
    assert [row["outcome"] for row in await history(database)] == ["cancelled"]


async def test_a_reset_finds_the_jobs_of_a_move_that_is_under_way(database: str):
    """They were looked for before it had waited: their messages were delivered again, and handled twice."""
    await fetch(database, "INSERT INTO sidings.topic (topic, partitions) VALUES ('t', 2)")
    await a_job(database, origin="t/1", type="'message:t'", payload="""'{"partition": 1, "offset": 7}'""")
    await a_holder(database, "t/0")
    async with connected(database) as mover, connected(database) as connection:
        async with mover.transaction():
            await mover.execute("SELECT sidings.move_jobs('t/1', 't/0', 'bob')")
            reset = "SELECT cancelled FROM sidings.reset_offsets('t', '{1}', '{0}', 'alice', 'why')"
            resetting = asyncio.create_task(connection.fetchval(reset))
            await waits(database, connection.get_server_pid())
        assert await resetting == 1
    assert [row["outcome"] for row in await history(database)] == ["cancelled"]


async def test_an_action_that_waits_for_a_move_does_nothing_behind_the_back_of_whoever_holds_the_target(database: str):
    """That one would start the job, as its cycles go on."""
    id = await a_job(database, origin="t/1")
    me = await a_holder(database, "t/0")
    async with connected(database) as mover, acting(database) as (admin, pid):
        async with mover.transaction():
            await mover.execute("SELECT sidings.move_jobs('t/1', 't/0', 'bob')")
            action = asyncio.create_task(admin.cancel(id))
            await waits(database, pid)
        with pytest.raises(Busy):
            await action
        assert await fence(database, me) == 0
        assert await admin.cancel(id) is JobState.WAITING
    assert await fence(database, me) == 1


async def test_a_transactional_handler_that_is_committing_wins(database: str):
    id = await a_job(database)
    me = await a_holder(database, ORIGIN, running=[id])
    async with connected(database) as handler, acting(database) as (admin, pid):
        async with handler.transaction():
            await handler.execute("SELECT sidings.finish($1, $2, 7, $3, 1, 0.0, true)", me, ORIGIN, id)
            action = asyncio.create_task(admin.cancel(id))
            await waits(database, pid)
        with pytest.raises(JobNotFound, match="succeeded at"):
            await action


async def test_promotion_and_clearing_wait_for_each_other_without_a_deadlock(database: str):
    due = {"run_at": "now() - interval '1 second'"}
    delayed = await some_jobs(database, 20, "delayed", **due)
    me = await a_holder(database, ORIGIN)
    async with connected(database) as promoter, acting(database) as (admin, pid):
        async with promoter.transaction():
            await promoter.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", min(delayed))
            action = asyncio.create_task(admin.clear_group(ORIGIN, GROUP))
            await waits(database, pid)
            # Were it to lock from the other end, it would hold these by now.
            await promoter.execute("SELECT FROM sidings.job WHERE id = ANY ($1) FOR UPDATE NOWAIT", delayed)
            await promoter.execute("UPDATE sidings.job SET position = nextval('sidings.job_position')")
        assert await action == len(delayed)
    assert await fence(database, me) == 1


async def test_a_reset_and_a_clearing_of_an_origin_without_a_holder_wait_for_each_other(database: str):
    """The reset locked the jobs by id: each held one that the other waited for, and one of them failed."""
    message = {"type": "'message:transports'", "payload": """'{"partition": 0, "offset": 7}'"""}
    later, sooner = [
        await a_job(database, "delayed", **message, run_at=f"now() + interval '{hours} hours'") for hours in (2, 1)
    ]
    await fetch(database, "INSERT INTO sidings.origin (origin) VALUES ($1)", ORIGIN)
    async with connected(database) as other, connected(database) as connection, acting(database) as (admin, pid):
        async with other.transaction():
            await other.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", later)
            reset = "SELECT cancelled FROM sidings.reset_offsets('transports', '{0}', '{0}', 'alice', 'why')"
            resetting = asyncio.create_task(connection.fetchval(reset))
            await waits(database, connection.get_server_pid())
            clearing = asyncio.create_task(admin.clear_group(ORIGIN, GROUP))
            await waits(database, pid)
        assert [await resetting, await clearing] == [2, 0]
    assert sorted(row["job_id"] for row in await history(database)) == [later, sooner]


async def test_a_group_is_cleared_altogether_though_some_of_its_jobs_are_superseded_meanwhile(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """Fewer than it takes at once were left to cancel, which it took for the end of the group."""
    monkeypatch.setattr("sidings.jobs.admin.many._CLEARED_AT_ONCE", 4)
    monkeypatch.setattr("sidings.jobs.admin.many._REST_SECONDS", 0.0)
    await some_jobs(database, 5)
    latest = await some_jobs(database, 3, type="'latest'", policy="1")
    me = await a_holder(database, ORIGIN)
    async with connected(database) as executor, acting(database) as (admin, pid):
        async with executor.transaction():
            supersede = load_sql("sidings.executor", "supersede")
            [row] = await executor.fetch(supersede, me, [ORIGIN], [7], [GROUP], ["latest"], [], 1000)
            assert (row["id"], row["superseded"]) == (latest[-1], 2)
            action = asyncio.create_task(admin.clear_group(ORIGIN, GROUP))
            await waits(database, pid)
        assert await action == 6
        assert await executor.fetchval("SELECT count(*) FROM sidings.job") == 0
    assert sorted(row["outcome"] for row in await history(database)) == ["cancelled"] * 6 + ["superseded"] * 2


async def test_while_many_jobs_wait_for_an_origin_they_keep_no_executor_from_its_cycle(database: str):
    """A takeover of that origin could wait for the executor, and neither would end."""
    ids = [await a_job(database, origin=origin) for origin in ("c/0", "a/0", "b/0")]
    me = await a_holder(database, "a/0", "b/0", "c/0")
    async with connected(database) as takeover, acting(database) as (admin, pid):

        async def cancel_all() -> list[object]:
            return [done.error async for done in admin.each("cancel", ids)]

        async with takeover.transaction():
            await takeover.execute("SELECT FROM sidings.origin WHERE origin = 'b/0' FOR UPDATE")
            action = asyncio.create_task(cancel_all())
            await waits(database, pid)
            await takeover.execute("SELECT FROM sidings.executor WHERE id = $1 FOR UPDATE NOWAIT", me)
        assert await action == [None, None, None]


@pytest.mark.parametrize(("given", "meant"), [("0", "5s"), ("1h", "5s"), ("5001ms", "5s"), ("300ms", "300ms")])
async def test_a_session_that_does_nothing_behind_an_action_is_ended_soon(database: str, given: str, meant: str):
    """Executors wait for its transaction. A shorter limit of the caller's own holds."""
    await a_job(database)
    limit = "SHOW idle_in_transaction_session_timeout"
    calls = [
        "pause_jobs(actor => 'alice', reason => 'why', type => 'ride')",
        "clear_group('transports/0', 'g', 'alice')",
        "act_on_jobs('cancel', ARRAY(SELECT id FROM sidings.job), 'alice')",
    ]
    async with connected(database, idle_in_transaction_session_timeout=given) as connection:
        for call in calls:
            before = await connection.fetchval(limit)
            transaction = connection.transaction()
            await transaction.start()
            await connection.execute(f"SELECT sidings.{call}")
            assert await connection.fetchval(limit) == meant
            await transaction.rollback()
            assert await connection.fetchval(limit) == before


async def test_of_two_requeues_at_once_one_is_refused(database: str):
    async with connected(database) as first, acting(database) as (admin, pid):
        old = await a_job(database)
        await admin.cancel(old)
        async with first.transaction():
            new = await first.fetchval("SELECT sidings.requeue_job($1, 'bob')", old)
            second = asyncio.create_task(admin.requeue(old))
            await waits(database, pid)
        with pytest.raises(ActionRefused, match=f"as job {new}, by bob"):
            await second


@pytest.mark.parametrize("first", ["reset", "requeue"])
async def test_a_message_is_not_both_requeued_and_delivered_again(database: str, first: str):
    message = """'{"topic": "t", "partition": 0, "offset": 7}'"""
    id = await a_job(database, type="'message:t'", origin="t/0", payload=message)
    await fetch(database, "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ('t', 0, 20)")
    statements = {
        "reset": "SELECT cancelled FROM sidings.reset_offsets('t', '{0}', '{5}', 'bob', NULL)",
        "requeue": f"SELECT sidings.requeue_job({id}, 'bob')",
    }
    async with acting(database) as (admin, pid), connected(database) as second, connected(database) as other:
        await admin.cancel(id)
        transaction = other.transaction()
        await transaction.start()
        await other.fetchval(statements[first])
        if first == "reset":
            waiting = asyncio.create_task(admin.requeue(id))
            await waits(database, pid)
            await transaction.commit()
            with pytest.raises(ActionRefused, match=r"bob reset t/0 to offset 5 at"):
                await waiting
        else:
            waiting = asyncio.create_task(second.fetchval(statements["reset"]))
            await waits(database, second.get_server_pid())
            await transaction.commit()
            assert await waiting == 1
    assert await fetch(database, "SELECT FROM sidings.job") == []


@pytest.mark.parametrize("target", ["type => 'ride'", "origin => 'transports/0'"], ids=["type", "origin"])
async def test_of_two_pauses_at_once_one_is_refused(database: str, target: str):
    arguments = {"type": "ride"} if "ride" in target else {"origin": ORIGIN}
    async with connected(database) as first, acting(database) as (admin, pid):
        async with first.transaction():
            await first.execute(f"SELECT sidings.pause_jobs('bob', 'carrier down', {target})")
            second = asyncio.create_task(admin.pause(reason="x", **arguments))
            await waits(database, pid)
        with pytest.raises(ActionRefused, match=r"by bob since .*: carrier down"):
            await second


async def test_a_pause_reaches_an_executor_that_is_just_starting(database: str):
    """Its row is made while the pause is: an UPDATE of all rows does not see it."""
    me = uuid4()
    register = load_sql("sidings.executor", "register")
    async with connected(database) as executor, acting(database) as (admin, pid):
        async with executor.transaction():
            await executor.execute(register, me, "host", 1)
            pausing = asyncio.create_task(admin.pause(type="ride", reason="x"))
            await waits(database, pid)
        await pausing
    assert await fence(database, me) == 1


async def test_an_executor_that_starts_during_a_pause_sees_it(database: str):
    me = uuid4()
    register = load_sql("sidings.executor", "register")
    async with connected(database) as executor, connected(database) as connection:
        async with connection.transaction():
            await connection.execute("SELECT sidings.pause_jobs('alice', 'x', type => 'ride')")
            starting = asyncio.create_task(executor.execute(register, me, "host", 1))
            await waits(database, executor.get_server_pid())
        await starting
        assert await executor.fetchval("SELECT type FROM sidings.pause") == "ride"


async def test_a_pause_of_a_type_and_a_takeover_do_not_deadlock(database: str):
    """A takeover locks the former owner's row first, and updates it later."""
    me = await a_holder(database, ORIGIN)
    async with connected(database) as takeover, acting(database) as (admin, pid):
        async with takeover.transaction():
            await takeover.execute("SELECT FROM sidings.executor WHERE id = $1 FOR UPDATE", me)
            pausing = asyncio.create_task(admin.pause(type="ride", reason="x"))
            await waits(database, pid)
            await takeover.execute("UPDATE sidings.executor SET fence = fence + 1 WHERE id = $1", me)
        await pausing
    assert await fence(database, me) == 2


async def test_two_who_take_over_from_the_same_two_do_not_wait_for_each_other(database: str):
    """Each locked the former owners in the order of its origins: the server ended one of the two, after a second."""
    first = await a_holder(database, "t/0", "t/3", lease="-1 second")
    await a_holder(database, "t/1", "t/2", lease="-1 second")
    one, other = await a_holder(database), await a_holder(database)
    async with connected(database) as cycling, connected(database) as here, connected(database) as there:
        async with cycling.transaction():
            await cycling.execute("SELECT FROM sidings.executor WHERE id = $1 FOR UPDATE", first)
            ours = asyncio.create_task(acquire(here, one, "t/0", "t/1"))
            await waits(database, here.get_server_pid())
            theirs = asyncio.create_task(acquire(there, other, "t/2", "t/3"))
            await waits(database, there.get_server_pid())
        assert (await ours, await theirs) == (["t/0", "t/1"], ["t/2", "t/3"])


async def test_two_who_cancel_jobs_of_the_same_two_executors_do_not_wait_for_each_other(database: str):
    first = await a_holder(database, "t/0", "t/3")
    await a_holder(database, "t/1", "t/2")
    ids = [await a_job(database, origin=f"t/{number}") for number in range(4)]
    cancel = "SELECT count(*) FROM sidings.act_on_jobs('cancel', $1, 'alice') WHERE refusal IS NULL"
    async with connected(database) as cycling, connected(database) as here, connected(database) as there:
        async with cycling.transaction():
            await cycling.execute("SELECT FROM sidings.executor WHERE id = $1 FOR UPDATE", first)
            ours = asyncio.create_task(here.fetchval(cancel, ids[:2]))
            await waits(database, here.get_server_pid())
            theirs = asyncio.create_task(there.fetchval(cancel, ids[2:]))
            await waits(database, there.get_server_pid())
        assert (await ours, await theirs) == (2, 2)


async def test_who_resets_a_consumer_and_who_cancels_jobs_of_the_same_two_executors_do_not_wait_for_each_other(
    database: str,
):
    """A reset locked their rows in the order of their partitions: the server ended one of the two, after a second."""
    low, high = sorted([await a_holder(database), await a_holder(database)])
    ids = [await a_job(database, origin=f"t/{number}") for number in range(2)]
    async with connected(database) as cycling, connected(database) as here, connected(database) as there:
        await cycling.execute(
            """INSERT INTO sidings.origin (origin, owner, epoch, lease_until)
               VALUES ('t/0', $2, 1, 'infinity'), ('t/1', $1, 1, 'infinity')""",
            *(low, high),
        )
        async with cycling.transaction():
            await cycling.execute("SELECT FROM sidings.executor WHERE id = $1 FOR UPDATE", high)
            reset = "SELECT count(*) FROM sidings.reset_offsets('t', '{0,1}', '{0,0}', 'alice', 'why')"
            resetting = asyncio.create_task(here.fetchval(reset))
            await waits(database, here.get_server_pid())
            cancel = "SELECT count(*) FROM sidings.act_on_jobs('cancel', $1, 'alice') WHERE refusal IS NULL"
            cancelling = asyncio.create_task(there.fetchval(cancel, ids))
            await waits(database, there.get_server_pid())
        assert (await resetting, await cancelling) == (2, 2)


async def test_an_origin_is_not_acquired_while_its_jobs_move_away(database: str):
    id = await a_job(database)
    await a_holder(database, "new/0")
    heir = await a_holder(database)
    async with connected(database) as connection, connected(database) as executor:
        async with connection.transaction():
            await connection.execute("SELECT sidings.move_jobs($1, 'new/0', 'alice')", ORIGIN)
            acquired = asyncio.create_task(acquire(executor, heir))
            await waits(database, executor.get_server_pid())
        assert await acquired == [ORIGIN]
        assert await executor.fetchval("SELECT count(*) FROM sidings.job WHERE origin = $1", ORIGIN) == 0
    assert ((await the_job(database, id)) or {})["origin"] == "new/0"


async def test_a_move_waits_for_the_former_owners_cycle_and_accounts_for_what_it_named(database: str):
    id = await a_job(database)
    dead = await a_holder(database, ORIGIN, lease="-1 second")
    await a_holder(database, "new/0")
    async with connected(database) as executor, acting(database) as (admin, pid):
        async with executor.transaction():
            await cycle(executor, dead, 1, 0, [id])
            moving = asyncio.create_task(admin.move(ORIGIN, "new/0", lease_seconds=0))
            await waits(database, pid)
        assert await moving == 1
        assert await cycle(executor, dead, 2, 0, []) == 0
    assert [row["outcome"] for row in await history(database)] == ["lost"]
    assert ((await the_job(database, id)) or {})["losses"] == 1


async def test_a_move_that_waits_for_a_takeover_is_refused(database: str):
    id = await a_job(database)
    await a_holder(database, ORIGIN, lease="-1 second")
    await a_holder(database, "new/0")
    heir = await a_holder(database)
    async with connected(database) as executor, acting(database) as (admin, pid):
        async with executor.transaction():
            await executor.execute(
                "UPDATE sidings.origin SET owner = $2, epoch = epoch + 1, lease_until = now() + interval '1 hour' "
                "WHERE origin = $1",
                ORIGIN,
                heir,
            )
            moving = asyncio.create_task(admin.move(ORIGIN, "new/0", lease_seconds=0))
            await waits(database, pid)
        with pytest.raises(ActionRefused, match=f"is held by the executor {heir}"):
            await moving
    assert ((await the_job(database, id)) or {})["origin"] == ORIGIN


async def test_an_action_wakes_whoever_listens(database: str):
    heard: list[object] = []
    ids = [await a_job(database), await a_job(database)]
    async with connected(database) as listener, acting(database) as (admin, _):
        await listener.add_listener("sidings_committed", lambda *call: heard.append(call[-1]))
        await admin.cancel(ids[0])
        await admin.pause(type="ride", reason="x")
        await admin.requeue(ids[0])
        await eventually(lambda: heard == [ORIGIN, "", ORIGIN], lambda: heard)


async def test_actions_in_every_order_at_once_end_every_job_exactly_once(database: str):
    """Two persons, an executor's cycles and promotions, all at one origin: no deadlock, no job twice, none left."""
    groups = [f"g{number}" for number in range(4)]
    ids: set[int] = set()
    for group in groups:
        for state in ("waiting", "backing off", "delayed", "held"):
            more = {"run_at": "now() - interval '1 second'"} if state == "delayed" else {}
            ids.update(await some_jobs(database, 6, state, group=group, **more))
    me = await a_holder(database, ORIGIN)
    done = asyncio.Event()

    async def executor() -> None:
        async with connected(database) as connection:
            number = 0
            while not done.is_set():
                number += 1
                its_fence = await connection.fetchval("SELECT fence FROM sidings.executor WHERE id = $1", me)
                number -= 1 - await cycle(connection, me, number, its_fence, [])
                query = load_sql("sidings.executor", "promote")
                await connection.fetch(query, me, [ORIGIN], [7], 1_000, [], None, None)

    async def person(order: list[int]) -> None:
        async with acting(database) as (admin, _):
            for number, id in enumerate(order):
                attempts: list[Awaitable[object]] = [admin.cancel(id)]
                if number % 4 == 0:
                    attempts.insert(0, admin.retry_now(id))
                if number % 5 == 0:
                    attempts.append(admin.skip_head(ORIGIN, groups[number % 4]))
                for attempt in attempts:
                    with suppress(JobNotFound, ActionRefused):
                        await attempt
            for group in groups:
                await admin.clear_group(ORIGIN, group)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(executor())
        async with asyncio.TaskGroup() as persons:
            persons.create_task(person(sorted(ids)))
            persons.create_task(person(sorted(ids, reverse=True)))
        done.set()
    assert await fetch(database, "SELECT * FROM sidings.job") == []
    assert sorted(row["job_id"] for row in await history(database)) == sorted(ids)
