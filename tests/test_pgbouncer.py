"""The core works through PgBouncer in transaction mode: no session state on hot paths."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from prometheus_client import CollectorRegistry
from sidings import ConfigurationError, PostgresUnavailable, Service
from sidings.devstack.fixtures import TopicFactory
from sidings.devstack.locations import free_port
from sidings.executor import Executor, ExecutorSettings, PostgresSettings, connect
from sidings.executor.link import Link
from sidings.executor.transactional import Transactional
from sidings.jobs import Job, Registry, Retry
from sidings.jobs.admin import Admin
from sidings.kafka.outbox import Relay
from sidings.kafka.outbox.backlog import Slot
from sidings.kafka.settings import KafkaSettings
from tenacity import wait_fixed

from .cli_support import cli, refused
from .faulty_proxy import Moment, proxied
from .fleet import Fleet, until
from .outbox_support import emptied, records
from .support import connected, drained, enqueue, eventually, fetch, running
from .test_transactional_connections import found_nothing, leaves_traces


def find_pgbouncer() -> str:
    """The binary; as root on a Debian-like system its package is installed first. Skips the test, with the reason."""
    found = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "pgbouncer"]):
            subprocess.run(
                ["apt-get", *command],
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                capture_output=True,
                check=False,
                timeout=100,
            )
        found = shutil.which("pgbouncer", path="/usr/sbin")
    if found is None:
        pytest.skip("no pgbouncer here and it cannot be installed; install the package `pgbouncer` to run this test")
    return found


@pytest.fixture
def bouncer(database: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """DSN of the test's database through a PgBouncer with two server connections, in transaction mode if not said."""
    binary = find_pgbouncer()
    server = urlsplit(database)
    port = free_port()
    name = server.path.lstrip("/")
    tmp_path.chmod(0o755)
    config = tmp_path / "pgbouncer.ini"
    config.write_text(
        "[databases]\n"
        f"{name} = host={server.hostname} port={server.port} dbname={name} user={server.username} "
        f"password={server.password}\n"
        "[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = {getattr(request, 'param', 'transaction')}\ndefault_pool_size = 2\nmax_client_conn = 100\n"
    )
    account = ["-u", "nobody"] if os.geteuid() == 0 else []
    with (tmp_path / "pgbouncer.log").open("w") as log:
        process = subprocess.Popen([binary, *account, str(config)], stdout=log, stderr=log, cwd="/")
    try:
        yield f"postgresql://{server.username}@127.0.0.1:{port}/{name}"
    finally:
        process.terminate()
        process.wait(10)


async def reachable(dsn: str) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                connection = await asyncpg.connect(dsn, statement_cache_size=0, timeout=2)
            except (OSError, asyncpg.PostgresError):
                await asyncio.sleep(0.05)
            else:
                await connection.close()
                return


async def test_jobs_run_retry_and_wait_their_turn_through_pgbouncer(bouncer: str, database: str) -> None:
    await reachable(bouncer)
    registry = Registry()
    ran: dict[str, list[int]] = {}
    failed: set[int] = set()

    @registry.job(group="group", retry=Retry(wait=wait_fixed(0.05)))
    async def serial(job: Job[dict[str, object]]) -> None:
        if job.payload["n"] == 3 and job.id not in failed:
            failed.add(job.id)
            raise ValueError("once")
        ran.setdefault(str(job.payload["group"]), []).append(int(str(job.payload["n"])))

    settings = PostgresSettings(dsn=bouncer, pgbouncer=True)
    executor = Executor("test", registry, settings, ExecutorSettings(), prometheus=CollectorRegistry())
    await executor.start()
    try:
        executor.assign(["t/0", "t/1"], 1)
        await executor.settled(20)
        # Users' own transactions go through the bouncer as well.
        connection = await asyncpg.connect(bouncer, statement_cache_size=0)
        for n in range(10):
            async with connection.transaction():
                for group in ("a", "b", "c"):
                    await serial.enqueue(connection, {"group": group, "n": n}, origin=f"t/{ord(group) % 2}")
            executor.wake()
        async with connection.transaction():
            await serial.enqueue(connection, {"group": "late", "n": 1}, origin="t/0", delay=0.2)
        await connection.close()
        direct = await asyncpg.connect(database)
        async with asyncio.timeout(30):
            while await direct.fetchval("SELECT EXISTS (SELECT FROM sidings.job)"):
                await asyncio.sleep(0.02)
        assert ran == {group: list(range(10)) for group in "abc"} | {"late": [1]}
        outcomes = await direct.fetch("SELECT outcome::text AS o, count(*) AS n FROM sidings.job_history GROUP BY 1")
        assert {row["o"]: row["n"] for row in outcomes} == {"succeeded": 31, "retried": 3}
        await direct.close()
    finally:
        await executor.stop()


