"""Administration where no executor runs: what each action changes, refuses and writes down."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Literal

import asyncpg
import pytest
import pytest_asyncio
from sidings import ActionRefused, Admin, ConfigurationError, JobNotFound, PostgresUnavailable, SchemaTooOld, migrate
from sidings.devstack.fixtures import OwnPostgres
from sidings.errors import AdministrationError, Busy
from sidings.jobs import OutcomeName, Transaction
from sidings.jobs.admin import JobState
from sidings.schema.migrate import migrations

from .admin_support import (
    GROUP,
    STATES,
    a_holder,
    a_job,
    a_job_that_left_no_end,
    fence,
    slow_updates,
    some_jobs,
    the_job,
)
from .faulty_proxy import KINDS, Moment, proxied
from .guide import DOCS, block, run
from .support import ORIGIN, SECONDS, connected, eventually, fetch, history, jobs_left, value


async def last_action(admin: Admin) -> tuple[Any, ...]:
    [row] = await admin.audit(limit=1)
    return row.actor, row.action, dict(row.target), row.reason, dict(row.detail)


# -- one job ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["cancelled", "discarded"])
async def test_a_job_ends_in_whatever_state_it_is_and_keeps_its_payload(database: str, admin: Admin, outcome: str):
    action, verb = (admin.cancel, "cancel") if outcome == "cancelled" else (admin.discard, "discard")
    for state in STATES:
        id = await a_job(database, state, headers="""'{"correlation_id": "c-1"}'""", priority="4")
        before = await the_job(database, id)
        assert before is not None
        assert await action(id, reason="wrong address") == state
        assert await the_job(database, id) is None
        [row] = await fetch(database, "SELECT * FROM sidings.job_history WHERE job_id = $1", id)
        for column in ("type", "origin", "group", "priority", "attempt", "enqueued_at", "payload"):
            assert row[column] == before[column], column
        assert (row["outcome"], row["correlation_id"]) == (outcome, "c-1")
        assert (row["executor"], row["epoch"], row["started_at"]) == (None, None, None)
        assert row["error_message"] == "by alice: wrong address"
        target = {"job": id, "type": "ride", "origin": ORIGIN, "group": GROUP}
        assert await last_action(admin) == ("alice", verb, target, "wrong address", {"found": state})


async def test_of_a_running_job_the_history_says_where_it_ran(database: str, admin: Admin):
    id = await a_job(database)
    other = await a_job(database)
    me = await a_holder(database, ORIGIN, running=[id, 99])
    assert await admin.cancel(id) is JobState.RUNNING
    assert await admin.cancel(other) is JobState.WAITING
    rows = {row["job_id"]: row for row in await history(database)}
    assert (rows[id]["executor"], rows[id]["epoch"]) == (me, 7)
    assert (rows[other]["executor"], rows[other]["epoch"]) == (None, None)


async def test_an_unknown_job_is_an_error_that_says_how_it_ended(database: str, admin: Admin):
    id = await a_job(database)
    await admin.cancel(id)
    for action in (admin.cancel, admin.discard, admin.retry_now, admin.release):
        with pytest.raises(JobNotFound, match=f"no job {id} any more: cancelled at 20.*requeued"):
            await action(id)
        with pytest.raises(JobNotFound, match="no job 4711, and the history knows of none"):
            await action(4711)
    assert len(await admin.audit()) == 1


async def test_a_job_that_left_no_end_is_not_said_to_have_ended_as_lost(database: str, admin: Admin):
    """It ran well behind that, of which its type leaves nothing."""
    id = await a_job_that_left_no_end(database)
    told = f"no job {id} any more; its last attempt on record was lost at 20.*history=False leaves no record"
    for action in (admin.cancel, admin.retry_now, admin.requeue):
        with pytest.raises(JobNotFound, match=told):
            await action(id)


async def test_a_delayed_job_is_due_at_once(database: str, admin: Admin):
    id = await a_job(database, "delayed")
    assert await admin.retry_now(id) is JobState.DELAYED
    due = "SELECT run_at <= clock_timestamp() AND position IS NULL FROM sidings.job"
    assert await value(database, due)
    assert (await last_action(admin))[1] == "retry now"


async def test_a_job_that_backs_off_keeps_its_place_and_its_failures(database: str, admin: Admin):
    id = await a_job(database, "backing off", first_started_at="now()")
    before = await the_job(database, id)
    assert before is not None
    assert await admin.retry_now(id) is JobState.BACKING_OFF
    assert await the_job(database, id) == {**before, "run_at": None}


async def test_a_blocked_job_starts_its_policy_anew(database: str, admin: Admin):
    id = await a_job(database, "blocked", first_started_at="now()")
    before = await the_job(database, id)
    assert before is not None
    assert await admin.retry_now(id) is JobState.BLOCKED
    assert await the_job(database, id) == {**before, "run_at": None, "failures": 0, "first_started_at": None}


async def test_what_waits_runs_or_is_held_is_not_retried(database: str, admin: Admin):
    waiting, held, busy = await a_job(database), await a_job(database, "held"), await a_job(database, "backing off")
    me = await a_holder(database, ORIGIN, running=[busy])
    for id, words in ((waiting, "is waiting: It runs when"), (held, "is held: Release"), (busy, "is running: Wait")):
        before = await the_job(database, id)
        with pytest.raises(ActionRefused, match=f"job {id} {words}"):
            await admin.retry_now(id)
        assert await the_job(database, id) == before
    assert await fence(database, me) == 0  # what is refused leaves nothing behind


async def test_a_released_job_goes_to_the_end_of_the_order_with_a_clean_slate(database: str, admin: Admin):
    id = await a_job(database, "held")
    later = await a_job(database)
    before = await value(database, "SELECT clock_timestamp()")
    await admin.release(id, reason="mended")
    job, behind = await the_job(database, id), await the_job(database, later)
    assert job is not None
    assert behind is not None
    assert (job["held"], job["failures"], job["losses"]) == (None, 0, 0)
    assert before < job["run_at"] < await value(database, "SELECT clock_timestamp()")  # from then on it waits
    assert job["first_started_at"] is None  # its policy's time begins anew, too
    assert job["position"] > behind["position"]
    assert int(job["txid"]) > int(behind["txid"])
    assert (await last_action(admin))[4] == {"held": "poison"}
    with pytest.raises(ActionRefused, match="is waiting, not held"):
        await admin.release(id)


async def test_an_ended_job_comes_back_as_a_new_one(database: str, admin: Admin):
    headers = """'{"correlation_id": "c-1", "other": "x"}'"""
    for how in ("cancelled", "discarded", "followed", "superseded"):
        old = await a_job(database, "backing off", headers=headers, priority="4", policy="1")
        await admin.cancel(old)
        await fetch(database, f"UPDATE sidings.job_history SET outcome = '{how}' WHERE job_id = $1", old)
        new = await admin.requeue(old, reason="mended")
        assert new > old
        job = await the_job(database, new)
        assert job is not None
        same = {"type": "ride", "origin": ORIGIN, "group": GROUP, "priority": 4, "payload": '{"transport": "a"}'}
        assert {name: job[name] for name in same} == same
        assert json.loads(job["headers"]).items() >= {"correlation_id": "c-1", "other": "x"}.items()
        assert (job["attempt"], job["failures"], job["error"], job["policy"], job["run_at"]) == (1, 0, None, 0, None)
        assert (await last_action(admin))[4] == {"found": how, "new_job": new}


@pytest.mark.parametrize("key", ["2026/report.pdf", "order-17", 7, None])
async def test_a_job_is_requeued_whatever_its_payload_has_as_a_key(database: str, admin: Admin, key: object):
    """Of a message it is base64."""
    row = await value(
        database,
        "INSERT INTO sidings.job (type, origin, payload) VALUES ('store', 't/0', $1) RETURNING id",
        json.dumps({"key": key, "partition": "north", "offset": key, "topic": 1}),
    )
    await admin.cancel(row)
    assert await admin.requeue(row)


async def test_a_job_is_requeued_once_unless_forced(database: str, admin: Admin):
    old = await a_job(database)
    with pytest.raises(ActionRefused, match="has not ended"):
        await admin.requeue(old)
    await admin.cancel(old)
    new = await admin.requeue(old)
    with pytest.raises(ActionRefused, match=f"requeued already, as job {new}, by alice"):
        await admin.requeue(old)
    assert await admin.requeue(old, force=True) > new
    assert await jobs_left(database) == 2


async def test_a_job_is_found_by_its_end_and_by_its_number_where_that_is_another(database: str, admin: Admin):
    """By the index on numbers alone, 10,000 took a quarter of an hour to be requeued, in a long history."""
    first, second = await a_job(database), await a_job(database)
    await admin.cancel(first)
    await admin.cancel(second)
    ended = {row.job_id: row.finished_at for row in await admin.requeueable(outcomes=["cancelled"])}
    async with connected(database) as connection:
        await connection.execute("CREATE TABLE later AS SELECT * FROM sidings.job_history")
        await connection.execute(
            """UPDATE later SET finished_at = finished_at + interval '1 millisecond', payload = '{"transport": "b"}'"""
        )
        await connection.execute("INSERT INTO sidings.job_history SELECT * FROM later")
    new = await admin.requeue(first, finished_at=ended[first])
    assert (await the_job(database, new))["payload"] == '{"transport": "a"}'
    assert await admin.requeue(second, finished_at=ended[second] + timedelta(seconds=1)) > new


async def test_of_jobs_that_have_ended_at_once_the_one_that_was_named_comes_back(database: str, admin: Admin):
    jobs = [await a_job(database, payload=f"""'{{"number": {n}}}'""") for n in range(3)]
    for job in jobs:
        await admin.cancel(job)
    ended = await value(database, "SELECT now()")
    await fetch(database, "UPDATE sidings.job_history SET finished_at = $1", ended)
    for n in (1, 2, 0):
        new = await admin.requeue(jobs[n], finished_at=ended)
        assert (await the_job(database, new))["payload"] == f'{{"number": {n}}}'


async def test_a_job_that_was_stored_without_a_payload_comes_back_as_others(database: str, admin: Admin):
    """`sidings.enqueue('rebuild', NULL, …)` is one of None. A program that requeued until none was left never ended."""
    ids = [await a_job(database, payload="NULL") for _ in range(2)]
    await admin.cancel(ids[0])
    await admin.discard(ids[1])
    both = ["cancelled", "discarded"]
    assert [row.job_id for row in await admin.requeueable(outcomes=both)] == ids
    for id in ids:
        assert (await admin.show(id)).payload == "null"
        assert ((await the_job(database, await admin.requeue(id))) or {})["payload"] == "null"
    assert await admin.requeueable(outcomes=both) == []


async def test_what_has_succeeded_or_left_no_payload_is_not_requeued(database: str, admin: Admin):
    ids = [await a_job(database), await a_job(database)]
    for id in ids:
        await admin.cancel(id)
    await fetch(database, "UPDATE sidings.job_history SET outcome = 'succeeded' WHERE job_id = $1", ids[0])
    await fetch(database, "UPDATE sidings.job_history SET payload = NULL WHERE job_id = $1", ids[1])
    with pytest.raises(ActionRefused, match="has succeeded"):
        await admin.requeue(ids[0])
    with pytest.raises(ActionRefused, match="no payload"):
        await admin.requeue(ids[1])
    assert await admin.requeueable(outcomes=["cancelled"]) == [], (
        "or whoever asks until there are none would do so for ever"
    )
    with pytest.raises(JobNotFound):
        await admin.requeue(4711)
    assert await jobs_left(database) == 0


# -- many jobs ----------------------------------------------------------------------------------------------------


Verb = Literal["cancel", "discard", "retry now", "release"]


async def traces(dsn: str, ids: list[int]) -> list[list[dict[str, Any]]]:
    """What is left of jobs: rows, history, audit. Without what no two jobs have in common, but in order."""
    queries = (
        "SELECT * FROM sidings.job WHERE id = ANY ($1) ORDER BY id",
        "SELECT * FROM sidings.job_history WHERE job_id = ANY ($1) ORDER BY job_id, attempt",
        "SELECT * FROM sidings.audit WHERE (target ->> 'job')::bigint = ANY ($1) ORDER BY target -> 'job', id",
    )
    own = {"id", "job_id", "txid", "at", "enqueued_at", "finished_at", "fence"}
    found: list[list[dict[str, Any]]] = []
    for query in queries:
        rows = [dict(row) for row in await fetch(dsn, query, ids)]
        for row in rows:
            row["position"] = row.get("position") is not None
            row["first_started_at"] = row.get("first_started_at") is not None
            row["due"] = (row.pop("run_at", None) or row.pop("due_at", None)) is not None
            row["target"] = re.sub(r'"job": \d+', "", row.get("target") or "")
        found.append([{name: row[name] for name in row.keys() - own - {"due_at"}} for row in rows])
    return found


@pytest.mark.parametrize("verb", ["cancel", "discard", "retry now", "release"])
async def test_many_jobs_fare_as_each_of_them_alone_would(database: str, admin: Admin, verb: Verb):
    async def a_set() -> list[int]:
        ids = [await a_job(database, state, origin=origin) for origin in (ORIGIN, "b/1") for state in STATES]
        gone = await a_job(database)
        await admin.cancel(gone)
        return [*ids, gone]

    running = [await a_job(database), await a_job(database)]
    await a_holder(database, ORIGIN, "b/1", running=running)
    alone, together = await a_set(), await a_set()
    alone, together = [*alone, running[0], 4711], [*together, running[1], 4711]
    actions = {"cancel": admin.cancel, "discard": admin.discard, "retry now": admin.retry_now, "release": admin.release}
    said: list[tuple[Any, ...]] = []
    for id in alone:
        try:
            state = await actions[verb](id, reason="why")
            said.append(("held" if verb == "release" else state, None, ""))
        except AdministrationError as error:
            said.append((None, type(error), re.sub(r"\d+", "N", str(error))))
    answers = [done async for done in admin.each(verb, together, reason="why")]
    assert [done.job_id for done in answers] == together
    assert [
        (None, type(done.error), re.sub(r"\d+", "N", str(done.error)))
        if done.error is not None
        else (done.state, None, "")
        for done in answers
    ] == said
    assert await traces(database, together) == await traces(database, alone)


async def test_many_jobs_interrupt_their_holder_once(database: str, admin: Admin):
    me = await a_holder(database, ORIGIN)
    ids = await some_jobs(database, 50, "held")
    assert [done.error async for done in admin.each("release", ids)] == [None] * 50
    assert await fence(database, me) == 1


async def test_many_jobs_are_released_in_the_order_in_which_they_are_named(database: str, admin: Admin):
    ids = await some_jobs(database, 5, "held")
    named = [ids[n] for n in (3, 0, 4, 1, 2)]
    stored = "SELECT id, txid::text::bigint AS txid, run_at FROM sidings.job ORDER BY position"
    begin = await value(database, "SELECT clock_timestamp()")
    before = {row["txid"] for row in await fetch(database, stored)}
    assert [done.job_id async for done in admin.each("release", [*named, ids[3]])] == named
    rows = await fetch(database, stored)
    assert [row["id"] for row in rows] == named
    assert before.isdisjoint(
        {row["txid"] for row in rows}
    )  # or a read that has passed their places would not look there
    assert all(begin < row["run_at"] for row in rows), "they are due from then on"
    assert [action.target["job"] for action in reversed(await admin.audit())] == named


async def test_a_row_that_somebody_holds_is_a_clear_error_and_changes_nothing(database: str, admin: Admin):
    id = await a_job(database)
    me = await a_holder(database, ORIGIN)
    async with connected(database) as other, other.transaction():
        await other.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", id)
        with pytest.raises(Busy, match="try again"):
            await admin.cancel(id)
    assert await fence(database, me) == 0
    assert await admin.cancel(id) is JobState.WAITING


async def test_of_many_jobs_one_that_somebody_has_locked_is_left_and_said_to_be(database: str, admin: Admin):
    ids = await some_jobs(database, 3)
    async with connected(database) as other, other.transaction():
        await other.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", ids[1])
        errors = [done.error async for done in admin.each("cancel", ids)]
    assert [type(error) for error in errors] == [type(None), Busy, type(None)]
    assert str(errors[1]) == f"job {ids[1]} is being changed by somebody else: Try again."
    assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.job")] == [ids[1]]


async def test_of_many_jobs_those_that_have_ended_are_looked_up_behind_all_locks_and_not_all_of_them(
    database: str, admin: Admin
):
    """One took 20 ms and more in a history of millions, and executors waited until all had been looked up."""
    ended, delayed = await some_jobs(database, 30), await a_job(database, "delayed")
    assert [done.error async for done in admin.each("cancel", ended)] == [None] * 30
    async with connected(database) as other, other.transaction():
        await other.execute("LOCK TABLE sidings.job_history IN ACCESS EXCLUSIVE MODE")
        done = await other.fetch("SELECT * FROM sidings.act_on_jobs('retry now', $1, 'alice')", [*ended, delayed])
    assert {row["job"]: row["code"] for row in done} == {**dict.fromkeys(ended, "SD003"), delayed: None}
    errors = [done.error async for done in admin.each("release", ended)]
    assert {type(error) for error in errors} == {JobNotFound}
    told = [": cancelled at" in str(error) for error in errors]
    assert told == [True] * 20 + [False] * 10


async def test_executors_get_a_rest_from_what_is_done_to_many_jobs(
    database: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
):
    """Each transaction voids what the holder has planned."""
    monkeypatch.setattr("sidings.jobs.admin.many._REST_SECONDS", 3_600.0)
    monkeypatch.setattr("sidings.jobs.admin.many._ACTED_ON_AT_ONCE", 2)
    monkeypatch.setattr("sidings.jobs.admin.many._CLEARED_AT_ONCE", 2)
    ids = await some_jobs(database, 5)
    doing = admin.each("cancel", ids)
    assert [(await anext(doing)).job_id for _ in range(2)] == ids[:2]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(doing), 0.5)
    assert await jobs_left(database) == 3
    clearing = asyncio.create_task(admin.clear_group(ORIGIN, GROUP))
    await eventually(lambda: value(database, "SELECT count(*) = 1 FROM sidings.job"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(clearing, 0.5)
    assert await jobs_left(database) == 1


async def test_who_acts_on_many_jobs_is_told_how_many_were_done_before_somebody_was_in_the_way(
    database: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
):
    """It said only that nothing had changed, after thousands of jobs had."""
    monkeypatch.setattr("sidings.jobs.admin.many._ACTED_ON_AT_ONCE", 2)
    monkeypatch.setattr("sidings.jobs.admin.many._REST_SECONDS", 0.0)
    await a_holder(database, ORIGIN, "others/0")
    ids = [*await some_jobs(database, 2), *await some_jobs(database, 2, origin="others/0")]
    doing = admin.each("cancel", ids)
    async with connected(database) as other, other.transaction():
        await other.execute("SELECT FROM sidings.origin WHERE origin = 'others/0' FOR UPDATE")
        assert [(await anext(doing)).job_id for _ in range(2)] == ids[:2]
        with pytest.raises(Busy, match=r"^2 of 4 jobs are dealt with, .*; with the rest: .*nothing has changed"):
            await anext(doing)
    assert await jobs_left(database) == 2


async def test_what_was_done_to_many_jobs_is_told_also_where_postgres_goes_away_behind_it(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """How a job ended is only looked up: because of that nothing was said of what had been committed."""
    monkeypatch.setitem(KINDS, "how it ended", re.compile(r"SELECT sidings\.no_such_job\("))
    ended = await some_jobs(database, 2)
    waiting = await a_job(database)
    async with proxied(database) as proxy, connected(proxy.dsn) as connection:
        admin = Admin(connection, actor="alice")
        assert [done.error async for done in admin.each("cancel", ended)] == [None, None]
        proxy.arm("how it ended", Moment.BEFORE)
        done = [done async for done in admin.each("cancel", [*ended, waiting])]
    assert [(one.job_id, type(one.error)) for one in done] == [
        *((id, JobNotFound) for id in ended),
        (waiting, type(None)),
    ]
    assert await jobs_left(database) == 0


async def test_what_cannot_be_done_to_many_jobs_is_refused(database: str, admin: Admin):
    with pytest.raises(ActionRefused, match="nothing that is done to many jobs: Give cancel, discard"):
        await anext(admin.each("requeue", [1]))  # pyright: ignore[reportArgumentType]


async def test_of_many_jobs_chosen_by_their_state_none_is_ended_that_has_started_before_its_turn(
    database: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
):
    """They are taken in several transactions, with a rest in between."""
    monkeypatch.setattr("sidings.jobs.admin.many._ACTED_ON_AT_ONCE", 2)
    monkeypatch.setattr("sidings.jobs.admin.many._REST_SECONDS", 0.0)
    me = await a_holder(database, ORIGIN)
    first, second, started, last = await some_jobs(database, 4)
    doing = admin.each("cancel", [first, second, started, last], state="waiting")
    assert [(await anext(doing)).error for _ in range(2)] == [None, None]
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.executor SET running = $2 WHERE id = $1", me, [started])
    done = [done async for done in doing]
    assert [(one.job_id, one.state, str(one.error)) for one in done] == [
        (started, JobState.RUNNING, f"job {started} is running now, not waiting"),
        (last, JobState.WAITING, "None"),
    ]
    assert isinstance(done[0].error, ActionRefused)
    assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.job")] == [started]
    with pytest.raises(ActionRefused, match="state='hold' is none: give one of"):
        await anext(admin.each("cancel", [started], state="hold"))


async def test_a_move_may_take_longer_than_another_statement(database: str):
    """A million jobs take more than the minute, so that they could never be moved."""
    await some_jobs(database, 10, origin="gone/0")
    await a_holder(database, ORIGIN)
    async with connected(database) as connection:
        await slow_updates(connection)
        assert await Admin(connection, actor="alice", timeout=1.0).move("gone/0", ORIGIN) == 10


async def test_a_server_that_hangs_is_told_of_when_the_timeout_is_over(
    own_postgres: OwnPostgres, monkeypatch: pytest.MonkeyPatch
):
    """Lists waited for it for ever: a timeout of one statement is none of asyncpg's transaction around it."""
    monkeypatch.setattr("sidings.jobs.admin.calls._ROLLBACK_SECONDS", 0.1)
    postgres = own_postgres()
    await migrate(postgres.dsn, service="test")
    for look in (Admin.jobs, Admin.origins, Admin.pauses, lambda admin: admin.cancel(1)):
        connection = await asyncpg.connect(postgres.dsn)
        postgres.pause()
        try:
            async with asyncio.timeout(SECONDS):
                with pytest.raises(PostgresUnavailable, match="did not answer"):
                    await look(Admin(connection, actor="alice", timeout=0.2))
            assert connection.is_closed() or look is Admin.pauses, "its transaction may still be open"
        finally:
            connection.terminate()
            postgres.resume()


