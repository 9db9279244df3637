"""The plans of what administration reads and changes: indexes, whatever the planner knows of the table."""

import json
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sidings.jobs.admin.calls import _WALK
from sidings.schema import load_sql

from .plan_support import filled_database, nodes
from .support import connected

ROWS = 50_000
FILL = f"""
INSERT INTO sidings.job (type, origin, "group", payload, position, run_at, held, attempt, failures)
SELECT 'x', 't/' || n % 10, CASE WHEN n % 3 > 0 THEN 'g' || n % 700 END, '{{{{}}}}',
       CASE WHEN n % 20 > 1 THEN nextval('sidings.job_position') END,
       CASE WHEN n % 20 = 1 THEN now() + n % 1000 * interval '1 minute'
            WHEN n % 500 = 7 THEN now() + interval '1 hour' END,
       CASE WHEN n % 20 = 0 THEN 'held' END, CASE WHEN n % 500 = 7 THEN 3 ELSE 1 END,
       CASE WHEN n % 500 = 7 THEN 2 ELSE 0 END
FROM generate_series(1, {ROWS}) n;
INSERT INTO sidings.executor (id, running)
SELECT gen_random_uuid(), ARRAY(SELECT id FROM sidings.job WHERE position IS NOT NULL ORDER BY id DESC LIMIT 200);
INSERT INTO sidings.origin (origin, owner, epoch, lease_until)
SELECT 't/0', id, 1, now() + interval '1 day' FROM sidings.executor;
""".replace("{{", "{").replace("}}", "}")
# A query, its arguments, the index that it walks, and how many of its rows it may read for a page of ten.
LISTS: dict[str, tuple[str, tuple[object, ...], str]] = {
    "all": ("list_ordered", ("t/3", 100, None, None, None, None, 10), "job_scan"),
    "waiting": ("list_ordered", ("t/3", 100, None, None, None, "waiting", 10), "job_scan"),
    "of an origin": ("list_ordered", ("", 0, "t/5", None, None, "waiting", 10), "job_scan"),
    "of a group": ("list_ordered", ("", 0, "t/5", "g5", None, "waiting", 10), "job_group"),
    "delayed": ("list_delayed", ("", 0, 0, None, None, None, 10), "job_due"),
    "delayed of an origin": ("list_delayed", ("", 0, 0, "t/1", None, None, 10), "job_due"),
    "held": ("list_held", ("", 0, None, None, None, 10), "job_held"),
    "held of an origin": ("list_held", ("", 0, "t/0", None, None, 10), "job_held"),
    "backing off": ("list_backing_off", (0, 0, None, None, None, "backing off", 10), "job_backoff"),
    "blocked": ("list_backing_off", (None, 0, None, None, None, "blocked", 10), "job_backoff"),
    "due later": ("list_due_later", ("", 0, None, None, None, 100, 10), "job_scan"),
    "due later of an origin": ("list_due_later", ("", 0, "t/5", None, None, 100, 10), "job_scan"),
    "due later of a group": ("list_due_later", ("", 0, "t/5", "g5", None, 100, 10), "job_group"),
    "running": ("list_running", (0, None, None, None, 10), "job_pkey"),
    "blocked groups": ("blocked_groups", (None, 10, 100), "job_backoff"),
    "orphans": ("orphans", (), "job_scan"),
    "origins": ("origins", (100,), "job_backoff"),
}


@pytest.fixture(scope="module", params=["analysed", "analysed while empty"])
def filled(
    request: pytest.FixtureRequest, sidings_postgres: str, sidings_template: Callable[[], Awaitable[str]]
) -> Iterator[str]:
    with filled_database(sidings_postgres, sidings_template, FILL, analysed=request.param == "analysed") as dsn:
        yield dsn


def reads_jobs(plan: dict[str, Any]) -> bool:
    return any(node.get("Relation Name") == "job" for node in nodes(plan))


async def explained(dsn: str, name: str, arguments: tuple[object, ...]) -> dict[str, Any]:
    """The plan of a list as `Calls.walk` runs it, with what was really read."""
    async with connected(dsn) as connection, connection.transaction(readonly=True):
        await connection.execute(_WALK)
        query = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {load_sql('sidings.jobs.admin', name)}"
        return json.loads(await connection.fetchval(query, *arguments))[0]["Plan"]


@pytest.mark.parametrize("which", LISTS)
async def test_a_list_walks_an_index_and_never_sorts_or_scans_the_table(filled: str, which: str):
    name, arguments, index = LISTS[which]
    plan = await explained(filled, name, arguments)
    used = {node.get("Index Name") for node in nodes(plan) if node.get("Actual Loops")}
    assert index in used, plan
    for node in nodes(plan):
        if not node.get("Actual Loops"):
            continue  # the parts that do not apply are not run
        assert not (node.get("Relation Name") == "job" and "Seq Scan" in node["Node Type"]), node
        assert not (node["Node Type"] == "Sort" and reads_jobs(node) and node["Actual Rows"] > 200), node


@pytest.mark.parametrize("which", ["all", "waiting", "of an origin", "of a group", "running"])
async def test_a_page_costs_what_it_shows(filled: str, which: str):
    name, arguments, _ = LISTS[which]
    plan = await explained(filled, name, arguments)
    assert plan["Actual Rows"] == 10
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 400, plan