async def test_a_service_that_does_not_know_of_pgbouncer_is_told(bouncer: str) -> None:
    await reachable(bouncer)
    with pytest.raises(ConfigurationError, match=r"PostgresSettings\(dsn=..., pgbouncer=True\)"):
        async with Service("test", postgres=bouncer, prometheus=CollectorRegistry()):
            pass
    async with Service("test", postgres=PostgresSettings(dsn=bouncer, pgbouncer=True), prometheus=CollectorRegistry()):
        pass


async def test_a_command_goes_through_pgbouncer_whether_an_option_or_the_environment_names_it(bouncer: str) -> None:
    """With --postgres it asked for the very variable that was set."""
    await reachable(bouncer)
    counts = ("jobs", "counts", "--postgres", bouncer)
    assert "or set SIDINGS_POSTGRES_PGBOUNCER=true" in await refused(None, *counts, exit_code=2)
    for named in (bouncer, "postgresql://127.0.0.1:1/other", None):
        await cli(named, *counts, SIDINGS_POSTGRES_PGBOUNCER="true")


@pytest.mark.parametrize("pgbouncer", [True, False])
async def test_an_option_of_the_dsn_that_pgbouncer_refuses_is_named(bouncer: str, pgbouncer: bool) -> None:
    """The remedy that was named was `pgbouncer=True`, which was given."""
    await reachable(bouncer)
    settings = PostgresSettings(dsn=f"{bouncer}?connect_timeout=10", pgbouncer=pgbouncer)
    service = Service("test", postgres=settings, prometheus=CollectorRegistry())
    for attempt in (service.__aenter__, service.migrate) if pgbouncer else (service.migrate,):
        told = r"PgBouncer at .* refuses the DSN's option connect_timeout .*leave it out, or add it to.*ignore_startup_"
        with pytest.raises(ConfigurationError, match=told) as refused:
            await attempt()
        assert "pgbouncer=True" not in str(refused.value)


@pytest.mark.parametrize("bouncer", ["session"], indirect=True)
async def test_a_pool_that_has_no_connection_left_is_thought_of(bouncer: str) -> None:
    """In session mode each of an instance's has one for good; from the third on there was "TimeoutError" alone."""
    await reachable(bouncer)
    link = Link(PostgresSettings(dsn=bouncer, pgbouncer=True, call_seconds=0.5))
    async with connected(bouncer) as one, connected(bouncer) as other:
        for connection in (one, other):
            await connection.execute("SELECT")
        with pytest.raises(PostgresUnavailable, match="PgBouncer may have no more connections"):
            await link.fetch("SELECT")
    assert await link.fetch("SELECT")
    await link.close()


async def test_a_connection_to_pgbouncer_does_not_tell_that_postgres_lived_on(bouncer: str, database: str) -> None:
    """It outlives a crash of Postgres."""
    await reachable(bouncer)
    for dsn, told in ((bouncer, False), (database, True)):
        link = Link(PostgresSettings(dsn=dsn, pgbouncer=True))
        lived_on = [link.lived_on((await link.fetch("SELECT pg_backend_pid() AS pid"))[0]["pid"]) for _ in range(2)]
        assert lived_on == [False, told]
        await link.close()