async def test_what_the_server_ends_is_told_of_and_has_changed_nothing(database: str):
    """By a statement_timeout of the role, say: an error of asyncpg's own, which programs that catch PostgresUnavailable
    did not."""
    id = await a_job(database, "delayed")
    before = await the_job(database, id)
    async with (
        connected(database) as connection,
        connected(database, statement_timeout="1000") as hurried,
        asyncpg.create_pool(database, min_size=1, max_size=1, server_settings={"statement_timeout": "1000"}) as pool,
    ):
        await slow_updates(connection, 3.0)
        for impatient in (hurried, pool):
            admin = Admin(impatient, actor="alice")
            with pytest.raises(PostgresUnavailable, match=r"has ended .*timeout\); nothing has changed"):
                await admin.retry_now(id)
            assert [row.id for row in await admin.jobs()] == [id], "it can go on"
        await connection.execute(
            """CREATE OR REPLACE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql
               AS $$ BEGIN RAISE disk_full USING MESSAGE = 'No space left on device'; END $$"""
        )
        with pytest.raises(PostgresUnavailable, match="No space left on device"):
            await Admin(connection, actor="alice").retry_now(id)
    assert await the_job(database, id) == before


# -- isolation levels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_an_isolation_level_of_the_role_changes_nothing(database: str, level: str):
    """All of it was refused where a database has one of its own, and a hint said to do what had been done."""
    held, failing, waiting = await a_job(database, "held"), await a_job(database, "blocked"), await a_job(database)
    async with connected(database, default_transaction_isolation=level) as connection:
        admin = Admin(connection, actor="alice")
        await admin.release(held)
        assert await admin.skip_head(ORIGIN, GROUP) == failing
        assert await admin.cancel(waiting) is JobState.WAITING
        assert [done.error async for done in admin.each("discard", [held])] == [None]
        await admin.requeue(held)
        await admin.pause(type="ride", reason="why")
        await admin.pause(topic="positions", reason="why")
        assert await connection.fetchval("SHOW transaction_isolation") == level


