"""The plans of the hot queries, with the settings of the executor's connections: what their comments promise.

Generic plans, which is what those connections use, and custom ones; on a table of 50,000 rows that has been analysed,
and on one that was analysed while it was empty, as after a deployment.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from prometheus_client import CollectorRegistry
from sidings.executor import PostgresSettings, connect
from sidings.executor.cycles import CycleLoop
from sidings.executor.flights import Batch
from sidings.executor.metrics import ExecutorMetrics
from sidings.executor.queues import Entry
from sidings.executor.reader import Reader
from sidings.executor.scheduler import Scheduler
from sidings.jobs import SUCCEEDED, Again, ErrorInfo, Hold, OutcomeName, Registry
from sidings.schema import int_array, load_sql, migrations

from .plan_support import filled_database, nodes
from .support import connected

ROWS = 50_000
ORIGINS = [f"t/{number}" for number in range(10)]
FILL = f"""
INSERT INTO sidings.job (type, origin, "group", payload, position, run_at, held)
SELECT 'x', 't/' || n % 10, CASE WHEN n % 3 > 0 THEN 'g' || n % 700 END, '{{"transport": "a"}}',
       CASE WHEN n % 20 > 1 THEN nextval('sidings.job_position') END,
       CASE WHEN n % 20 = 1 THEN now() + n % 1000 * interval '1 minute' END,
       CASE WHEN n % 20 = 0 THEN 'why' END
FROM generate_series(1, {ROWS}) n;
INSERT INTO sidings.origin (origin, owner, lease_until)
SELECT 't/' || n, gen_random_uuid(), now() FROM generate_series(0, 299) n;
INSERT INTO sidings.executor (id) SELECT gen_random_uuid() FROM generate_series(1, 50)
"""


BY_ORIGIN = {"origin_pkey", "origin_epoch_is_a_key", "origin_owner"}


@pytest.fixture(scope="module", params=["analysed", "analysed while empty"])
def filled(
    request: pytest.FixtureRequest, sidings_postgres: str, sidings_template: Callable[[], Awaitable[str]]
) -> Iterator[str]:
    with filled_database(sidings_postgres, sidings_template, FILL, analysed=request.param == "analysed") as dsn:
        yield dsn


@asynccontextmanager
async def as_the_executor(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection as the executor's own loops have it."""
    connection = await connect(PostgresSettings(dsn=dsn))
    try:
        yield connection
    finally:
        connection.terminate()