async def test_plans_do_not_depend_on_what_the_database_has_set(bouncer: str, database: str) -> None:
    """With a million jobs waiting Postgres compiled each read."""
    chosen = {"jit": "off", "enable_nestloop": "on", "enable_seqscan": "off", "plan_cache_mode": "force_generic_plan"}
    async with connected(database) as connection:
        name = await connection.fetchval("SELECT current_database()")
        for setting, other in {"jit": "on", "enable_nestloop": "off"}.items():
            await connection.execute(f'ALTER DATABASE "{name}" SET {setting} = {other}')
    await reachable(bouncer)
    link = Link(PostgresSettings(dsn=bouncer, pgbouncer=True))
    assert {setting: (await link.fetch(f"SHOW {setting}"))[0][0] for setting in chosen} == chosen
    await link.close()


async def test_administration_works_through_pgbouncer(bouncer: str) -> None:
    """Several persons at once: what a driver does in two trips may meet two server connections."""
    await reachable(bouncer)

    async def look_and_act(name: str) -> None:
        connection = await asyncpg.connect(bouncer, statement_cache_size=0)
        try:
            admin = Admin(connection, actor=name)
            for _ in range(20):
                assert await admin.jobs() == []
                assert await admin.counts() == []
                await admin.pause(type=name, reason="a test")
                assert name in {pause.type for pause in await admin.pauses()}
                await admin.resume(type=name, reason="it is over")
        finally:
            await connection.close()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(look_and_act(f"type_{number}"))


async def test_a_relay_sends_and_puts_late_messages_right_through_pgbouncer(
    bouncer: str, database: str, sidings_kafka: str, topic: TopicFactory
) -> None:
    await reachable(bouncer)
    zones = await topic("zones")
    async with connected(database) as db:
        await db.execute("CREATE TABLE zone (k text PRIMARY KEY)")
        await db.execute(f"SELECT sidings.directory_table('zone', '{zones}', '{{k}}')")
        postgres = PostgresSettings(dsn=bouncer, pgbouncer=True)
        relay = Relay("test", postgres, KafkaSettings(bootstrap=sidings_kafka), prometheus=CollectorRegistry())
        await relay.start()
        try:
            await eventually(lambda: len(relay.held) == 16)
            await db.execute("INSERT INTO zone VALUES ('z1'), ('z2')")
            await emptied(database)
            row = (1, Slot(0, "outbox/0", 1), b"z1", None, b"", None, None, 0)
            relay._amends.owe(zones, [row])  # pyright: ignore[reportPrivateUsage]
            doubts = "UPDATE sidings.directory_doubt SET due_at = now() RETURNING key"
            assert await eventually(lambda: db.fetchval(doubts)) == b"z1"

            async def put_right() -> bool:
                return [record.key for record in await records(sidings_kafka, zones)].count(b"z1") == 2

            await eventually(put_right)
        finally:
            await relay.stop()
        assert not await db.fetchval("SELECT count(*) FROM sidings.outbox_relay")


async def test_an_executor_that_is_paused_within_a_statement_does_not_keep_its_origins(
    database: str, tmp_path: Path
) -> None:
    """Each statement is a transaction of several messages then, also where no PgBouncer stands before the server."""
    async with proxied(database) as proxy, Fleet(database, tmp_path, executor={"lease_seconds": 1.0}) as fleet:
        paused = fleet.spawn("paused", ["t/0"], dsn=proxy.dsn, postgres={"pgbouncer": True})
        await fleet.held_by(paused, ["t/0"])
        fault = proxy.arm("cycle", Moment.SILENT_AFTER)
        await fleet.enqueue("step", ["t/0"])
        await until(lambda: fault.hits, "the cycle")
        paused.pause()
        heir = fleet.spawn("heir", ["t/0"])
        await fleet.finish()
        await heir.stop()