@pytest.mark.parametrize(
    "call",
    [
        "pause_jobs(actor => 'alice', reason => 'why', type => 'ride')",
        "pause_jobs(actor => 'alice', reason => 'why', origin => 'transports/0')",
        "pause_topic('positions', 'alice', 'why')",
        "resume_topic('positions', 'alice')",
        "requeue_job(4711, 'alice')",
        "move_jobs('gone/0', 'transports/0', 'alice')",
    ],
)
async def test_from_sql_another_level_is_refused_with_what_to_do(database: str, call: str):
    """What it reads would be older than the locks that it has waited for: of two requeues at once both were done."""
    await a_holder(database, ORIGIN)
    async with connected(database, default_transaction_isolation="serializable") as connection:
        with pytest.raises(asyncpg.PostgresError, match="needs the isolation level READ COMMITTED") as told:
            await connection.execute(f"SELECT sidings.{call}")
    assert "behind BEGIN ISOLATION LEVEL READ COMMITTED" in str(told.value.as_dict()["hint"])


# -- rights, servers ----------------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def stranger(database: str) -> AsyncIterator[tuple[asyncpg.Connection, str]]:
    """The connection of a superuser that acts as a role without rights; its name."""
    async with connected(database) as connection:
        name = await connection.fetchval("SELECT 'stranger_' || replace(gen_random_uuid()::text, '-', '')")
        await connection.execute(f"CREATE ROLE {name}; SET ROLE {name}")
        yield connection, name
        await connection.execute(f"RESET ROLE; DROP OWNED BY {name}; DROP ROLE {name}")


async def test_a_role_is_told_what_it_may_not_do_and_the_rights_of_the_guide_are_enough(
    database: str, stranger: tuple[asyncpg.Connection, str]
):
    connection, name = stranger
    admin = Admin(connection, actor="alice")
    id = await a_job(database)
    with pytest.raises(
        ActionRefused, match=r"permission denied for schema sidings: use the role that owns .*operations"
    ):
        await admin.jobs()
    async with connected(database) as owner:
        await owner.execute(f"GRANT USAGE ON SCHEMA sidings TO {name}")
        await owner.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA sidings TO {name}")
    assert [job.id for job in await admin.jobs()] == [id]
    await admin.origins()
    with pytest.raises(ActionRefused, match=r"permission denied for table"):
        await admin.cancel(id)
    async with connected(database) as owner:
        await owner.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA sidings TO {name}")
        await owner.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA sidings TO {name}")
    await admin.cancel(id)
    await admin.requeue(id)
    await admin.pause(type="ride", reason="x")
    await admin.pause(topic="positions", reason="x")
    await admin.resume(topic="positions")