class Plans:
    """The generic and the custom plan of one query, and what can be said of both."""

    def __init__(self, plans: dict[str, dict[str, Any]], pooled: dict[str, Any]) -> None:
        self.plans = plans
        self.pooled = pooled

    @classmethod
    async def of(cls, dsn: str, package: str, name: str, *arguments: object) -> "Plans":
        query = load_sql(package, name)
        nulls = ", ".join(["NULL"] * len(arguments))
        async with as_the_executor(dsn) as connection, connected(dsn) as pooled:
            await connection.execute(f"PREPARE generic AS {query}")
            generic = await connection.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE generic ({nulls})")
            await connection.execute("SET plan_cache_mode = force_custom_plan")
            custom = await connection.fetchval(f"EXPLAIN (FORMAT JSON) {query}", *arguments)
            # Through PgBouncer there are no settings of ours, and every statement is planned anew.
            bare = await pooled.fetchval(f"EXPLAIN (FORMAT JSON) {query}", *arguments)
        texts = {"generic": generic, "custom": custom}
        return cls({kind: json.loads(text)[0]["Plan"] for kind, text in texts.items()}, json.loads(bare)[0]["Plan"])

    def indexes(self) -> dict[str, set[str]]:
        """The indexes that each plan uses."""
        return {
            kind: {node["Index Name"] for node in nodes(plan) if "Index Name" in node}
            for kind, plan in self.plans.items()
        }

    def must_use(self, *indexes: str) -> None:
        for kind, used in self.indexes().items():
            assert used == set(indexes), f"the {kind} plan uses {used}:\n{self}"

    def must_not_repeat_a_list(self) -> None:
        """A generic plan takes every array for a short one, and may go through a list once for each of its elements."""
        for kind, plan in self.plans.items():
            for node in nodes(plan):
                loops = node["Node Type"] == "Nested Loop"
                inner = [plan for plan in node["Plans"] if plan["Parent Relationship"] == "Inner"] if loops else []
                for part in (part for plan in inner for part in nodes(plan)):
                    assert part["Node Type"] not in ("CTE Scan", "Function Scan"), f"the {kind} plan:\n{self}"

    def must_not_ask_a_list_for_each_row(self) -> None:
        for kind, plan in self.plans.items():
            for asked in (node for node in nodes(plan) if node.get("Parent Relationship") == "SubPlan"):
                assert not any(part["Node Type"] == "CTE Scan" for part in nodes(asked)), f"the {kind} plan:\n{self}"

    def must_not_scan_a_table(self) -> None:
        for kind, plan in self.plans.items():
            for node in nodes(plan):
                scanned = node["Relation Name"] if node["Node Type"] == "Seq Scan" else None
                assert scanned in (None, "pause", "job_position"), f"the {kind} plan scans {scanned}:\n{self}"
        for node in nodes(self.pooled):  # scanning the small tables would do no harm there
            assert node["Node Type"] != "Seq Scan" or node["Relation Name"] != "job", (
                f"PgBouncer's plan scans job: {node}"
            )

    def must_not_sort_jobs(self, *, within_a_limit: bool = False) -> None:
        """No sort above a scan of `job`, except (`within_a_limit`) one of what a LIMIT has let through."""
        for kind, plan in self.plans.items():
            for sort in nodes(plan):
                if "Sort" in sort["Node Type"]:
                    assert not _reads_jobs(sort, within_a_limit), f"the {kind} plan sorts jobs:\n{self}"

    def must_probe_by(self, index: str, *columns: str) -> None:
        """Every scan of `index` finds its place by all these columns, not by filtering what it has read."""
        for kind, plan in self.plans.items():
            scans = [node for node in nodes(plan) if node.get("Index Name") == index]
            assert scans, f"the {kind} plan does not use {index}:\n{self}"
            for scan in scans:
                condition = scan.get("Index Cond", "")
                missing = [column for column in columns if column not in condition]
                assert not missing, f"the {kind} plan scans {index} without {missing}: {condition}\n{self}"

    def __str__(self) -> str:
        lines: list[str] = []
        for kind, plan in self.plans.items():
            lines.append(f"{kind}:")
            self._draw(plan, 1, lines)
        return "\n".join(lines)

    def _draw(self, plan: dict[str, Any], depth: int, lines: list[str]) -> None:
        what = [plan.get(key, "") for key in ("Subplan Name", "Node Type", "Relation Name", "Index Name")]
        what += [f"{key}: {plan[key]}" for key in ("Index Cond", "Filter", "Sort Key") if key in plan]
        lines.append("  " * depth + " ".join(filter(None, what)))
        for child in plan.get("Plans", ()):
            self._draw(child, depth + 1, lines)


def _reads_jobs(plan: dict[str, Any], within_a_limit: bool) -> bool:
    if within_a_limit and plan["Node Type"] == "Limit":
        return False
    if plan.get("Relation Name") == "job" and "Scan" in plan["Node Type"]:
        return True
    return any(_reads_jobs(child, within_a_limit) for child in plan.get("Plans", ()))


def nothing(*_: object) -> None: ...


def a_reader(scheduler: Scheduler) -> Reader:
    return Reader(
        None,  # type: ignore[arg-type]
        scheduler,
        ExecutorMetrics("test", CollectorRegistry()),
        schema="sidings",
        poll_seconds=1,
        silent=list,
        on_rows=nothing,
        on_restarted=nothing,
        on_replaced=nothing,
        on_fence=lambda fence: True,
    )


def a_scheduler(*, left_out: bool) -> Scheduler:
    scheduler = Scheduler(lambda kind: True, keep=4)
    for number, name in enumerate(ORIGINS):
        queue = scheduler.add_origin(name, 1)
        queue.high = 3_000 * number
        for position in range(1, 9):
            scheduler.insert(Entry(10 * number + position, queue, "x", "g1", position), 0)
        lane = queue.lanes["g1"]
        scheduler.hungry[lane] = None
        if left_out:
            scheduler.heavy[lane] = None
    return scheduler


@pytest.mark.parametrize("left_out", [False, True], ids=["all groups", "some left out"])
async def test_the_read_walks_indexes_and_sorts_nothing(filled: str, left_out: bool):
    reader = a_reader(a_scheduler(left_out=left_out))
    plan = reader._planner.plan(0.0)
    assert len(plan.lanes) == len(ORIGINS)
    assert bool(plan.left_out) == left_out
    reader._marks.delivered("700:750:700,720", 760, 5)
    plans = await Plans.of(filled, "sidings.executor", "read", *reader._arguments(plan))
    for used in plans.indexes().values():
        assert {"job_scan", "job_group"} <= used <= {"job_scan", "job_group", "executor_newest", "pause_target"}, str(
            plans
        )
    plans.must_not_scan_a_table()
    plans.must_not_sort_jobs()
    plans.must_probe_by("job_scan", "origin", "position")
    plans.must_probe_by("job_group", "origin", "group", "position")


