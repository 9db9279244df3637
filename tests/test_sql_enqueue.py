"""`SELECT sidings.enqueue(…)`: from SQL, from triggers, from other languages."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Any

import asyncpg
import pytest
from sidings import PostgresSettings
from sidings.jobs import Job, Registry
from sidings.kafka import partition_for
from sidings.kafka.outbox import Outbox
from sidings.schema import migrate

from .guide import block, run
from .support import Ride, connected, drained, eventually, fetch, outcomes, running, value

COLUMNS = """type, origin, "group", position, run_at, priority, policy, attempt, payload, headers,
             txid = pg_current_xact_id_if_assigned() AS mine"""


async def test_a_job_from_sql_is_stored_as_python_stores_it(database: str):
    registry = Registry()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None: ...

    async with connected(database) as connection, connection.transaction():
        headers = {"correlation_id": "c1"}
        await ride.enqueue(connection, Ride(transport="a", number=7), origin="t/3", priority=-5, headers=headers)
        await connection.execute(
            """SELECT sidings.enqueue('ride', '{"transport":"a","number":7}', 't/3', 'a', priority => -5,
                                      headers => '{"correlation_id":"c1"}')"""
        )
        ours, theirs = await connection.fetch(f"SELECT {COLUMNS} FROM sidings.job ORDER BY position")
    assert theirs["position"] == ours["position"] + 1
    assert {**dict(ours), "position": 0} == {**dict(theirs), "position": 0}
    assert ours["mine"]


async def test_a_job_from_sql_shares_the_fate_of_its_transaction(database: str):
    async with connected(database) as connection:
        for ending in ("ROLLBACK", "COMMIT"):
            await connection.execute("BEGIN")
            await connection.execute("SELECT sidings.enqueue('ride', '{}', 't/0', $1)".replace("$1", f"'{ending}'"))
            await connection.execute(ending)
        await connection.execute("SELECT sidings.enqueue('ride', '{}', 't/0', 'autocommit')")
    assert [row["group"] for row in await fetch(database, "SELECT * FROM sidings.job ORDER BY id")] == [
        "COMMIT",
        "autocommit",
    ]


WAITING = """SELECT a.backend_xid FROM pg_locks l JOIN pg_stat_activity a USING (pid)
             WHERE l.pid = $1 AND NOT l.granted AND l.relation = 'sidings.job_position'::regclass"""


async def test_the_transaction_id_is_taken_before_the_position(database: str):
    async with connected(database) as connection, connected(database) as blocker, connected(database) as observer:
        pid = await connection.fetchval("SELECT pg_backend_pid()")
        async with blocker.transaction():
            await blocker.execute("ALTER SEQUENCE sidings.job_position RESTART")  # nextval has to wait for this
            task = asyncio.ensure_future(connection.fetchval("SELECT sidings.enqueue('ride', '{}', 't/0')"))
            row = await eventually(lambda: observer.fetchrow(WAITING, pid), "the call waits for its position")
            assert row["backend_xid"] is not None
        await task


@pytest.mark.parametrize("when", ["delay => '90 seconds'", "run_at => clock_timestamp() + '90 seconds'"])
async def test_a_delayed_job_from_sql_has_no_position(database: str, when: str):
    await value(database, f"SELECT sidings.enqueue('ride', '{{}}', 't/0', {when})")
    [row] = await fetch(database, "SELECT position, run_at, enqueued_at FROM sidings.job")
    assert row["position"] is None
    assert abs(row["run_at"] - row["enqueued_at"] - timedelta(seconds=90)) < timedelta(seconds=5)


@pytest.mark.parametrize("run_at", ["0001-01-01 00:00:00+00", "9999-12-31 23:59:59.999999+00"])
async def test_the_first_and_the_last_time_that_python_has_may_be_when_a_job_becomes_due(database: str, run_at: str):
    query = "SELECT sidings.enqueue('ride', '{}', 't/0', run_at => $1::text::timestamptz)"
    async with connected(database, timezone="Pacific/Kiritimati") as connection:
        await connection.fetchval(query, run_at)
        assert str(await connection.fetchval("SELECT run_at FROM sidings.job")) == run_at.replace("+00", "+00:00")


@pytest.mark.parametrize("more", ["", ", unique_key => 'k'"], ids=["alone", "with a unique key"])
async def test_a_delay_of_nothing_is_no_delay(database: str, more: str):
    await value(database, f"SELECT sidings.enqueue('ride', '{{}}', 't/0', delay => '0'{more})")
    [row] = await fetch(database, "SELECT position, run_at FROM sidings.job")
    assert row["position"] is not None
    assert row["run_at"] is None


REFUSED = {
    "no type": ("'', '{}', 't/0'", "has no type", "name of its handler"),
    "no type at all": ("NULL, '{}', 't/0'", "has no type", "name of its handler"),
    "no origin": ("'ride', '{}', NULL", "'ride' needs an origin", "topic/partition"),
    "empty origin": ("'ride', '{}', ''", "'ride' needs an origin", "topic/partition"),
    "empty group": ("'ride', '{}', 't/0', ''", "group of the job 'ride' is empty", "NULL for a job that stands alone"),
    "control in group": (r"'ride', '{}', 't/0', E'a\x1fb'", "control character", "Remove it"),
    "control in origin": (r"'ride', '{}', E't\x1f/0'", "control character", "Remove it"),
    "long group": ("'ride', '{}', 't/0', repeat('ü', 501)", "longer than 1000 bytes", "shorter name"),
    "delay and run_at": ("'ride', '{}', 't/0', delay => '1 s', run_at => now()", "both delay and run_at", "one of"),
    "negative delay": ("'ride', '{}', 't/0', delay => '-1 s'", "the delay of the job 'ride' is", "366 days"),
    "long delay": ("'ride', '{}', 't/0', delay => '367 days'", "the delay of the job 'ride' is", "366 days"),
    "never due": (
        "'ride', '{}', 't/0', run_at => 'infinity'",
        "run_at: the job 'ride' would become due at infinity",
        "1 to",
    ),
    "always due": (
        "'ride', '{}', 't/0', run_at => '-infinity'",
        "run_at: the job 'ride' would",
        "from the year 1 to the",
    ),
    "due in 10000": ("'ride', '{}', 't/0', run_at => '10000-01-01 00:00Z'", "run_at: the job 'ride' would", "9999"),
    "due before 1": ("'ride', '{}', 't/0', run_at => '0001-12-31 23:59Z BC'", "run_at: the job 'ride' would", "9999"),
    "priority": ("'ride', '{}', 't/0', priority => 101", "priority of the job 'ride' is 101", "-100 to 100"),
    "headers list": ("""'ride', '{}', 't/0', headers => '["a"]'""", "not an object of texts", "jsonb_build"),
    "headers of lists": ("""'ride', '{}', 't/0', headers => '{"a": ["b"]}'""", "not an object of texts", "jsonb_build"),
    "headers of empty": ("""'ride', '{}', 't/0', headers => '{"a": []}'""", "not an object of texts", "jsonb_build"),
    "headers of null": ("""'ride', '{}', 't/0', headers => '{"a": null}'""", "not an object of texts", "jsonb_build"),
    "headers text": ("""'ride', '{}', 't/0', headers => '"a"'""", "not an object of texts", "jsonb_build"),
    "headers number": (
        """'ride', '{}', 't/0', headers => '{"a": 1}'""",
        "not an object of texts",
        "jsonb_build_object",
    ),
}


async def test_a_key_that_is_taken_is_found_without_a_walk_through_all_jobs(database: str):
    """The plan of an empty table, kept in the session, read all jobs for each key that was taken."""
    call = "SELECT sidings.enqueue('ride', '{}', 't/0', unique_key => 'k')"
    walks = "SELECT coalesce(sum(seq_scan), 0) FROM pg_stat_xact_user_tables WHERE relname = 'job'"
    async with connected(database) as connection:
        await connection.execute("VACUUM ANALYZE sidings.job")
        async with connection.transaction():
            ids = {await connection.fetchval(call) for _ in range(8)}
            assert len(ids) == 1
            assert await connection.fetchval(walks) == 0


@pytest.mark.parametrize("arguments", REFUSED)
async def test_what_cannot_be_stored_is_refused_with_a_hint(database: str, arguments: str):
    call, message, hint = REFUSED[arguments]
    async with connected(database) as connection:
        with pytest.raises(asyncpg.InvalidParameterValueError) as caught:
            await connection.execute(f"SELECT sidings.enqueue({call})")
    assert message in str(caught.value.message)
    assert hint in str(caught.value.hint)
    assert await value(database, "SELECT count(*) FROM sidings.job") == 0


async def test_the_triggers_of_the_guide_enqueue_for_every_changed_row(database: str):
    """In the home of the page's type, as Python does: they went to a topic that its service does not join."""
    home = run("enqueueing.md", "")["send_eta"].home
    seen: list[Any] = []
    registry = Registry()

    @registry.job(name="send_eta", group="transport_id", payload=dict[str, str])
    async def send_eta(job: Job[dict[str, str]]) -> None:
        seen.append((job.origin, job.group, job.payload["eta"]))

    eta = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)
    async with connected(database, timezone="UTC") as connection:
        await connection.execute("CREATE TABLE transport (id text PRIMARY KEY, note text, eta timestamptz)")
        await connection.execute("INSERT INTO transport VALUES ('a'), ('b')")
        await connection.execute("INSERT INTO sidings.topic (topic, partitions) VALUES ($1, 12)", home)
        origins = {key: await connection.fetchval("SELECT sidings.origin_for($1, $2)", key, home) for key in "ab"}
        await connection.execute(block("enqueueing.md", "From a trigger", "sql"))
        await connection.execute("UPDATE transport SET note = ''")  # no new eta, no job
        async with connection.transaction():
            await connection.execute("UPDATE transport SET eta = $1", eta)
        async with running(database, registry, origins.values()):
            await drained(database)
    assert sorted(seen) == sorted((origins[key], key, eta.isoformat()) for key in "ab")
    assert await outcomes(database) == ["succeeded"] * 2