async def test_rights_on_all_tables_hold_for_the_pauses_of_topics_that_came_later(
    database: str, stranger: tuple[asyncpg.Connection, str]
):
    """Else a service that is not the owner would stand after the migration, and nobody could look at pauses."""
    connection, name = stranger
    async with connected(database) as owner:
        await owner.execute(
            f"""DROP TABLE sidings.topic_pause;
                DROP FUNCTION sidings.take_topic, sidings.pause_topic, sidings.resume_topic;
                GRANT USAGE ON SCHEMA sidings TO {name}; GRANT SELECT ON ALL TABLES IN SCHEMA sidings TO {name}"""
        )
        await owner.execute(next(migration.sql for migration in migrations() if migration.name == "paused_topics"))
    admin = Admin(connection, actor="alice")
    assert await admin.pauses() == []
    with pytest.raises(ActionRefused, match="permission denied for table topic_pause"):
        await admin.pause(topic="positions", reason="x")
    assert not await connection.fetchval("SELECT has_table_privilege('public', 'sidings.topic_pause', 'SELECT')")


async def test_on_a_server_that_can_only_be_read_one_looks_and_is_told_where_to_act(database: str):
    id = await a_job(database)
    async with connected(database, default_transaction_read_only="on") as connection:
        admin = Admin(connection, actor="alice")
        assert [job.id for job in await admin.jobs()] == [id]
        with pytest.raises(
            PostgresUnavailable, match=r"only be read, as a standby .* nothing has changed: act on the pri"
        ):
            await admin.cancel(id)


# -- groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["backing off", "blocked"])
async def test_the_head_of_a_blocked_group_is_released(database: str, admin: Admin, state: str):
    head = await a_job(database, state)
    behind = await a_job(database, state)
    assert await admin.release_group(ORIGIN, GROUP) == head
    job, next_job = await the_job(database, head), await the_job(database, behind)
    assert job is not None
    assert next_job is not None
    assert job["run_at"] is None
    assert job["failures"] == (0 if state == "blocked" else 2)
    assert next_job["run_at"] is not None
    with pytest.raises(ActionRefused, match=f"is not blocked: its head, job {head}, is waiting"):
        await admin.release_group(ORIGIN, GROUP)
    with pytest.raises(ActionRefused, match="no job waits in the group nobody of transports/0"):
        await admin.release_group(ORIGIN, "nobody")


async def test_a_parallel_job_is_no_groups_head(database: str, admin: Admin):
    await a_job(database, policy="2")
    head = await a_job(database, "backing off")
    assert [group.head for group in await admin.blocked_groups()] == [head]
    assert await admin.release_group(ORIGIN, GROUP) == head


async def test_the_head_is_skipped_and_only_the_one_that_was_meant(database: str, admin: Admin):
    first, second, third = [await a_job(database, "backing off") for _ in range(3)]
    assert await admin.skip_head(ORIGIN, GROUP, reason="no such carrier") == first
    with pytest.raises(ActionRefused, match=f"is job {second} now, not {first}"):
        await admin.skip_head(ORIGIN, GROUP, head=first)
    assert await admin.skip_head(ORIGIN, GROUP, head=second) == second
    assert [(row["job_id"], row["outcome"]) for row in await history(database)] == [
        (first, "discarded"),
        (second, "discarded"),
    ]
    assert await the_job(database, third) is not None


async def test_a_head_that_has_done_no_harm_is_not_skipped_unless_its_group_is_paused(database: str, admin: Admin):
    head = await a_job(database)
    with pytest.raises(ActionRefused, match="is waiting: Discard that job by its id"):
        await admin.skip_head(ORIGIN, GROUP)
    for elsewhere in ({"origin": ORIGIN}, {"origin": ORIGIN, "group": "other"}, {"origin": "t/8", "group": GROUP}):
        await admin.pause(reason="not this one", **elsewhere)
    with pytest.raises(ActionRefused, match="is waiting: Discard that job by its id"):
        await admin.skip_head(ORIGIN, GROUP)
    await admin.pause(origin=ORIGIN, group=GROUP, reason="broken")
    me = await a_holder(database, running=[head])
    await fetch(database, "UPDATE sidings.origin SET owner = $2 WHERE origin = $1", ORIGIN, me)
    with pytest.raises(ActionRefused, match="is running"):
        await admin.skip_head(ORIGIN, GROUP)
    await fetch(database, "UPDATE sidings.executor SET running = '{}'")
    assert await admin.skip_head(ORIGIN, GROUP) == head


async def test_a_group_is_cleared_but_for_what_runs_or_is_held(database: str, admin: Admin):
    busy = await a_job(database)
    gone = [await a_job(database, state) for state in ("waiting", "backing off", "delayed", "blocked")]
    held = await a_job(database, "held")
    others = [
        await a_job(database, group="other"),
        await a_job(database, origin="t/9"),
        await a_job(database, group=None),
    ]
    await a_holder(database, ORIGIN, running=[busy])
    assert await admin.clear_group(ORIGIN, GROUP, reason="wrong file") == len(gone)
    left = [row["id"] for row in await fetch(database, "SELECT id FROM sidings.job ORDER BY id")]
    assert left == [busy, held, *others]
    rows = await history(database)
    assert {row["job_id"] for row in rows} == set(gone)
    assert {(row["outcome"], row["payload"]) for row in rows} == {("cancelled", '{"transport": "a"}')}
    target = {"origin": ORIGIN, "group": GROUP}
    detail = {"cancelled": 4, "running": False}
    assert await last_action(admin) == ("alice", "clear group", target, "wrong file", detail)
    assert await admin.clear_group(ORIGIN, GROUP, running=True) == 1
    assert await the_job(database, busy) is None
    assert await admin.clear_group(ORIGIN, GROUP) == 0
    assert len(await admin.audit()) == 2


async def test_a_large_group_is_cleared_in_parts_from_its_end(database: str):
    await fetch(
        database,
        """INSERT INTO sidings.job (type, origin, "group") SELECT 'ride', $1, 'g' FROM generate_series(1, 25)""",
        ORIGIN,
    )
    in_order = "SELECT id FROM sidings.job ORDER BY position"
    ids = [row["id"] for row in await fetch(database, in_order)]
    query = "SELECT sidings.clear_group($1, 'g', 'alice', most => 10)"
    counts: list[int] = []
    for left in (15, 5, 0, 0):
        counts.append(await value(database, query, ORIGIN))
        assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.job ORDER BY position")] == ids[
            :left
        ]
    assert counts == [10, 10, 5, 0]


async def test_of_a_group_that_is_cleared_in_parts_what_is_delayed_goes_before_the_head(database: str):
    """It would become due, and run, between two parts."""
    head = await a_job(database)
    await a_job(database, "delayed")
    query = f"SELECT sidings.clear_group('{ORIGIN}', '{GROUP}', 'alice', most => 1)"
    assert await value(database, query) == 1
    assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.job")] == [head]