async def test_the_cycle_finds_rows_by_primary_key_only(filled: str):
    registry = Registry()
    scheduler = Scheduler(lambda kind: True)
    queue = scheduler.add_origin("t/0", 1)
    cycle = CycleLoop(
        [None],  # type: ignore[list-item]
        scheduler,
        SimpleNamespace(changed=None),  # type: ignore[arg-type]
        registry,
        ExecutorMetrics("test", CollectorRegistry()),
        schema="sidings",
        poison_after=5,
        on_fenced=nothing,
        on_replaced=nothing,
        on_read=nothing,
        on_forgotten=nothing,
        on_delayed=nothing,
        on_hungry=nothing,
    )
    cycle.begin(uuid4())
    error = ErrorInfo.of(ValueError("x"))
    outcomes = [SUCCEEDED, Again(OutcomeName.RETRIED, 5.0, error), Hold("why", error)]
    entries = [Entry(number, queue, "x", f"g{number}", number) for number in range(1, 301)]
    batch = Batch([(entry, outcomes[entry.id % 3], 0.0, 1.0) for entry in entries], [])
    plans = await Plans.of(filled, "sidings.executor", "cycle", *cycle._arguments(batch, 1, 2.0))
    plans.must_use("job_pkey")
    plans.must_not_scan_a_table()
    plans.must_not_sort_jobs()
    plans.must_probe_by("job_pkey", "id")


async def test_a_cycle_brings_what_it_names_early_by_its_key_and_asks_for_its_group(filled: str):
    arguments = (uuid4(), 1, 0, int_array([1, 2, 3]), None, int_array([1, 2, 3]))
    plans = await Plans.of(filled, "sidings.executor", "name_and_read", *arguments)
    for used in plans.indexes().values():
        assert {"job_pkey", "job_group"} <= used <= {"job_pkey", "job_group", "pause_target"}, str(plans)
    plans.must_not_scan_a_table()
    plans.must_not_sort_jobs()
    plans.must_probe_by("job_pkey", "id")
    plans.must_probe_by("job_group", "origin", "group", "position")


async def test_what_persons_have_done_is_found_by_the_fence(filled: str):
    async with connected(filled) as connection:
        noted = "'{}', e.id, e.fence + n FROM sidings.executor e, generate_series(1, 3000) n"
        await connection.execute(
            "INSERT INTO sidings.executor (id) SELECT gen_random_uuid() FROM generate_series(1, 3); "
            f"INSERT INTO sidings.audit (actor, action, target, executor, fence) SELECT 'x', 'cancel', {noted}; "
            "ANALYZE sidings.audit"
        )
        executor = await connection.fetchval("SELECT id FROM sidings.executor LIMIT 1")
    plans = await Plans.of(filled, "sidings.executor", "standing", executor, 2_998, 5_000)
    plans.must_probe_by("audit_fence", "executor", "fence")


async def test_superseded_jobs_are_found_in_their_groups(filled: str):
    lanes = (["t/1", "t/2"], [1, 1], ["g1", "g2"], ["x", "x"])
    plans = await Plans.of(filled, "sidings.executor", "supersede", uuid4(), *lanes, [], 1_000)
    for used in plans.indexes().values():
        assert {"job_group", "job_pkey"} <= used <= {"job_group", "job_pkey", *BY_ORIGIN}, str(plans)
    plans.must_not_scan_a_table()
    plans.must_not_sort_jobs()
    plans.must_probe_by("job_group", "origin", "group")
    plans.must_probe_by("job_pkey", "id")
    plans.must_not_ask_a_list_for_each_row()


async def test_promotion_walks_the_due_jobs_in_their_order(filled: str):
    arguments = (uuid4(), ORIGINS, [1] * len(ORIGINS), 1_000, [], None, None)
    plans = await Plans.of(filled, "sidings.executor", "promote", *arguments)
    for used in plans.indexes().values():
        assert {"job_due", "job_pkey"} <= used <= {"job_due", "job_pkey", "job_group", *BY_ORIGIN}, str(plans)
    plans.must_not_scan_a_table()
    plans.must_not_sort_jobs(within_a_limit=True)
    plans.must_probe_by("job_due", "origin", "run_at")
    plans.must_probe_by("job_pkey", "id")
    for plan in plans.plans.values():
        conditions = [node.get("Index Cond", "") for node in nodes(plan) if node.get("Index Name") == "job_due"]
        assert sum("(ROW(run_at, id) >= ROW(" in condition for condition in conditions) == 2, str(plans)


