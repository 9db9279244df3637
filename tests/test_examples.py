"""The examples run, and the demo's verification notices what it should."""

import asyncio
import importlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import asyncpg
import psutil
import pytest
from sidings import Discard, Message, Transaction
from sidings.testing import enqueued

from examples.transports.audit import Audit
from examples.transports.crew import Crew, NotInTime
from examples.transports.verify import Story, verify

from .support import connected

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["--seconds", "15", "--transports", "100"]


@pytest.fixture
def environment(sidings_postgres: str, sidings_kafka: str) -> dict[str, str]:
    """The examples use the session's servers instead of starting their own."""
    return os.environ | {"SIDINGS_POSTGRES": sidings_postgres, "SIDINGS_KAFKA": sidings_kafka}


@pytest.fixture
def demo(tmp_path: Path) -> list[str]:
    return [sys.executable, "-m", "examples.transports", "--plain", "--logs", str(tmp_path)]


def run(command: list[str], environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def test_the_quickstart_runs_and_ends_by_itself(environment: dict[str, str]):
    done = run([sys.executable, "examples/quickstart.py"], environment, 60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_demo_keeps_its_promises(demo: list[str], environment: dict[str, str]):
    done = run([*demo, *SHORT], environment, 200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "promises were kept" in done.stdout
    assert "took partitions" in done.stdout


@pytest.mark.chaos  # what the verification notices has quicker tests below
@pytest.mark.timeout(240)
def test_the_demo_fails_when_a_job_disappears(demo: list[str], environment: dict[str, str]):
    done = run([*demo, *SHORT, "--jobs-only", "--sabotage", "lose-job"], environment, 200)
    assert done.returncode == 1, done.stdout + done.stderr
    # Which of the two depends on whether an executor had read it already: then it ran, and its end matched no row.
    assert re.search("1 messages never reached the carrier|1 jobs have no end in the history", done.stdout), done.stdout


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_demo_leaves_no_process_behind_when_it_is_interrupted(demo: list[str], environment: dict[str, str]):
    with subprocess.Popen(
        [*demo, *SHORT], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "killed B" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(30) == 130
    deadline = time.monotonic() + 5
    while any(child.is_running() for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)


# -- the service of the demo, without its world ----------------------------------------------------------------------


@pytest.fixture
def tracker(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the service; it takes its addresses from the environment."""
    for name in ("POSTGRES", "KAFKA", "CARRIER", "TOPIC"):
        monkeypatch.setenv(f"TRACKER_{name}", database if name == "POSTGRES" else name.lower())
    monkeypatch.delitem(sys.modules, "examples.transports.service", raising=False)
    yield importlib.import_module("examples.transports.service")
    del sys.modules["examples.transports.service"]


def position(tracker: Any, transport: str, **values: float) -> Message[Any]:
    about = {"transport_id": transport, "sequence": 1, "latitude": 1.0, "longitude": 0.0, "sent_at": BEGAN, **values}
    return Message(tracker.Position(**about), topic="positions", key=transport.encode())


async def test_a_lorry_that_stands_still_has_an_arrival(database: str, tracker: Any):
    """Its message was parked, tried for ever, and all later ones of the lorry stood behind it."""
    async with connected(database) as connection, connection.transaction():
        await connection.execute(files("examples.transports").joinpath("tables.sql").read_text())
        await connection.execute("INSERT INTO transport VALUES ('lorry-0000', 0, 0)")
        for speed in (0.0, 1e-9, 60.0):
            await tracker.on_position(position(tracker, "lorry-0000", speed_kmh=speed), Transaction(connection))
        etas = [job.eta - BEGAN for job in await enqueued(connection, tracker.send_eta, group="lorry-0000")]
    assert etas[0] == etas[1] > etas[2] > timedelta(hours=1)


async def test_a_position_of_an_unknown_lorry_is_discarded(database: str, tracker: Any):
    """It was tried for ever, too."""
    async with connected(database) as connection, connection.transaction():
        await connection.execute(files("examples.transports").joinpath("tables.sql").read_text())
        with pytest.raises(Discard, match="lorry-9999"):
            await tracker.on_position(position(tracker, "lorry-9999", speed_kmh=60.0), Transaction(connection))


# -- the verification, on a story of nine messages ------------------------------------------------------------------

A, B = uuid4(), uuid4()
BEGAN = datetime.now(UTC) - timedelta(minutes=1)
STORY = Story({A: "A", B: "B"}, "B", B, BEGAN + timedelta(seconds=5), 9)


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


@pytest.fixture
async def told(database: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """Three transports, three messages each. The second of the last was cut off on B, and ran again on A."""
    connection = await asyncpg.connect(database)
    await connection.execute(files("examples.transports").joinpath("tables.sql").read_text())
    runs: list[tuple[str, int, str, int, int, float, float | None]] = []
    for number in range(3):
        name = f"lorry-000{number}"
        await connection.execute("INSERT INTO transport VALUES ($1, 0, 0, 0, 0, 0, now(), 3, 3)", name)
        for sequence in (1, 2, 3):
            await connection.execute("INSERT INTO produced VALUES ($1, $2, 0, $3, true)", name, sequence, BEGAN)
            cut = (number, sequence) == (2, 2)
            if cut:
                runs.append((name, sequence, "B", 10 * number + sequence, 1, 4.5, None))
            start = sequence + (6 if number == 2 and sequence >= 2 else 0)
            runs.append((name, sequence, "A", 10 * number + sequence, 2 if cut else 1, start, start + 0.5))
    for index, (name, sequence, instance, job, attempt, start, end) in enumerate(runs):
        await tell_run(connection, f"run-{index}", name, sequence, instance, job, attempt, start, end)
        await record(connection, job, attempt, "lost" if end is None else "succeeded", A if instance == "A" else B)
    yield connection
    await connection.close()


async def tell_run(connection, run, name, sequence, instance, job, attempt, start, end):
    insert = (
        "INSERT INTO audit (at, event, run, instance, job_id, attempt, transport_id, sequence, outcome, delay_seconds) "
        "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0)"
    )
    about = (run, instance, job, attempt, name, sequence)
    await connection.execute(insert, at(start), "start", *about, None)
    if end is not None:
        await connection.execute(insert, at(end), "end", *about, "succeeded")


async def record(connection, job, attempt, outcome, executor):
    await connection.execute(
        "INSERT INTO sidings.job_history (job_id, attempt, outcome, executor, enqueued_at, finished_at, priority, "
        "type, origin) VALUES ($1, $2, $3, $4, now(), now(), 0, 'send_eta', 'positions/0')",
        *(job, attempt, outcome, executor),
    )


async def test_a_good_story_passes_all_checks(told: "asyncpg.Connection[asyncpg.Record]"):
    checks = await verify(told, STORY)
    assert [problem for check in checks for problem in check.problems] == []
    assert "9 sent, 9 in Kafka, 9 applied" in checks[0].figures
    assert "10 runs in 3 groups" in checks[2].figures


WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
HISTORY = "INSERT INTO sidings.job_history SELECT * FROM sidings.job_history WHERE job_id = 1"
JOB = "INSERT INTO sidings.job (type, origin, payload) VALUES ('send_eta', 'positions/0', '{}')"
AGAIN = """
    INSERT INTO audit SELECT at + interval '20 s', event, 'again', instance, job_id, attempt + 1, transport_id,
                             sequence, outcome, 0
    FROM audit WHERE job_id = 3
"""


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        ("UPDATE transport SET messages_seen = 2 WHERE id = 'lorry-0000'", "1 messages were lost"),
        ("UPDATE transport SET messages_seen = 4 WHERE id = 'lorry-0000'", "1 messages were applied twice"),
        ("UPDATE transport SET last_sequence = 2 WHERE id = 'lorry-0000'", "1 transports do not stand at"),
        ("DELETE FROM produced WHERE transport_id = 'lorry-0000' AND sequence = 3", "the topic holds 9 messages"),
        ("DELETE FROM sidings.job_history WHERE job_id = 1", "1 jobs have no end"),
        (HISTORY, "1 jobs ended more than once"),
        (JOB, "1 jobs are still in the table"),
        ("DELETE FROM audit WHERE job_id = 1", "1 messages never reached the carrier"),
        ("UPDATE audit SET outcome = 'failed' WHERE job_id = 1 AND event = 'end'", "1 messages never reached"),
        ("UPDATE audit SET job_id = 2 WHERE job_id = 1 AND event = 'end'", "1 messages have more than one job"),
        ("UPDATE sidings.job_history SET outcome = 'discarded' WHERE job_id = 1", "1 jobs were given up"),
        ("UPDATE audit SET sequence = 4 - sequence WHERE transport_id = 'lorry-0001'", "came after a later"),
        ("UPDATE audit SET at = at + interval '1 s' WHERE job_id = 1 AND event = 'end'", "began while another"),
        ("UPDATE audit SET at = at - interval '3.3 s' WHERE run = 'run-8'", "began while another"),
        ("DELETE FROM audit WHERE job_id = 1 AND event = 'end'", "1 runs have no end"),
        ("DELETE FROM sidings.job_history WHERE outcome = 'lost'", "1 runs have no end"),
        ("UPDATE sidings.job_history SET executor = gen_random_uuid() WHERE outcome = 'lost'", "living instances"),
        ("UPDATE sidings.job_history SET executor = gen_random_uuid() WHERE job_id = 1", "no such run in the audit"),
        (AGAIN, "1 jobs succeeded again"),
    ],
)
async def test_the_verification_notices(told: "asyncpg.Connection[asyncpg.Record]", spoil: str, problem: str):
    assert not (await told.execute(spoil)).endswith(" 0")
    found = [text for check in await verify(told, STORY) for text in check.problems]
    assert any(problem in text for text in found), found


@pytest.mark.parametrize("writing", ["start", "end"])
async def test_the_audit_has_both_rows_of_a_run_that_is_cancelled_while_it_writes(database: str, writing: str):
    connection, blocker = await asyncpg.connect(database), await asyncpg.connect(database)
    await connection.execute(files("examples.transports").joinpath("tables.sql").read_text())
    entered, leave = asyncio.Event(), asyncio.Event()

    async def handle():
        async with audit.run("lorry-0000", 1, BEGAN):
            entered.set()
            await leave.wait()

    async with Audit.connect(database, "A") as audit:
        running = None
        if writing == "end":
            running = asyncio.create_task(handle())
            await entered.wait()
        async with blocker.transaction():
            await blocker.execute("LOCK TABLE audit")  # no row can be written now
            running = running or asyncio.create_task(handle())
            leave.set()
            while not await connection.fetchval(WAITING):
                await asyncio.sleep(0.01)
            running.cancel()
            _, pending = await asyncio.wait([running], timeout=0.2)
            assert pending
        with pytest.raises(asyncio.CancelledError):
            await running
    rows = await connection.fetch("SELECT event, outcome FROM audit ORDER BY at")
    assert [tuple(row) for row in rows] == [("start", None), ("end", "cancelled")]
    await connection.close()
    await blocker.close()


async def test_the_demo_has_patience_while_less_and_less_is_left(monkeypatch: pytest.MonkeyPatch):
    class Waiting(Crew):
        snapshot: Any = None

    clock = itertools.count()
    monkeypatch.setattr("examples.transports.crew.time", SimpleNamespace(monotonic=lambda: next(clock)))
    crew: Any = object.__new__(Waiting)
    lefts = iter([*range(50, 0, -1), 0])

    async def step() -> None:
        crew.snapshot = next(lefts)

    crew._step = step
    await crew.until(lambda left: left == 0, 10, "nothing is left", left=lambda left: left)
    lefts = itertools.repeat(7)
    with pytest.raises(NotInTime, match="after 10 s it is not true yet that nothing is left"):
        await crew.until(lambda left: left == 0, 10, "nothing is left", left=lambda left: left)