async def test_clearing_goes_on_until_nothing_is_left(database: str, admin: Admin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sidings.jobs.admin.many._CLEARED_AT_ONCE", 2)
    for _ in range(5):
        await a_job(database)
    assert await admin.clear_group(ORIGIN, GROUP) == 5
    assert [row.detail["cancelled"] for row in await admin.audit()] == [1, 2, 2]


async def test_who_clears_a_group_is_told_how_many_were_cancelled_before_postgres_went_away(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    rests, rested = asyncio.Event(), asyncio.Event()

    async def rest(seconds: float) -> None:
        rests.set()
        await rested.wait()

    monkeypatch.setattr("sidings.jobs.admin.many._CLEARED_AT_ONCE", 2)
    monkeypatch.setattr("sidings.jobs.admin.many.asyncio", SimpleNamespace(sleep=rest))
    for _ in range(5):
        await a_job(database)
    async with connected(database) as connection:
        clearing = asyncio.create_task(Admin(connection, actor="alice").clear_group(ORIGIN, GROUP))
        await asyncio.wait_for(rests.wait(), SECONDS)
        await fetch(database, "SELECT pg_terminate_backend($1)", connection.get_server_pid())
        await eventually(connection.is_closed)
        rested.set()
        with pytest.raises(PostgresUnavailable, match=r"closed, by Postgres.*2 jobs are cancelled already"):
            await clearing


# -- pauses -------------------------------------------------------------------------------------------------------

TARGETS = [{"type": "ride"}, {"origin": ORIGIN}, {"origin": ORIGIN, "group": GROUP}]


@pytest.mark.parametrize("target", TARGETS, ids=["type", "origin", "group"])
async def test_a_pause_says_who_and_why_and_is_made_once(database: str, admin: Admin, target: dict[str, str]):
    me = await a_holder(database, ORIGIN)
    await admin.pause(reason="carrier down", **target)
    assert await fence(database, me) == 1
    [pause] = await admin.pauses()
    assert (pause.paused_by, pause.reason) == ("alice", "carrier down")
    assert {name: getattr(pause, name) for name in ("type", "origin", "group")} == {
        "type": None,
        "origin": None,
        "group": None,
        **target,
    }
    assert await last_action(admin) == ("alice", "pause", target, "carrier down", {})
    with pytest.raises(ActionRefused, match=r"is paused already, by alice since 20.*: carrier down"):
        await admin.pause(reason="again", **target)
    await admin.resume(reason="up again", **target)
    assert await fence(database, me) == 2
    assert await admin.pauses() == []
    actor, action, resumed, reason, detail = await last_action(admin)
    assert (actor, action, resumed, reason) == ("alice", "resume", target, "up again")
    assert (detail["paused_by"], detail["reason"]) == ("alice", "carrier down")
    with pytest.raises(ActionRefused, match="is not paused"):
        await admin.resume(**target)


async def test_pauses_of_different_things_stand_side_by_side(database: str, admin: Admin):
    others = [{"type": "other"}, {"origin": ORIGIN, "group": "h"}, {"origin": "t/9", "group": GROUP}]
    for target in (*TARGETS, *others):
        await admin.pause(reason="x", **target)
    await admin.resume(origin=ORIGIN)
    await admin.resume(type="other")
    await admin.resume(origin=ORIGIN, group="h")
    assert {(pause.type, pause.origin, pause.group) for pause in await admin.pauses()} == {
        ("ride", None, None),
        (None, ORIGIN, GROUP),
        (None, "t/9", GROUP),
    }


async def test_a_topic_is_paused_and_resumed_and_no_executor_is_interrupted(database: str, admin: Admin):
    me = await a_holder(database, ORIGIN)
    await admin.pause(topic="positions", reason="the database is repaired")
    await admin.pause(topic="orders", reason="it, too")
    other, pause = await admin.pauses()
    assert (pause.topic, pause.type, pause.origin, pause.group) == ("positions", None, None, None)
    assert (pause.paused_by, pause.reason) == ("alice", "the database is repaired")
    assert (other.topic, other.reason) == ("orders", "it, too")
    assert await value(database, "SELECT count(*) FROM sidings.pause") == 0, "jobs are named at once, as ever"
    await admin.resume(topic="orders")
    with pytest.raises(
        ActionRefused, match=r"the topic positions is paused already, by alice since 20.*: the database"
    ):
        await admin.pause(topic="positions", reason="again")
    await admin.resume(topic="positions", reason="up again")
    actor, action, target, reason, detail = await last_action(admin)
    assert (actor, action, target, reason) == ("alice", "resume", {"topic": "positions"}, "up again")
    assert (detail["paused_by"], detail["reason"]) == ("alice", "the database is repaired")
    with pytest.raises(ActionRefused, match="the topic positions is not paused: Look at the list of pauses"):
        await admin.resume(topic="positions")
    assert await admin.pauses() == []
    assert await fence(database, me) == 0


async def test_of_two_who_pause_a_topic_at_once_the_second_is_told_of_the_first(database: str, admin: Admin):
    async with connected(database) as connection:
        await connection.execute("BEGIN")
        await connection.execute("SELECT sidings.pause_topic('positions', 'bob', 'first')")
        second = asyncio.create_task(admin.pause(topic="positions", reason="second"))
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'sidings.topic_pause'::regclass"
        async with connected(database) as beside:
            await eventually(lambda: is_one(beside, waiting))
            assert await beside.fetchval("SELECT count(*) FROM sidings.topic_pause") == 0  # a consumer does not wait
        await connection.execute("COMMIT")
    with pytest.raises(ActionRefused, match="is paused already, by bob"):
        await second


async def is_one(connection: asyncpg.Connection, query: str) -> bool:
    return await connection.fetchval(query) == 1


async def test_what_is_meant_with_a_topic_is_clear_or_refused(database: str, admin: Admin):
    others: list[dict[str, Any]] = [{"type": "ride"}, {"origin": ORIGIN}, {"origin": ORIGIN, "group": GROUP}]
    for target in others:
        for act in (admin.pause(topic="positions", reason="x", **target), admin.resume(topic="positions", **target)):
            with pytest.raises(ActionRefused, match=r"topic='positions': it is not clear .*: give it alone, without"):
                await act
    with pytest.raises(ActionRefused, match="no topic is named: Give the topic's name"):
        await admin.pause(topic="", reason="x")
    with pytest.raises(ActionRefused, match="a pause needs a reason: Give reason"):
        await admin.pause(topic="positions", reason="")
    with pytest.raises(ActionRefused, match="no topic is named"):
        await admin.resume(topic="")
    assert await admin.pauses() == []


async def test_what_is_unclear_is_refused(database: str, admin: Admin):
    wrong: list[dict[str, Any]] = [
        {}, {"type": "ride", "origin": ORIGIN}, {"group": GROUP}, {"type": ""}, {"origin": ""},
        {"origin": ORIGIN, "group": ""}, {"type": "ride", "group": GROUP},
    ]  # fmt: skip
    for target in wrong:
        with pytest.raises(ActionRefused, match="Give a type, or an origin, or an origin and a group"):
            await admin.pause(reason="x", **target)
    with pytest.raises(ActionRefused, match="a pause needs a reason"):
        await admin.pause(reason="", type="ride")
    assert await admin.pauses() == []


async def test_who_acts_has_to_be_named(database: str):
    id = await a_job(database)
    async with connected(database) as connection:
        nobody = Admin(connection)
        pauses = nobody.pause(type="ride", reason="x"), nobody.pause(topic="positions", reason="x")
        for action in (nobody.cancel(id), *pauses, nobody.clear_group(ORIGIN, GROUP)):
            with pytest.raises(ActionRefused, match="nobody is named who does it"):
                await action
        assert await nobody.show(id)
    assert await the_job(database, id) is not None


# -- origins, executors -------------------------------------------------------------------------------------------


async def test_an_origin_is_shown_with_its_holder_and_its_jobs_by_state(database: str, admin: Admin):
    (running, *_), delayed = await some_jobs(database, 3, group="a"), await some_jobs(database, 2, "delayed")
    for group in ("b", "c", None):
        await a_job(database, "backing off", group=group)
    await a_job(database, "backing off", group="d", policy="2")  # parallel: it keeps nobody waiting
    await a_job(database, "blocked", group="e")
    await some_jobs(database, 4, group="e")
    held = await a_job(database, "held")
    again = await a_job(database, "backing off", group="f")
    await a_job(database, group="g", policy="2")  # and is nobody's head
    await a_job(database, "backing off", group="g", failures="0")  # snoozed
    await a_job(database, "backing off", group="h", run_at="now() - interval '1 hour'")  # due again
    me = await a_holder(database, ORIGIN, running=[running, again, held])  # held by a cycle that still names it
    await a_holder(database, running=[running])
    await admin.pause(origin=ORIGIN, reason="look")
    [row] = await admin.origins()
    assert (row.origin, row.leased, row.owner, row.host, row.pid, row.epoch) == (
        *(ORIGIN, True, me),
        *("host-of-the-holder", 4711, 7),
    )
    states = (row.waiting, row.running, row.backing_off, row.blocked, row.delayed, row.held)
    assert states == (8, 2, 5, 1, len(delayed), 1)
    counts = {count.state: count.jobs for count in await admin.counts(by=["state"])}
    assert states == tuple(
        counts[state]
        for state in (
            *(
                JobState.WAITING,
                JobState.RUNNING,
                JobState.BACKING_OFF,
                JobState.BLOCKED,
                JobState.DELAYED,
                JobState.HELD,
            ),
        )
    )
    assert row.jobs == await jobs_left(database)
    assert row.blocked_groups == 4
    assert row.oldest == await value(database, "SELECT enqueued_at FROM sidings.job WHERE id = $1", running)
    assert row.lease_until == await value(database, "SELECT lease_until FROM sidings.origin")
    assert row.pause is not None
    assert (row.pause.origin, row.pause.group, row.pause.paused_by, row.pause.reason) == (ORIGIN, None, "alice", "look")


async def test_origins_are_those_that_have_jobs_or_were_held_or_paused(database: str, admin: Admin):
    for number, state in enumerate(("waiting", "delayed", "held")):
        await a_job(database, state, origin=f"never/{number}")
    dead = await a_holder(database, "dead/0", lease="-1 minute")
    await a_holder(database, "alive/0", "outbox/3", "outbox/15")
    await a_holder(database, "given/0", "outbox/16")
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.origin SET owner = NULL, lease_until = NULL WHERE origin = 'given/0'")
    await admin.pause(origin="typo/0", reason="look")
    await admin.pause(origin="group/0", group="g", reason="look")
    rows = {row.origin: row for row in await admin.origins()}
    assert list(rows) == [
        *("alive/0", "dead/0", "given/0", "group/0", "never/0", "never/1", "never/2"),
        *("outbox/16", "typo/0"),  # a topic of that name has its own origins; the outbox has 16 slots
    ]
    assert [name for name, row in rows.items() if row.leased] == ["alive/0", "outbox/16"]
    assert (rows["dead/0"].owner, rows["dead/0"].pid) == (dead, 4711)
    assert (rows["given/0"].owner, rows["given/0"].epoch, rows["given/0"].jobs) == (None, 7, 0)
    assert (rows["never/0"].epoch, rows["never/0"].waiting, rows["never/0"].pause) == (None, 1, None)
    assert (rows["group/0"].epoch, rows["group/0"].pause) == (0, None)
    assert (rows["never/1"].delayed, rows["never/1"].oldest) == (1, None)


async def test_what_waits_is_counted_up_to_ten_thousand(database: str, admin: Admin):
    await some_jobs(database, 10_001, group=None)
    await some_jobs(database, 3, "backing off", group=None)
    [row] = await admin.origins()
    assert (row.waiting, row.backing_off) == (10_000, 3)


async def test_executors_are_those_that_hold_origins(database: str, admin: Admin):
    me = await a_holder(database, "a/0", "a/1", "outbox/0", running=[1, 2, 3])
    await a_holder(database, "b/0", lease="-1 minute")
    await a_holder(database)
    await a_holder(database, "outbox/1")
    async with connected(database) as connection:
        await connection.execute(
            "UPDATE sidings.origin SET lease_until = lease_until - interval '9 minutes' WHERE origin = 'a/1'"
        )
    [row] = await admin.executors()
    assert (row.id, row.host, row.pid, row.origins, row.running) == (me, "host-of-the-holder", 4711, 2, 3)
    assert row.lease_until == await value(database, "SELECT lease_until FROM sidings.origin WHERE origin = 'a/1'")
    assert row.started_at == await value(database, "SELECT started_at FROM sidings.executor WHERE id = $1", me)


# -- orphans ------------------------------------------------------------------------------------------------------


async def test_orphans_are_origins_with_jobs_that_nobody_holds(database: str, admin: Admin):
    for origin, state in (("a/0", "waiting"), ("b/0", "delayed"), ("c/0", "held"), ("d/0", "waiting"), ("e/0", "held")):
        await a_job(database, state, origin=origin, group=None)
        await a_job(database, "waiting" if origin == "d/0" else state, origin=origin)
    await a_holder(database, "d/0", "empty/0")
    dead = await a_holder(database, "e/0", lease="-1 minute")
    orphans = {orphan.origin: orphan for orphan in await admin.orphans()}
    assert {origin: (o.waiting, o.delayed, o.held) for origin, o in orphans.items()} == {
        "a/0": (2, 0, 0), "b/0": (0, 2, 0), "c/0": (0, 0, 2), "e/0": (0, 0, 2)
    }  # fmt: skip
    assert (orphans["e/0"].former_owner, orphans["e/0"].host, orphans["e/0"].pid) == (dead, "host-of-the-holder", 4711)
    assert (orphans["a/0"].former_owner, orphans["a/0"].lease_until) == (None, None)
    for origin, orphan in orphans.items():
        first = "SELECT min(enqueued_at) FROM sidings.job WHERE origin = $1"
        assert orphan.oldest == await value(database, first, origin)


async def test_jobs_move_in_their_order_behind_what_waits_there(database: str, admin: Admin):
    await a_holder(database, "new/0")
    there = await a_job(database, origin="new/0")
    moved = [await a_job(database, state, origin="old/0") for state in ("waiting", "backing off", "waiting")]
    others = [await a_job(database, state, origin="old/0") for state in ("delayed", "held")]
    await fetch(database, "UPDATE sidings.job SET position = nextval('sidings.job_position') WHERE id = $1", moved[0])
    moved = [*moved[1:], moved[0]]  # it was promoted, or released, behind them
    left = await a_job(database, origin="older/0")
    marks = await value(database, "SELECT max(txid::text::bigint) FROM sidings.job")
    assert await admin.move("old/0", "new/0", reason="fewer partitions") == 5
    rows = await fetch(database, "SELECT * FROM sidings.job WHERE origin = 'new/0' ORDER BY position NULLS LAST, id")
    assert [row["id"] for row in rows] == [there, *moved, *others]
    assert all(int(row["txid"]) > marks for row in rows[1:4])
    assert [row["position"] is None for row in rows[4:]] == [True, True]
    assert (await the_job(database, left) or {})["origin"] == "older/0"
    detail = {"jobs": 5, "lost": 0, "former_owner": None, "epoch": 0}
    assert await last_action(admin) == ("alice", "move", {"origin": "old/0", "to": "new/0"}, "fewer partitions", detail)


async def test_nothing_is_moved_away_from_a_living_holder(database: str, admin: Admin):
    id = await a_job(database)
    me = await a_holder(database, ORIGIN)
    await a_holder(database, "new/0")
    with pytest.raises(ActionRefused, match=f"is held by the executor {me} .host host-of-the-holder, pid 4711"):
        await admin.move(ORIGIN, "new/0", lease_seconds=0)
    assert (await the_job(database, id) or {})["origin"] == ORIGIN
    assert await fence(database, me) == 0


async def test_what_a_dead_holder_ran_is_accounted_for_as_lost_before_it_moves(database: str, admin: Admin):
    cut, waiting, elsewhere = await a_job(database), await a_job(database), await a_job(database, origin="t/9")
    dead = await a_holder(database, ORIGIN, lease="-1 second", running=[cut, elsewhere])
    await a_holder(database, "new/0")
    assert await admin.move(ORIGIN, "new/0", lease_seconds=0) == 2
    job = await the_job(database, cut)
    assert job is not None
    assert (job["losses"], job["attempt"]) == (1, 2)
    assert ((await the_job(database, waiting)) or {})["losses"] == 0
    [row] = await history(database)
    assert (row["job_id"], row["outcome"], row["origin"], row["executor"], row["epoch"], row["attempt"]) == (
        cut, "lost", ORIGIN, dead, 7, 1
    )  # fmt: skip
    assert await fence(database, dead) == 1
    assert await value(database, "SELECT running FROM sidings.executor WHERE id = $1", dead) == [elsewhere]
    [origin] = await fetch(database, "SELECT * FROM sidings.origin WHERE origin = $1", ORIGIN)
    assert (origin["owner"], origin["epoch"], origin["lease_until"]) == (None, 8, None)


async def test_an_expired_lease_counts_only_when_postgres_has_been_up_for_long(database: str, admin: Admin):
    await a_job(database)
    await a_holder(database, ORIGIN, lease="-1 second")
    await a_holder(database, "new/0")
    up = await value(database, "SELECT extract(epoch FROM now() - pg_postmaster_start_time())::float8")
    with pytest.raises(ActionRefused, match="Postgres has been up for less than"):
        await admin.move(ORIGIN, "new/0", lease_seconds=up + 3_600)
    assert await admin.move(ORIGIN, "new/0", lease_seconds=0) == 1


async def test_a_target_that_nobody_knows_is_taken_for_a_mistake(database: str, admin: Admin):
    await a_job(database)
    with pytest.raises(ActionRefused, match="no executor has ever held new/0"):
        await admin.move(ORIGIN, "new/0")
    with pytest.raises(ActionRefused, match="Give two different origins"):
        await admin.move(ORIGIN, ORIGIN)


# -- looking ------------------------------------------------------------------------------------------------------


async def test_jobs_are_found_by_their_state(database: str, admin: Admin):
    ids = {state: await a_job(database, state) for state in STATES}
    ids["running"] = await a_job(database)
    await a_holder(database, ORIGIN, running=[ids["running"]])
    assert set(ids) == set(JobState)
    for state, id in ids.items():
        for filters in ({}, {"origin": ORIGIN}, {"origin": ORIGIN, "group": GROUP}, {"type": "ride"}):
            [row] = await admin.jobs(state=state, **filters)
            assert (row.id, row.state) == (id, state)
        for filters in ({"origin": "t/9"}, {"origin": ORIGIN, "group": "other"}, {"type": "other"}):
            assert await admin.jobs(state=state, **filters) == []
        assert (await admin.show(id)).row == (await admin.jobs(state=state))[0].__class__(
            **{name: getattr(row, name) for name in row.__slots__ if name != "cursor"}
        )
    assert {row.id for row in await admin.jobs()} == set(ids.values())
    counted = await admin.counts(by=["state"])
    assert {count.state: count.jobs for count in counted} == dict.fromkeys(JobState, 1)


async def test_what_runs_is_listed_once_and_nothing_else(database: str, admin: Admin):
    """Two executors may name a job for a moment, and one that is held already."""
    running, held = await a_job(database), await a_job(database, "held")
    for origin in ("t/8", "t/9"):
        await a_holder(database, origin, running=[running, held])
    assert [row.id for row in await admin.jobs(state="running")] == [running]


@pytest.mark.parametrize(
    "filters",
    [{}, {"origin": ORIGIN}, {"origin": ORIGIN, "group": GROUP}, {"type": "ride"}],
    ids=["all", "origin", "group", "type"],
)
async def test_pages_follow_each_other_without_a_gap(database: str, admin: Admin, filters: dict[str, str]):
    """Also where many jobs have the same due time, however long ago."""
    places = ((ORIGIN, GROUP), (ORIGIN, "h"), (ORIGIN, None), ("a:b/0", GROUP))
    for kind in STATES:
        times = {"backing off": "'2099-01-01'", "delayed": "'1960-01-01'"}
        same = {"run_at": times[kind]} if kind in times else {}
        for origin, group in places:
            await some_jobs(database, 3, kind, origin=origin, group=group)
            await some_jobs(database, 4, kind, origin=origin, group=group, **same)
    running = [
        row["id"] for row in await fetch(database, "SELECT id FROM sidings.job WHERE held IS NULL AND id % 5 = 0")
    ]
    await a_holder(database, ORIGIN, running=running)
    for state in (None, *JobState):
        whole = await admin.jobs(state=state, limit=10_000, **filters)
        assert len({row.id for row in whole}) == len(whole) > 0
        if state is None and not filters:
            assert len(whole) == 7 * len(places) * len(STATES)
        paged, after = list[Any](), None
        while page := await admin.jobs(state=state, limit=3, after=after, **filters):
            assert len(page) <= 3
            paged += page
            after = page[-1].cursor
        assert paged == whole


async def test_jobs_are_listed_in_the_order_in_which_they_run(database: str, admin: Admin):
    first = await a_job(database)
    held = await a_job(database, "held")
    late = await a_job(database, "delayed", run_at="now() + interval '3 hours'")
    soon = await a_job(database, "delayed")
    last = await a_job(database)
    assert [row.id for row in await admin.jobs(origin=ORIGIN)] == [first, last, soon, late, held]


async def test_wrong_filters_are_refused_by_name(admin: Admin):
    with pytest.raises(ActionRefused, match="limit=0"):
        await admin.jobs(limit=0)
    with pytest.raises(ActionRefused, match="group='g' needs origin="):
        await admin.jobs(group="g")
    with pytest.raises(ActionRefused, match="state='lost' is none: give one of waiting"):
        await admin.jobs(state="lost")
    with pytest.raises(ActionRefused, match="after='x' is no cursor"):
        await admin.jobs(after="x")
    beyond = ["ordered:9999999999999999999:1:x", "ordered:1:9999999999999999999:x", "delayed:-9000000000000000000:1:x"]
    for odd in ("ordered:²:1:x", "ordered:--5:1:x", "ordered:1:²:x", *beyond):  # "²" is a digit, and no decimal
        with pytest.raises(ActionRefused, match="is no cursor"):
            await admin.jobs(after=odd)
    with pytest.raises(ActionRefused, match="outcome 'lost' ends no job"):
        await admin.ended(outcomes=["lost"])
    with pytest.raises(ActionRefused, match="colour"):
        await admin.counts(by=["colour"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda admin: admin.cancel("4711"), r"invalid input for query argument \$1: '4711'"),
        (lambda admin: admin.cancel(1, reason=5), r"invalid input for query argument \$3: 5 \(expected str, got int\)"),
        (lambda admin: admin.cancel(1, reason="a\0b"), "invalid byte sequence .* 0x00"),
        (lambda admin: admin.jobs(limit="5"), "limit='5': give 1 to 10000"),
        (lambda admin: admin.audit(limit=None), "limit=None: give 1 to 10000"),
    ],
)
async def test_an_argument_of_another_type_is_refused_as_all_that_makes_no_sense(admin: Admin, call: Any, told: str):
    """It was an error of the driver's, or of Python's."""
    with pytest.raises(ActionRefused, match=told):
        await call(admin)


async def test_jobs_are_counted_by_what_is_asked_for(database: str, admin: Admin):
    for origin in ("t/0", "t/1"):
        await a_job(database, origin=origin)
        await a_job(database, "held", origin=origin)
        await a_job(database, origin=origin, type="'other'")
    by = {(c.state, c.type, c.origin): c.jobs for c in await admin.counts()}
    assert by == {("waiting", "ride", None): 2, ("held", "ride", None): 2, ("waiting", "other", None): 2}
    by = {(c.state, c.type, c.origin): c.jobs for c in await admin.counts(by=["origin"], type="ride")}
    assert by == {(None, None, "t/0"): 2, (None, None, "t/1"): 2}
    [one] = await admin.counts(by=[], origin="t/0")
    assert (one.jobs, one.oldest) == (3, await value(database, "SELECT min(enqueued_at) FROM sidings.job"))


async def test_blocked_groups_come_with_their_cause_and_their_age(database: str, admin: Admin):
    async def group(name: str, state: str, **more: str) -> int:
        head = await a_job(database, state, group=name, **more)
        await a_job(database, group=name)
        await a_job(database, group=name)
        return head

    ago = "now() - interval '%s hours'"
    backs_off = await group("backs off", "backing off", first_started_at=ago % 2)
    blocked = await group("blocked", "blocked", first_started_at=ago % 3)
    await a_job(database, group="beside", policy="2")  # parallel: nobody's head
    beside = await group("beside", "backing off", first_started_at=ago % 4)
    await a_job(database, group="paused", policy="2")
    paused = await group("paused", "waiting")
    both = await group("both", "backing off", first_started_at=ago % 1)
    at_once, _, _ = [await a_job(database, group="at once", policy="2") for _ in range(3)]
    snoozed = await group("snoozed", "backing off", error="NULL", failures="0", enqueued_at=ago % 5)
    await group("healthy", "waiting")
    await a_job(database, group="late head")
    await a_job(database, "backing off", group="late head")  # not the head
    await a_job(database, "backing off", group=None)
    await a_job(database, "delayed", group="delayed")
    await fetch(
        database,
        """INSERT INTO sidings.job_history (job_id, enqueued_at, finished_at, attempt, outcome, priority, type, origin,
               error_class, error_message)
           SELECT $1::bigint, now(), now() + n * interval '1 second', n, 'snoozed'::sidings.outcome, 0, 'ride', 't/0',
               'Snooze', 'until ' || n
           FROM generate_series(1, 3) n
           UNION ALL SELECT $1, now(), now() + interval '4 seconds', 4, 'lost', 0, 'ride', 't/0', NULL, NULL""",
        snoozed,
    )
    for name in ("paused", "both", "at once"):
        await admin.pause(origin=ORIGIN, group=name, reason="broken")
    groups = {group.group: group for group in await admin.blocked_groups()}
    assert list(groups) == ["snoozed", "beside", "blocked", "backs off", "both", "paused", "at once"]
    assert {name: (g.head, g.state, g.error, g.pause is not None) for name, g in groups.items()} == {
        "snoozed": (snoozed, "backing off", "Snooze: until 3", False),
        "beside": (beside, "backing off", "ValueError: x", False),
        "blocked": (blocked, "blocked", "ValueError: x", False),
        "backs off": (backs_off, "backing off", "ValueError: x", False),
        "both": (both, "backing off", "ValueError: x", True),
        "paused": (paused, "waiting", None, True),
        "at once": (at_once, "waiting", None, True),
    }
    assert {g.behind for g in groups.values()} == {2}
    assert groups["blocked"].next_at is None
    assert groups["backs off"].next_at is not None
    assert timedelta(hours=2) <= datetime.now(UTC) - groups["backs off"].since < timedelta(hours=3)
    assert groups["paused"].pause == (await admin.show(paused)).pauses[0]
    assert [group.group for group in await admin.blocked_groups(limit=1)] == ["snoozed"]
    assert await admin.blocked_groups(origin="t/9") == []


async def test_one_job_is_shown_with_all_that_happened_to_it(database: str, admin: Admin):
    headers = """'{"correlation_id": "c-1"}'"""
    id = await a_job(database, "backing off", headers=headers)
    await admin.pause(type="ride", reason="carrier down")
    await admin.pause(origin=ORIGIN, group="other", reason="not this one")
    await admin.pause(origin="elsewhere/0", reason="nor this one")
    await admin.retry_now(id)
    details = await admin.show(id)
    assert details.row is not None
    assert (details.row.error, details.payload, details.headers) == (
        "ValueError: x", '{"transport": "a"}', {"correlation_id": "c-1"}
    )  # fmt: skip
    assert [action.action for action in details.actions] == ["retry now"]
    assert [pause.reason for pause in details.pauses] == ["carrier down"]
    await admin.cancel(id)
    ended = await admin.show(id)
    assert (ended.row, ended.payload, ended.pauses) == (None, '{"transport": "a"}', ())
    [attempt] = ended.attempts
    assert (attempt.outcome, attempt.attempt, attempt.correlation_id) == (OutcomeName.CANCELLED, 3, "c-1")
    assert [action.action for action in ended.actions] == ["retry now", "cancel"]
    with pytest.raises(JobNotFound, match="no job 4711"):
        await admin.show(4711)


async def test_what_ended_without_success_is_found_again(database: str, admin: Admin):
    ids = [await a_job(database) for _ in range(4)]
    await admin.cancel(ids[3])  # first, as a group is cleared from its end
    for id in ids[:3]:
        await admin.discard(id)
    await fetch(database, "UPDATE sidings.job_history SET outcome = 'succeeded' WHERE job_id = $1", ids[0])
    assert [row.job_id for row in await admin.ended()] == [ids[2], ids[1], ids[3]]
    [newest] = await admin.ended(outcomes=["discarded"], limit=1)
    assert newest.job_id == ids[2]
    assert [row.job_id for row in await admin.ended(before=newest.finished_at)] == [ids[1], ids[3]]
    assert await admin.ended(type="other") == await admin.ended(origin="t/9") == []
    assert await admin.ended(since=datetime.now(UTC) + timedelta(hours=1)) == []
    # What a person has discarded comes back like any other; what was cancelled, where that is named; and each once.
    assert [row.job_id for row in await admin.requeueable()] == ids[1:3]
    assert [row.job_id for row in await admin.requeueable(outcomes=["discarded", "cancelled"])] == ids[1:]
    await admin.requeue(ids[2])
    assert [row.job_id for row in await admin.requeueable()] == [ids[1]]


async def test_the_audit_is_read_backwards(database: str, admin: Admin):
    for number in range(5):
        await admin.pause(type=f"type {number}", reason="x")
    async with connected(database) as connection:
        await Admin(connection, actor="bob").resume(type="type 0")
    newest = await admin.audit(limit=2)
    assert [(row.actor, row.action) for row in newest] == [("bob", "resume"), ("alice", "pause")]
    rest = await admin.audit(before=newest[-1].id)
    assert [row.target["type"] for row in rest] == ["type 3", "type 2", "type 1", "type 0"]
    assert [row.actor for row in await admin.audit(actor="bob")] == ["bob"]
    assert len(await admin.audit(action="pause")) == 5


# -- through what -------------------------------------------------------------------------------------------------


async def test_a_pool_will_do(database: str):
    id = await a_job(database)
    async with asyncpg.create_pool(database, min_size=1, max_size=2, timeout=SECONDS) as pool:
        admin = Admin(pool, actor="alice")
        assert [row.id for row in await admin.jobs()] == [id]
        assert await admin.cancel(id) is JobState.WAITING
        async with pool.acquire() as connection:
            assert len(await Admin(connection).audit()) == 1


async def test_an_open_transaction_is_refused_because_executors_would_wait(database: str):
    id = await a_job(database)
    async with connected(database) as connection, connection.transaction():
        with pytest.raises(ActionRefused, match="without an open transaction"):
            await Admin(connection, actor="alice").cancel(id)
    assert await the_job(database, id) is not None


async def test_a_connection_with_codecs_of_its_own_reads_the_same(database: str):
    id = await a_job(database, headers="""'{"a": "b"}'""")
    async with connected(database) as connection:
        for kind in ("json", "jsonb"):
            await connection.set_type_codec(kind, encoder=str, decoder=lambda _: "?", schema="pg_catalog")
        admin = Admin(connection, actor="alice")
        details = await admin.show(id)
        assert (details.payload, details.headers) == ('{"transport": "a"}', {"a": "b"})
        await admin.cancel(id)
        assert (await admin.audit())[0].target["job"] == id


async def test_a_database_without_the_schema_is_named(empty_database: str):
    async with connected(empty_database) as connection:
        for look in (Admin(connection).jobs(), Admin(connection, actor="alice").cancel(1)):
            with pytest.raises(SchemaTooOld, match=r"call migrate\(\)"):
                await look
    with pytest.raises(ConfigurationError, match="timeout=0"):
        Admin(None, timeout=0)  # type: ignore[arg-type]


async def test_a_schema_without_the_last_column_is_named(database: str):
    """As where an application is deployed before somebody migrates: asyncpg's own error says nothing of that."""
    async with connected(database) as connection:
        await connection.execute("ALTER TABLE sidings.job_history DROP COLUMN headers")
        with pytest.raises(SchemaTooOld, match=r"call migrate\(\)"):
            await Admin(connection).show(await a_job(database))


@pytest.mark.parametrize("given", ["postgresql://localhost/tracker", None, Transaction(None)])  # type: ignore[arg-type]
def test_what_is_no_connection_is_refused_at_once(given: Any):
    """Its first call failed: 'str' object has no attribute 'is_closed'."""
    with pytest.raises(ConfigurationError, match=rf"Admin\(<{type(given).__name__}>\): give a connection of asyncpg"):
        Admin(given, actor="alice")


async def test_a_schema_of_another_name_is_all_that_is_touched(empty_database: str):
    for schema in ("depot", "sidings"):
        await migrate(empty_database, service="test", schema=schema)
    async with connected(empty_database) as connection:
        heard: list[object] = []
        await connection.add_listener("depot_committed", lambda *call: heard.append(call[-1]))
        admin = Admin(connection, actor="alice", schema="depot")
        insert = "SELECT depot.enqueue('ride', '{}'::json, $1, 'g')"
        ids = [await connection.fetchval(insert, ORIGIN) for _ in range(3)]
        await admin.pause(origin=ORIGIN, group="g", reason="x")
        assert [group.head for group in await admin.blocked_groups()] == ids[:1]
        await admin.skip_head(ORIGIN, "g")
        new = await admin.requeue(ids[0])
        assert [row.id for row in await admin.jobs()] == [*ids[1:], new]
        assert await admin.clear_group(ORIGIN, "g") == 3
        assert (await admin.show(new)).attempts[0].outcome == "cancelled"
        assert len(await admin.audit()) == 4
        await eventually(lambda: heard == [ORIGIN] * 4, lambda: heard)
        assert await connection.fetchval("SELECT count(*) FROM sidings.audit") == 0


async def test_a_connection_that_was_closed_says_so(database: str):
    connection = await asyncpg.connect(database)
    await connection.close()
    with pytest.raises(PostgresUnavailable, match="is closed"):
        await Admin(connection).jobs()


async def test_a_server_that_ends_connections_of_a_pool_is_one_that_did_not_answer(database: str):
    """As it does for a restart. Its last word may have reached an idle connection, for which asyncpg has an error of
    its own; and the pool takes back at once what breaks while it is in use."""
    async with asyncio.timeout(SECONDS), connected(database) as other:
        for round in range(20):
            async with asyncpg.create_pool(database, min_size=1, max_size=1) as pool:
                admin = Admin(pool, actor="alice")
                await admin.pauses()
                calls = asyncio.create_task(until_it_breaks(admin))
                try:
                    await asyncio.sleep(0.002 * (round % 4))  # in the middle of this or that call
                    while not calls.done():  # a pool replaces one that ends while it is idle, and nobody sees it
                        await other.execute(
                            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                        )
                        await asyncio.wait([calls], timeout=0.05)
                    with pytest.raises(PostgresUnavailable, match="did not answer"):
                        await calls
                finally:
                    calls.cancel()  # else the pool would wait for it
                pool.terminate()


async def until_it_breaks(admin: Admin) -> None:
    while True:
        await admin.pauses()
        await admin.jobs()
        with suppress(JobNotFound):
            await admin.cancel(1)


async def test_a_call_is_given_up_in_time_where_the_end_of_another_statement_is_not_answered(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """asyncpg keeps so many prepared statements. That it keeps one no more it told the server after the next one was
    prepared, and waited for the answer, for ever."""
    monkeypatch.setattr("sidings.jobs.admin.calls._ROLLBACK_SECONDS", 0.1)
    async with proxied(database) as proxy:
        for look in (Admin.pauses, Admin.jobs, lambda admin: admin.cancel(1)):
            connection = await asyncpg.connect(proxy.dsn, statement_cache_size=1)
            await connection.fetch("SELECT")
            fault = proxy.arm("close", Moment.SILENT_BEFORE)
            looking = asyncio.create_task(look(Admin(connection, actor="alice", timeout=0.5)))
            await asyncio.wait([looking], timeout=12)
            assert (looking.done(), fault.hits) == (True, 1)
            with pytest.raises(PostgresUnavailable, match="did not answer"):
                await looking
            connection.terminate()


# -- the documentation --------------------------------------------------------------------------------------------


async def test_the_lines_of_the_guide_do_what_they_say(database: str, admin: Admin):
    stuck, behind = await a_job(database, "backing off"), await a_job(database)
    held = await a_job(database, "held", type="'send_eta'")
    gone = await a_job(database, group="other")
    await admin.discard(gone)
    await run("administration.md", "In a few lines")["tidy_up"](database)
    assert {(row["job_id"], row["outcome"]) for row in await history(database)} == {
        (stuck, "discarded"),
        (gone, "discarded"),
    }
    assert [row.id for row in await admin.jobs(state="waiting")][:2] == [behind, held]
    assert {row.action for row in await admin.audit()} == {"discard", "skip head", "release", "requeue", "pause"}
    assert [pause.type for pause in await admin.pauses()] == ["send_eta"]


async def test_the_sql_of_the_guide_does_what_it_says(database: str, admin: Admin):
    await some_jobs(database, 3, origin="transports/17", group="t-1")
    await fetch_all(database, block("administration.md", "From SQL", "sql"))
    assert [row.action for row in await admin.audit()] == ["resume", "pause", "resume", "clear group", "pause"]
    assert await admin.pauses() == []
    assert len(await history(database)) == 3


async def fetch_all(dsn: str, statements: str) -> None:
    async with connected(dsn) as connection:
        for statement in filter(None, map(str.strip, statements.split(";"))):
            await connection.fetch(statement)


def test_every_action_and_every_view_is_in_the_guide():
    page = (DOCS / "administration.md").read_text()
    missing = [name for name in vars(Admin) if not name.startswith("_") and f"`{name}(" not in page]
    assert missing == []