@pytest.mark.parametrize("what", ["7, NULL", "NULL, 'k'"], ids=["by its id", "by its key"])
async def test_a_job_that_is_withdrawn_is_found_without_a_walk_through_all_jobs(database: str, what: str):
    """In the application's own sessions: one that had begun while the table was empty kept the plan of then."""
    query = load_sql("sidings.jobs", "withdraw_job").rstrip().removesuffix(";")
    async with connected(database) as earlier, connected(database) as later:
        await later.execute("ALTER TABLE sidings.job SET (autovacuum_enabled = false)")
        await later.execute("VACUUM ANALYZE sidings.job")
        for session, fill in ((earlier, FILL), (later, "SELECT")):
            await session.execute(f"PREPARE withdraw (text, bigint, text, boolean) AS {query}")
            for _ in range(8):  # from the sixth on the plan may be one for all arguments, which is kept
                await session.execute(f"EXECUTE withdraw ('x', {what}, true)")
            await later.execute(fill)
        for session in (earlier, later):
            explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE withdraw ('x', {what}, true)"
            text = await session.fetchval(explain)
            plan = json.loads(text)[0]["Plan"]
            assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 50, text


async def test_a_tick_of_a_periodic_job_looks_at_its_own_group_only(filled: str):
    at = datetime(2026, 5, 1, tzinfo=UTC)
    service = ("g1", "every 30 s", at, at, at, None, True, ["{}"])
    of_origins = (ORIGINS, [1] * len(ORIGINS), [at] * len(ORIGINS), [at] * len(ORIGINS), [at] * len(ORIGINS))
    origins = (uuid4(), "g1", "every 30 s", *of_origins, True, ORIGINS, ["{}"] * len(ORIGINS))
    for name, arguments in (("fire_service", service), ("fire_origins", origins)):
        plans = await Plans.of(filled, "sidings.executor", name, *arguments)
        for used in plans.indexes().values():
            assert used <= {"job_group", "periodic_pkey", "executor_pkey", "pause_target", *BY_ORIGIN}, str(plans)
        plans.must_not_scan_a_table()
        plans.must_not_sort_jobs()
    plans.must_probe_by("job_group", "origin", "group")  # of the service's a function asks, which brings its settings


@pytest.mark.parametrize(
    ("name", "more"),
    [("renew", (int_array([1] * len(ORIGINS)), timedelta(seconds=15))), ("release", ([1] * len(ORIGINS),))],
    ids=["renew", "release"],
)
async def test_leases_are_renewed_and_released_by_key(filled: str, name: str, more: tuple[object, ...]):
    plans = await Plans.of(filled, "sidings.executor", name, uuid4(), ORIGINS, *more)
    for used in plans.indexes().values():
        assert used <= BY_ORIGIN
    plans.must_not_scan_a_table()
    plans.must_not_repeat_a_list()


async def test_a_page_of_the_audit_walks_an_index(filled: str):
    plans = await Plans.of(filled, "sidings.executor", "audit", "t/3", 5_000, 1_000, 9_000)
    plans.must_use("job_scan")
    plans.must_not_scan_a_table()
    plans.must_not_sort_jobs()
    plans.must_probe_by("job_scan", "origin", "position")


async def test_the_ages_of_what_waits_cost_a_probe_per_origin(filled: str):
    plans = await Plans.of(filled, "sidings.executor", "ages", ORIGINS, [0] * len(ORIGINS))
    plans.must_use("job_scan")
    plans.must_not_scan_a_table()
    plans.must_not_sort_jobs()
    plans.must_probe_by("job_scan", "origin", "position")


async def test_what_waits_for_a_person_is_counted_by_its_indexes(filled: str):
    plans = await Plans.of(filled, "sidings.executor", "for_persons", ORIGINS)
    plans.must_use("job_held", "job_blocked")
    plans.must_not_scan_a_table()
    plans.must_not_sort_jobs()
    plans.must_probe_by("job_held", "origin")
    plans.must_probe_by("job_blocked", "origin")


