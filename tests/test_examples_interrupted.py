"""Examples that are interrupted end soon, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import asyncpg
import psutil
import pytest
from aiokafka.admin import AIOKafkaAdminClient

ROOT = Path(__file__).parents[1]


@pytest.fixture
def environment(sidings_postgres: str, sidings_kafka: str) -> dict[str, str]:
    return os.environ | {"SIDINGS_POSTGRES": sidings_postgres, "SIDINGS_KAFKA": sidings_kafka}


def interrupted(module: str, number: int, when: str, environment: dict[str, str], *arguments: str) -> str:
    """What it says after the signal, which it gets with the first line that holds `when`. It is started as a shell does
    it with `&`, which has SIGINT ignored."""
    program = "import runpy, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    program += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            while when not in (line := process.stdout.readline()):
                assert line, f"it has ended before: {process.wait(30)}"
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            rest = process.stdout.read()
            assert process.wait(30) == 130
        finally:
            process.kill()
    deadline = time.monotonic() + 5
    while any(child.is_running() for child in children):
        assert time.monotonic() < deadline, children
        time.sleep(0.05)
    return rest


async def left(postgres: str, kafka: str) -> set[str]:
    """Names of databases and topics."""
    connection = await asyncpg.connect(postgres)
    databases = {row["datname"] for row in await connection.fetch("SELECT datname FROM pg_database")}
    await connection.close()
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka)
    await admin.start()
    topics = set(await admin.list_topics())
    await admin.close()
    return {name for name in databases | topics if not name.startswith("__")}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_story_of_the_tenants_ends_with_the_system(
    environment: dict[str, str], sidings_postgres: str, sidings_kafka: str, number: int
) -> None:
    """The system stopped, and its client asked it for another half a minute, to end with a traceback."""
    before = await left(sidings_postgres, sidings_kafka)
    assert interrupted("examples.tenants", number, "bad day (fail)", environment).endswith("stopped\n")
    assert await left(sidings_postgres, sidings_kafka) == before


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_story_of_the_terminals_takes_its_postgres_along(environment: dict[str, str], number: int) -> None:
    """After a SIGTERM the server went on."""
    rest = interrupted("examples.terminals", number, "ready after", environment)
    assert rest.endswith("Stopped; the servers are gone.\n")


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_story_of_change_data_leaves_neither_database_nor_topics(
    environment: dict[str, str], sidings_postgres: str, sidings_kafka: str, number: int, tmp_path: Path
) -> None:
    """Where it had been started in the background, SIGTERM was made into a signal that was ignored. Spark, which it
    starts in a thread, made its checkpoint after that had been deleted."""
    before = await left(sidings_postgres, sidings_kafka)
    interrupted("examples.cdc", number, "are in Kafka", environment | {"TMPDIR": str(tmp_path)}, "--transactions", "20")
    assert await left(sidings_postgres, sidings_kafka) == before
    assert list(tmp_path.glob("cdc-*")) == []


INTERRUPTED_AFTER_TOPICS = """
import asyncio, os, runpy, signal, sys
from sidings.devstack import topics

make, made = topics.create_topic, []
module, number = sys.argv.pop(1), int(sys.argv.pop(1))

async def interrupted(*arguments, **options):
    await make(*arguments, **options)
    made.append(arguments)
    if len(made) == number:
        os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(30)

topics.create_topic = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "topics"), [("examples.quickstart", 1), ("examples.tenants", 5), ("examples.cdc", 1)]
)
async def test_an_example_that_is_interrupted_while_it_makes_its_topics_leaves_none(
    environment: dict[str, str], sidings_postgres: str, sidings_kafka: str, module: str, topics: int
) -> None:
    """They were deleted only where all of them had been made."""
    before = await left(sidings_postgres, sidings_kafka)
    command = [sys.executable, "-c", INTERRUPTED_AFTER_TOPICS, module, str(topics)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode in (130, -signal.SIGINT), done.stderr
    assert await left(sidings_postgres, sidings_kafka) == before


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_demo_ends_when_it_was_started_in_the_background(environment: dict[str, str], tmp_path: Path) -> None:
    """SIGTERM was made into a signal that was ignored, and the demo went on to its end."""
    options = ["--plain", "--jobs-only", "--seconds", "15", "--transports", "100", "--logs", str(tmp_path)]
    rest = interrupted("examples.transports", signal.SIGTERM, "started instance A", environment, *options)
    assert rest.endswith("Stopped; all processes are gone.\n")