@pytest.mark.parametrize("bouncer", ["transaction", "session"], indirect=True)
async def test_a_job_finds_nothing_that_another_has_left_in_a_session_of_pgbouncers(
    bouncer: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant's setting, role, locks and temporary tables were the next job's. PgBouncer cleans no session in
    transaction mode, and in session mode only when its client goes."""
    await reachable(bouncer)
    registry = Registry()
    tenant, found = leaves_traces(registry)

    async def pooled(_: Transactional) -> asyncpg.Connection:  # none but these, so that each attempt has the same
        return await connect(PostgresSettings(dsn=bouncer, pgbouncer=True), for_handlers=True)

    monkeypatch.setattr(Transactional, "_connect", pooled)
    async with running(database, registry, pgbouncer=True, concurrency=1):
        await enqueue(database, tenant, [{}] * 2)
        await drained(database)
    found_nothing(found)


@pytest.mark.long
async def test_transactional_jobs_that_hold_all_of_its_connections_give_way_to_the_executor(
    bouncer: str, database: str
) -> None:
    """PgBouncer refuses nobody: with both connections in two transactions no lease was renewed, so the handlers were
    cancelled, and ran again, for ever."""
    await reachable(bouncer)
    registry, ended = Registry(), list[int]()

    @registry.job(transactional=True)
    async def slow(job: Job[dict[str, int]]) -> None:
        await asyncio.sleep(4)
        ended.append(job.id)

    async with running(bouncer, registry, pgbouncer=True, lease_seconds=3.0):
        ids = await enqueue(database, slow, [{}] * 3)
        await drained(database)
        assert set(ended) == set(ids)  # one whose commit had no room may have run twice


@pytest.mark.chaos
async def test_transactional_jobs_that_wait_for_room_begin_before_those_that_came_later(
    bouncer: str, database: str
) -> None:
    """Whoever had just ended one took the next one before any of those that waited was awake."""
    await reachable(bouncer)
    registry, ended = Registry(), list[int]()

    @registry.job(transactional=True)
    async def step(job: Job[dict[str, float]]) -> None:
        await asyncio.sleep(job.payload["seconds"])
        ended.append(job.id)

    async with running(bouncer, registry, pgbouncer=True, lease_seconds=3.0, concurrency=6):
        await enqueue(database, step, [{"seconds": 4}] * 2)
        await drained(database)  # since then there is room for one
        ended.clear()
        waiting = await enqueue(database, step, [{"seconds": 1}] + [{"seconds": 0.05}] * 5)
        await asyncio.sleep(0.5)
        await enqueue(database, step, [{"seconds": 0.05}] * 40)
        await drained(database)
    assert set(ended[:10]) >= set(waiting)


@pytest.mark.chaos
async def test_a_stop_lets_no_transactional_job_begin_that_waits_for_room(bouncer: str, database: str) -> None:
    """They ran one after the other, until the time for a stop was over."""
    await reachable(bouncer)
    registry, began = Registry(), list[int]()

    @registry.job(transactional=True)
    async def step(job: Job[dict[str, float]]) -> None:
        began.append(job.id)
        await asyncio.sleep(job.payload["seconds"])

    async with running(bouncer, registry, pgbouncer=True, lease_seconds=3.0, shutdown_seconds=20.0) as executor:
        await enqueue(database, step, [{"seconds": 4}] * 2)
        await drained(database)  # since then there is room for one
        began.clear()
        ids = await enqueue(database, step, [{"seconds": 1}] * 5)
        await eventually(lambda: began and executor.workers.running() == len(ids))
        await executor.stop()
    assert began == ids[:1]
    rows = await fetch(database, "SELECT id, attempt, losses FROM sidings.job ORDER BY id")
    assert [tuple(row) for row in rows] == [(id, 1, 0) for id in ids[1:]]