async def test_an_instance_counts_what_is_blocked_in_its_own_origins(database: str):
    """Each went over all that is blocked in the service, every five seconds."""
    async with connected(database) as connection, as_the_executor(database) as executor:
        await connection.execute(
            """INSERT INTO sidings.job (type, origin, run_at, attempt, failures)
               SELECT 'x', CASE n WHEN 1 THEN 't/1' ELSE 'other/0' END, 'infinity', 2, 1
               FROM generate_series(1, 10000) n"""
        )
        query = load_sql("sidings.executor", "for_persons")
        row = await executor.fetchrow(query, ["t/1"])
        assert row is not None
        assert (row["held"], row["blocked"]) == (0, 1)
        text = await executor.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}", ["t/1"])
    plan = json.loads(text)[0]["Plan"]
    assert all(node.get("Rows Removed by Filter", 0) == 0 for node in nodes(plan)), text
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 20, text


async def test_orphans_are_looked_for_by_a_probe_per_gap(filled: str):
    plans = await Plans.of(filled, "sidings.executor", "orphans", 60.0)
    assert all({"job_scan", "job_due", "job_held"} <= set(used) for used in plans.indexes().values())
    plans.must_not_scan_a_table()
    plans.must_not_sort_jobs(within_a_limit=True)
    plans.must_probe_by("job_scan", "origin")
    plans.must_probe_by("job_held", "origin")


async def test_locked_rows_are_looked_for_by_primary_key(filled: str):
    plans = await Plans.of(filled, "sidings.executor", "locked", list(range(100)))
    plans.must_use("job_pkey")
    plans.must_not_scan_a_table()


@pytest.mark.parametrize(
    ("setting", "query", "arguments"), [("enable_nestloop", "cycle", 13), ("enable_indexscan", "locked", 1)]
)
async def test_a_role_without_the_plans_that_these_statements_take_has_them_for_these(
    filled: str, setting: str, query: str, arguments: int
):
    """As where somebody has switched nested loops off for the analyses of a database: each cycle read all jobs."""
    name = filled.rpartition("/")[2]
    async with connected(filled) as connection:
        await connection.execute(f'ALTER DATABASE "{name}" SET {setting} = off')
        try:
            async with as_the_executor(filled) as own:
                await own.execute(f"PREPARE generic AS {load_sql('sidings.executor', query)}")
                text = await own.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE generic ({', '.join(['NULL'] * arguments)})")
        finally:
            await connection.execute(f'ALTER DATABASE "{name}" RESET {setting}')
    of_jobs = [node for node in nodes(json.loads(text)[0]["Plan"]) if node.get("Relation Name") == "job"]
    scans = [node for node in of_jobs if node["Node Type"].endswith("Scan")]
    assert scans
    for node in scans:
        assert node["Node Type"] in ("Index Scan", "Index Only Scan"), text
        assert "(id = " in node.get("Index Cond", ""), text


async def test_an_insert_looks_at_nothing(filled: str):
    one = ("x", "t/0", "g", 0, None, None, None, "{}", 0)
    many = ("x", "t/0", "\x1f".join("g" * 9), 0, None, None, None, "\x1f".join(["{}"] * 9), 0, 9)
    for name, arguments in (("insert_job", one), ("insert_jobs", many), ("insert_jobs_with_headers", many)):
        plans = await Plans.of(filled, "sidings.jobs", name, *arguments)
        plans.must_use()
        plans.must_not_scan_a_table()


async def test_a_read_touches_neither_dead_entries_nor_stuck_rows_behind_its_marks(database: str):
    """So its cost does not grow with a long transaction, which keeps VACUUM away, or with a group that is stuck."""
    async with connected(database) as connection, connected(database) as long, long.transaction():
        await connection.execute("ALTER TABLE sidings.job SET (autovacuum_enabled = false)")
        await long.execute("SELECT pg_current_xact_id()")
        await connection.execute(FILL)
        await connection.execute("DELETE FROM sidings.job WHERE id % 5 > 0")
        high = await connection.fetchval("SELECT max(position) FROM sidings.job")
        scheduler = Scheduler(lambda kind: True)
        for name in ORIGINS:
            scheduler.add_origin(name, 1).high = high
        reader = a_reader(scheduler)
        snapshot = await connection.fetchval("SELECT pg_current_snapshot()::text")
        reader._marks.delivered(snapshot, int(snapshot.split(":")[1]), high)
        arguments = reader._arguments(reader._planner.plan(0.0))
        async with as_the_executor(database) as executor:
            query = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {load_sql('sidings.executor', 'read')}"
            for _ in range(2):  # the first fills the caches of this connection
                plan = json.loads(await executor.fetchval(query, *arguments))[0]["Plan"]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= 5 * len(ORIGINS)