async def test_what_is_due_later_is_looked_for_among_the_first_of_each_origin(filled: str):
    """No index has it: of 45,000 jobs in the order of ten origins a hundred of each are read."""
    name, arguments, _ = LISTS["due later"]
    plan = await explained(filled, name, arguments)
    read = [
        node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
        for node in nodes(plan)
        if node.get("Index Name") == "job_scan"
    ]
    assert 1_000 <= sum(read) <= 1_100, plan


async def test_origins_cost_what_fails_and_a_bounded_count_of_the_rest(filled: str):
    """Of 50,000 jobs 100 fail and 200 run: rows are read of these, of the rest entries of indexes."""
    plan = await explained(filled, "origins", (100,))
    assert plan["Actual Rows"] == 10
    counted = [node for node in nodes(plan) if node["Node Type"] == "Limit" and node["Actual Rows"] > 1]
    assert counted
    assert all(node["Actual Rows"] <= 150 for node in counted), counted
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 5_000, plan


@pytest.mark.parametrize(
    ("call", "most"),
    [
        ("SELECT sidings.cancel_job(30000, 'alice')", 60),
        ("SELECT sidings.retry_job_now(30001, 'alice')", 60),
        ("SELECT sidings.clear_group('t/5', 'g5', 'alice', most => 10)", 300),
        ("SELECT sidings.skip_head('t/7', 'g7', 'alice', head => 7)", 60),
    ],
    ids=["cancel", "retry now", "clear", "skip"],
)
async def test_an_action_reads_the_rows_that_it_is_about(filled: str, call: str, most: int):
    """By the statistics of the transaction: rows and index entries of the job table that it has read."""
    names = ("job", "job_pkey", "job_scan", "job_group", "job_backoff", "job_held", "job_due")
    counts = " + ".join(f"pg_stat_get_xact_tuples_returned('sidings.{name}'::regclass)" for name in names)
    async with connected(filled) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(call)
        read = await connection.fetchval(f"SELECT {counts}")
        await transaction.rollback()
    assert 0 < read <= most


async def test_what_can_be_requeued_probes_the_resets_of_each_message(filled: str):
    """Nobody deletes rows of the audit: of all the others none is read."""
    query = load_sql("sidings.jobs.admin", "requeueable_jobs")
    since, before = datetime.now(UTC) - timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1)
    async with connected(filled) as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            """INSERT INTO sidings.audit (actor, action, target)
               SELECT 'x', 'pause', '{}' FROM generate_series(1, 20000);
               INSERT INTO sidings.audit (actor, action, target, detail)
               SELECT 'x', 'reset', jsonb_build_object('origin', 't/' || n % 100), '{"from": 20, "to": 10}'
               FROM generate_series(1, 300) n;
               INSERT INTO sidings.job_history
                   (job_id, enqueued_at, finished_at, attempt, outcome, priority, type, origin, payload)
               SELECT n, now() - interval '1 hour', now(), 1, 'discarded', 0, 'message:t', 't/0',
                      json_build_object('topic', 't', 'partition', n % 100, 'offset', n % 20)
               FROM generate_series(1, 2000) n"""
        )
        arguments = (["discarded"], since, before, None, None, 10, False, "x", False)
        rows = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {query}", *arguments)
        assert len(await connection.fetch(query, *arguments)) == 10
        await transaction.rollback()
    reading = [node for node in nodes(json.loads(rows)[0]["Plan"]) if node.get("Relation Name") == "audit"]
    assert any(node["Actual Loops"] == 2000 for node in reading)
    for node in reading:
        read = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
        assert read * node["Actual Loops"] <= 10_000, node


@pytest.mark.parametrize("plan", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize("name", ["ended_jobs", "requeueable_jobs"])
async def test_what_has_ended_is_looked_for_in_no_day_before(database: str, name: str, plan: str):
    """Also where no times are given; what is yet to come is looked into, for a clock that was ahead."""
    async with connected(database) as connection:
        today = await connection.fetchval("SELECT (now() AT TIME ZONE 'UTC')::date")
        for days in (-9, -3, 5):
            await connection.execute("SELECT sidings.make_history_day($1)", today + timedelta(days=days))
        await connection.execute(f"SET plan_cache_mode = {plan}")
        await connection.execute(f"PREPARE ended AS {load_sql('sidings.jobs.admin', name)}")
        rest = ", false, 'x', false" if name == "requeueable_jobs" else ""
        query = f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE ended ('{{discarded}}', NULL, NULL, NULL, NULL, 10{rest})"
        found = json.loads(await connection.fetchval(query))[0]["Plan"]
    looked_into = {
        name
        for node in nodes(found)
        if node.get("Actual Loops") and (name := node.get("Relation Name", "")).startswith("job_history_2")
    }
    assert f"job_history_{today + timedelta(days=5):%Y%m%d}" in looked_into
    for days in (-9, -3):
        assert f"job_history_{today + timedelta(days=days):%Y%m%d}" not in looked_into


async def test_the_states_of_all_jobs_are_counted_in_parallel(filled: str) -> None:
    async with connected(filled) as connection:
        for setting in ("parallel_setup_cost", "parallel_tuple_cost", "min_parallel_table_scan_size"):
            await connection.execute(f"SET {setting} = 0")
        query = "EXPLAIN (FORMAT JSON) SELECT state, type, count(*) FROM sidings.job_overview GROUP BY 1, 2"
        plan = json.loads(await connection.fetchval(query))[0]["Plan"]
    assert any(node["Node Type"].startswith("Gather") for node in nodes(plan))