async def test_the_statement_of_the_guide_enqueues(database: str):
    await value(database, "INSERT INTO sidings.topic (topic, partitions) VALUES ('transports', 24)")
    await value(database, block("enqueueing.md", "From SQL", "sql"))
    [row] = await fetch(database, "SELECT * FROM sidings.job")
    origin = f"transports/{partition_for(b't-1', 24)}"
    assert (row["type"], row["origin"], row["group"]) == ("send_eta", origin, "t-1")
    assert json.loads(row["payload"]) == {"transport_id": "t-1", "eta": "2030-01-02T03:04:00Z"}


@pytest.mark.parametrize("everybodys", [True, False])
async def test_with_the_rights_of_the_guide_one_may_enqueue_and_publish_in_every_way(database: str, everybodys: bool):
    """everybodys: whether functions are, as Postgres has it."""
    registry, outbox, role = Registry(), Outbox(PostgresSettings(dsn=database)), f"app_{token_hex(6)}"

    @registry.job(group="transport", home="rides")
    async def ride(job: Job[Ride]) -> None: ...

    a, origin = Ride(transport="a"), "rides/3"
    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.topic (topic, partitions, former) VALUES ('rides', 24, '{12}')")
        await connection.execute(
            f"CREATE ROLE {role}; {block('enqueueing.md', 'Rights', 'sql').replace('app;', f'{role};')}"
        )
        try:
            if not everybodys:
                await connection.execute(
                    "REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA sidings FROM PUBLIC; "
                    f"ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC; SET ROLE {role}"
                )
                with pytest.raises(asyncpg.InsufficientPrivilegeError, match="for function"):
                    await connection.fetchval("SELECT sidings.enqueue('ride', '{}', 'rides/3')")
                further = block("enqueueing.md", "Where functions are not everybody's", "sql")
                await connection.execute(
                    f"RESET ROLE; {further.replace('app;', f'{role};').replace('ROLE owner', 'ROLE CURRENT_USER')}"
                )
                await connection.execute("CREATE FUNCTION sidings.later() RETURNS void RETURN NULL")
                await connection.execute(f"SET ROLE {role}; SELECT sidings.later(); RESET ROLE")
            await connection.execute(f"SET SESSION AUTHORIZATION {role}")
            async with connection.transaction():
                for options in (
                    {},
                    {"origin": origin},
                    {"delay": 5},
                    {"unique_key": "k"},
                    {"origin": origin, "unique_key": "l"},
                ):
                    await ride.enqueue(connection, a, **options)
                await ride.enqueue_many(connection, [a, a])
                await ride.enqueue_many(connection, [a, a], origin=origin)
                await connection.fetchval("SELECT sidings.enqueue('ride', '{}', sidings.origin_for('a', 'rides'), 'a')")
                await outbox.publish(connection, "etas", key="a", value=a)
                await outbox.publish_many(connection, "etas", [("a", a)])
                await connection.fetchval("SELECT sidings.publish('etas', 'a', '{}')")
                await connection.fetchval("SELECT sidings.publish_bytes('etas', 'a', 'b')")
            for refused in (
                "DELETE FROM sidings.job",
                "SELECT payload FROM sidings.job",
                "SELECT value FROM sidings.outbox",
                "INSERT INTO sidings.job (type, origin, attempt) VALUES ('ride', 'rides/3', 2147483647)",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(refused)
        finally:
            await connection.execute(f"RESET SESSION AUTHORIZATION; DROP OWNED BY {role}; DROP ROLE {role}")
    assert await value(database, "SELECT count(*) FROM sidings.job") == 10
    assert await value(database, "SELECT count(*) FROM sidings.outbox") == 4


async def test_a_role_that_is_trusted_with_one_job_can_do_that_alone(database: str):
    role = f"app_{token_hex(6)}"
    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.topic (topic, partitions) VALUES ('positions', 12)")
        await connection.execute(
            f"CREATE ROLE {role}; {block('security.md', 'Postgres', 'sql').replace('app;', f'{role};')}"
        )
        try:
            await connection.execute(f"SET SESSION AUTHORIZATION {role}")
            id = await connection.fetchval("SELECT order_eta('t-1')")
            for refused in ("SELECT sidings.enqueue('send_eta', '{}', 'positions/1')", "SELECT id FROM sidings.job"):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(refused)
        finally:
            await connection.execute(f"RESET SESSION AUTHORIZATION; DROP OWNED BY {role}; DROP ROLE {role}")
    assert await fetch(database, 'SELECT id, type, "group" FROM sidings.job') == [(id, "send_eta", "t-1")]


async def test_what_is_known_of_a_group_can_be_erased(database: str):
    async with connected(database) as connection:
        await connection.execute("""
            INSERT INTO sidings.job_history (job_id, enqueued_at, finished_at, attempt, outcome, priority, type, origin,
                                             "group", error_message, correlation_id, payload)
            VALUES (1, now(), now(), 1, 'discarded', 0, 'ride', 'rides/0', 't-1', 'no t-1', 't-1', '{"id": "t-1"}');
            INSERT INTO sidings.audit (actor, action, target, reason, detail)
            VALUES ('me', 'clear', '{"origin": "rides/0", "group": "t-1"}', 't-1 asked', '{"of": "t-1"}');
            INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, key, error)
            VALUES (1, now(), 0, 'etas', 't-1', 'no')""")
        await connection.execute(block("security.md", "Personal data", "sql"))
        left = await connection.fetch("""
            SELECT h::text FROM sidings.job_history h UNION ALL SELECT a::text FROM sidings.audit a
            UNION ALL SELECT p::text FROM sidings.outbox_parked p""")
    assert len(left) == 2
    assert "t-1" not in str(left)


async def test_a_schema_of_another_name_has_an_enqueue_of_its_own(empty_database: str):
    await migrate(empty_database, service="test", schema="elsewhere")
    await value(empty_database, "SELECT elsewhere.enqueue('ride', '{}', 't/0')")
    assert await value(empty_database, "SELECT count(*) FROM elsewhere.job") == 1