async def test_promotion_reads_what_is_due_and_not_what_is_due_later(database: str):
    me = uuid4()
    async with connected(database) as connection:
        await connection.execute("ALTER TABLE sidings.job SET (autovacuum_enabled = false)")
        await connection.execute("VACUUM ANALYZE sidings.job")
        await connection.execute(
            f"""INSERT INTO sidings.job (type, origin, position, run_at)
                SELECT 'x', 't/' || n % 3, NULL, now() + (n - 5) * interval '1 minute'
                FROM generate_series(1, {ROWS}) n;
                INSERT INTO sidings.origin (origin, owner, epoch)
                SELECT 't/' || n, '{me}', 1 FROM generate_series(0, 2) n"""
        )
    async with as_the_executor(database) as connection:
        query = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {load_sql('sidings.executor', 'promote')}"
        text = await connection.fetchval(query, me, ["t/0", "t/1", "t/2"], [1, 1, 1], 1_000, [], None, None)
        plan = json.loads(text)[0]["Plan"]
        assert await connection.fetchval("SELECT count(*) FROM sidings.job WHERE position IS NOT NULL") == 5
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 200


async def test_promotion_steps_over_nothing_that_was_due_at_the_same_moment_and_has_been_promoted(database: str):
    """While somebody's transaction keeps vacuum from removing it: with millions that were due at once it took hours."""
    me, moment = uuid4(), datetime(2026, 1, 1, tzinfo=UTC)
    async with connected(database) as connection, connected(database) as long:
        await connection.execute("ALTER TABLE sidings.job SET (autovacuum_enabled = false)")
        await connection.execute("VACUUM ANALYZE sidings.job")
        await connection.execute(
            f"""INSERT INTO sidings.job (type, origin, position, run_at)
                SELECT 'x', 't/0', NULL, '{moment}' FROM generate_series(1, {ROWS});
                INSERT INTO sidings.origin (origin, owner, epoch) VALUES ('t/0', '{me}', 1)"""
        )
        async with long.transaction(isolation="repeatable_read"), as_the_executor(database) as executor:
            await long.fetch("SELECT")
            query = load_sql("sidings.executor", "promote")
            begin = await executor.fetchrow(query, me, ["t/0"], [1], ROWS - 10, [], None, None)
            assert begin is not None
            arguments = (me, ["t/0"], [1], 5, [], begin["looked_at"], begin["looked_at_id"])
            text = await executor.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}", *arguments)
        plan = json.loads(text)[0]["Plan"]
        assert await connection.fetchval("SELECT count(*) FROM sidings.job WHERE position IS NULL") == 5
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 200


async def test_what_has_followed_a_debounced_job_is_found_before_all_that_has_ended_in_its_group(database: str):
    """While somebody's transaction keeps vacuum from removing it. Each job that was due looked through all of it."""
    me, due = uuid4(), datetime(2026, 1, 2, tzinfo=UTC)
    async with connected(database) as connection, connected(database) as long:
        await connection.execute("ALTER TABLE sidings.job SET (autovacuum_enabled = false)")
        await connection.execute("VACUUM ANALYZE sidings.job")
        await connection.execute(f"INSERT INTO sidings.origin (origin, owner, epoch) VALUES ('t/0', '{me}', 1)")
        insert = """INSERT INTO sidings.job (type, origin, "group", policy, position, run_at)
                    SELECT 'x', 't/0', 'g', 1, NULL, $2 FROM generate_series(1, $1)"""
        await connection.execute(insert, ROWS, datetime(2026, 1, 1, tzinfo=UTC))
        async with long.transaction(isolation="repeatable_read"), as_the_executor(database) as executor:
            await long.fetch("SELECT")
            await connection.execute("DELETE FROM sidings.job")
            await connection.execute(insert, 10, due)
            query = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {load_sql('sidings.executor', 'promote')}"
            text = await executor.fetchval(query, me, ["t/0"], [1], 1_000, [], due, None)
            plan = json.loads(text)[0]["Plan"]
        assert await connection.fetchval("SELECT count(*) FROM sidings.job WHERE position IS NOT NULL") == 1
        assert await connection.fetchval("SELECT count(*) FROM sidings.job_history WHERE outcome = 'superseded'") == 9
    # The last one goes over all of it, once; ten times it was 6,000.
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 2_000


def test_every_index_of_the_job_table_has_its_reason_above_it():
    count = 0
    for migration in migrations():
        lines = migration.sql.splitlines()
        for above, line in pairwise(lines):
            if re.match(r"CREATE (UNIQUE )?INDEX \w+ ON sidings\.job ", line):
                count += 1
                assert above.startswith(("--", "CREATE INDEX")), line
    assert count >= 4


async def test_an_ordinary_job_costs_three_index_entries(database: str):
    """A bare INSERT: the primary key, `job_scan`, and with a group `job_group`."""
    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.job (type, origin, \"group\") VALUES ('x', 't/0', 'g')")
        await connection.execute("VACUUM ANALYZE sidings.job")

        async def entries(index: str) -> float:
            return await connection.fetchval("SELECT reltuples FROM pg_class WHERE relname = $1", index)

        names = ("job_pkey", "job_scan", "job_group", "job_due", "job_held", "job_backoff", "job_blocked")
        assert [await entries(name) for name in names] == [1, 1, 1, 0, 0, 0, 0]


async def test_heartbeats_do_not_touch_an_index(database: str):
    """Renewals and cycles are HOT updates, or their tables would bloat at hundreds of writes a second."""
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.origin (origin, owner) VALUES ('t/0', gen_random_uuid());"
            "INSERT INTO sidings.executor (id) VALUES (gen_random_uuid())"
        )
        for _ in range(200):
            await connection.execute("UPDATE sidings.origin SET lease_until = now()")
            await connection.execute("UPDATE sidings.executor SET cycle = cycle + 1, running = ARRAY[1, 2, 3]")
        await connection.execute("SELECT pg_stat_force_next_flush()")

        async def counts(table: str) -> asyncpg.Record | None:
            query = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = $1"
            return await connection.fetchrow(query, table)

        for table in ("origin", "executor"):
            row = await counts(table)
            while row is None or row["n_tup_upd"] < 200:
                await asyncio.sleep(0.01)
                row = await counts(table)
            assert row["n_tup_hot_upd"] == row["n_tup_upd"], table


async def test_counting_what_waits_for_a_consumer_goes_along_the_index_up_to_the_limit(filled):
    plans = await Plans.of(filled, "sidings.kafka", "waiting_jobs", ORIGINS, [0] * 10, [100] * 10)
    plans.must_use("job_scan")
    plans.must_probe_by("job_scan", "origin", "position")
    plans.must_not_sort_jobs(within_a_limit=True)


async def test_what_is_written_all_the_time_is_found_without_stepping_over_all_former_versions(database: str):
    """While somebody's transaction keeps vacuum from removing them: all slowed down without end."""
    me = uuid4()
    read = load_sql("sidings.executor", "read")
    fence = re.search(r"SELECT e\.fence FROM sidings\.executor e\s.*?LIMIT 1", read, re.DOTALL)
    assert fence is not None
    arrays = "ARRAY['t'], ARRAY[3], ARRAY[{0} - 1]::bigint[], ARRAY[{0}]::bigint[], ARRAY[1]::bigint[], ARRAY[0]"
    cycle = f"SELECT sidings.begin_cycle('{me}', {{0}}, 0, '{{{{}}}}', NULL)"
    batch = f"SELECT sidings.advance_offsets({arrays})"
    takeover = f"SELECT sidings.acquire(gen_random_uuid(), ARRAY{ORIGINS}, 1, interval '1 second', true)"
    async with connected(database) as long, as_the_executor(database) as executor:
        for table in ("executor", "consumer_offset"):  # which voids what a connection knows of it
            await executor.execute(f"ALTER TABLE sidings.{table} SET (autovacuum_enabled = false)")
        await executor.execute("INSERT INTO sidings.executor (id) VALUES ($1)", me)
        await executor.execute("INSERT INTO sidings.executor (id) SELECT gen_random_uuid() FROM generate_series(1, 5)")
        await executor.execute(
            """INSERT INTO sidings.consumer_offset (topic, partition, next_offset, resets)
               SELECT 't', n, 0, 1 FROM generate_series(0, 5) n"""
        )
        await executor.execute(
            """INSERT INTO sidings.origin (origin, owner, epoch, lease_until)
               SELECT origin, $1, 1, CASE origin WHEN 'u/0' THEN 'infinity' ELSE '2026-01-01'::timestamptz END
               FROM unnest($2::text[]) origin""",
            *(me, [*ORIGINS, "u/0"]),
        )
        await executor.execute(
            """INSERT INTO sidings.job (type, origin, position, run_at)
               SELECT 'x', 't/' || n % 10, NULL, '2100-01-01' FROM generate_series(1, 17) n"""
        )
        retry = "SELECT sidings.retry_job_now({0}, 'alice')"
        retries = "SELECT sidings.act_on_jobs('retry now', ARRAY(SELECT generate_series({0} + 1, {0} + 6)), 'alice')"
        pause = "SELECT sidings.pause_jobs('alice', 'why', type => 'x{0}')"
        for query in (retry, retries, pause):  # fills the caches of this connection
            await executor.execute(query.format(11))
        await executor.execute("UPDATE sidings.executor SET fence = 0")
        async with long.transaction(isolation="repeatable_read"):
            await long.fetch("SELECT")
            loop = "DO $$ BEGIN FOR n IN 1..10000 LOOP {}; {}; COMMIT; END LOOP; END $$"
            await executor.execute(loop.format(*(q.format("n").replace("SELECT", "PERFORM") for q in (cycle, batch))))
            look = fence[0].replace("$15", f"'{me}'")
            resets = load_sql("sidings.kafka", "load_resets").replace("$1", "'{t,t}'").replace("$2", "'{2,3}'")
            running = re.sub(r"\$[2-4]", "NULL", load_sql("sidings.jobs.admin", "list_running"))
            running = running.replace("$1", "0").replace("$5", "10")
            # They were 120 and more; in a takeover 120 twice for each origin, in an action on jobs three times.
            for query, most in (
                (cycle.format(10_001), 60),
                (batch.format(10_001), 60),
                (look, 60),
                (resets, 60),
                ("SELECT state FROM sidings.job_overview WHERE id = 1", 60),
                (running, 60),
                (load_sql("sidings.jobs.admin", "executors"), 60),
                (retry.format(1), 100),
                (retries.format(1), 500),
                (pause.format(1), 100),
                (takeover, 1_500),
            ):
                text = await executor.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {query}")
                plan = json.loads(text)[0]["Plan"]
                assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < most, query
        assert await executor.fetchval("SELECT cycle FROM sidings.executor WHERE id = $1", me) == 10_001
        # Of the pause of a type those were told, too, that hold nothing; and each of them once.
        others = "SELECT array_agg(fence) FROM sidings.executor WHERE id <> $1"
        assert await executor.fetchval(others, me) == [1] * 5
        assert await executor.fetchval("SELECT max(next_offset) FROM sidings.consumer_offset") == 10_001


async def test_a_relays_heartbeat_steps_over_no_former_heartbeats_of_others(database: str):
    """While somebody's transaction keeps vacuum from removing them: with 200 relays it took 100 ms after an hour."""
    relays = [uuid4() for _ in range(20)]
    beats = """DO $$ DECLARE
                   relays constant uuid[] := ARRAY(SELECT id FROM sidings.outbox_relay);
                   begun constant timestamptz := clock_timestamp() - interval '7 minutes';
               BEGIN
                   FOR n IN 1..500 LOOP
                       FOR m IN 1..20 LOOP
                           UPDATE sidings.outbox_relay SET alive_until = begun + n * interval '1 second'
                           WHERE id = relays[m];
                           COMMIT;
                       END LOOP;
                   END LOOP;
               END $$"""
    attend = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {load_sql('sidings.kafka.outbox', 'attend')}"
    async with connected(database) as long, as_the_executor(database) as relay:
        insert = "INSERT INTO sidings.outbox_relay (id, alive_until) SELECT id, now() FROM unnest($1::uuid[]) id"
        await relay.execute(insert, relays)
        async with long.transaction(isolation="repeatable_read"):
            await long.fetch("SELECT")
            await relay.execute(beats)
            plan = json.loads(await relay.fetchval(attend, relays[0], 5.0, "host", 1, [], False))[0]["Plan"]
            assert await relay.fetchval("SELECT count(*) FROM sidings.outbox_relay WHERE alive_until > now()") == 20
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 150


async def test_most_heartbeats_of_a_relay_touch_no_index(database: str):
    """Else its own row is looked for among all its former versions, too."""
    async with connected(database) as connection:
        insert = "INSERT INTO sidings.outbox_relay (id, alive_until) VALUES (gen_random_uuid(), '2026-01-01Z')"
        await connection.execute(insert)
        for _ in range(300):
            await connection.execute("UPDATE sidings.outbox_relay SET alive_until = alive_until + interval '1 second'")
        await connection.execute("SELECT pg_stat_force_next_flush()")
        query = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'outbox_relay'"
        row = await connection.fetchrow(query)
        while row is None or row["n_tup_upd"] < 300:
            await asyncio.sleep(0.01)
            row = await connection.fetchrow(query)
        assert row["n_tup_hot_upd"] >= 270
