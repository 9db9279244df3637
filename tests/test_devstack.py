"""The devstack itself: servers that can be started, found again, killed and paused, and their fixtures."""

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncpg
import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from sidings import devstack
from sidings.devstack import (
    DevstackError,
    Kafka,
    Postgres,
    ServerStartError,
    ServerState,
    ServerStateError,
    ToolMissingError,
    broker,
    jars,
    kafka,
    locations,
    postgres,
)
from sidings.devstack.accounts import reachable, server_account
from sidings.devstack.broker import Broker, answers
from sidings.devstack.databases import create_database, database_dsn, drop_database
from sidings.devstack.locations import PORTS, free_ports
from sidings.devstack.prepared import prepare
from sidings.devstack.process import BOOT, ServerProcess, gone, wait_until
from sidings.devstack.sessions import session_directory
from sidings.devstack.state import SavedState
from sidings.devstack.topics import create_topic

from .consumer_support import administering

SECONDS = 20


def query(dsn: str, sql: str, timeout: float = SECONDS):
    """The value of one query on a connection of its own."""

    async def run():
        connection = await asyncpg.connect(dsn, timeout=timeout)
        try:
            return await connection.fetchval(sql, timeout=timeout)
        finally:
            await connection.close(timeout=timeout)

    return asyncio.run(asyncio.wait_for(run(), timeout))


async def send(bootstrap: str, topic: str, value: bytes, **security) -> None:
    """Send a message to partition 0 and wait until all replicas in sync have it."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", **security)
    await producer.start()
    try:
        await asyncio.wait_for(producer.send_and_wait(topic, value, partition=0), SECONDS)
    finally:
        await producer.stop()


async def received(bootstrap: str, topic: str, **security) -> list[bytes]:
    """Every value of partition 0."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, **security)
    await consumer.start()
    try:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        end = (await consumer.end_offsets([partition]))[partition]
        values: list[bytes] = []
        while await consumer.position(partition) < end:
            batch = await asyncio.wait_for(consumer.getmany(timeout_ms=200), SECONDS)
            values += [record.value or b"" for record in batch.get(partition, ())]
        return values
    finally:
        await consumer.stop()


def run_devstack(directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m sidings.devstack …` in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SIDINGS_")}
    return subprocess.run(
        [sys.executable, "-m", "sidings.devstack", "--directory", str(directory), *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


# -- the command line


@pytest.fixture
def stack_directory(sidings_devstack_directory: Path) -> Iterator[Path]:
    directory = sidings_devstack_directory / f"stack-{os.urandom(4).hex()}"
    yield directory
    devstack.Stack(directory).remove()


@pytest.mark.long
def test_up_status_and_down_work_from_separate_processes_and_data_stays(stack_directory: Path):
    def up(**environment: str) -> dict[str, str]:
        done = run_devstack(stack_directory, "up", **environment)
        assert done.returncode == 0, done.stderr
        lines = [line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines()]
        return {name: value.strip("'") for name, value in lines}

    first = up()
    assert set(first) == {"SIDINGS_POSTGRES", "SIDINGS_KAFKA"}
    query(first["SIDINGS_POSTGRES"], "CREATE TABLE kept AS SELECT 42 AS answer")
    topic = ("topic", "kept", "--partitions", "1")
    assert run_devstack(stack_directory, *topic).returncode == 0
    assert "already exists" in run_devstack(stack_directory, *topic).stderr
    asyncio.run(send(first["SIDINGS_KAFKA"], "kept", b"kept"))

    status = run_devstack(stack_directory, "status")
    assert status.returncode == 0
    assert status.stdout.count("running") == 2
    assert "started" in run_devstack(stack_directory, "logs", "kafka").stdout.lower()

    assert run_devstack(stack_directory, "down").returncode == 0
    status = run_devstack(stack_directory, "status")
    assert status.returncode == 1
    assert status.stdout.count("stopped") == 2
    assert "`up` starts" in run_devstack(stack_directory, *topic).stderr

    # Addresses and password stay, so that nobody's settings go stale; a shell that has them starts the servers anew.
    assert up(**first) == first
    assert query(first["SIDINGS_POSTGRES"], "SELECT answer FROM kept") == 42
    assert asyncio.run(received(first["SIDINGS_KAFKA"], "kept")) == [b"kept"]


def test_without_a_java_nothing_is_started(stack_directory: Path):
    done = run_devstack(stack_directory, "up", PATH="/nowhere", JAVA_HOME="")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Java 17 or newer is needed" in done.stderr
    assert not stack_directory.exists()


def test_what_the_system_refuses_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    done = run_devstack(tmp_path / "file" / "home", "up")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("error: ")
    assert str(tmp_path) in done.stderr
    none = run_devstack(tmp_path / "home", "up", "--brokers", "0")
    assert none.returncode == 2
    assert "--brokers" in none.stderr
    assert not (tmp_path / "home").exists()


def test_kill_pause_and_resume_reach_one_server_by_name(stack_directory: Path):
    external = {"SIDINGS_KAFKA": "127.0.0.1:1"}
    up = run_devstack(stack_directory, "up", **external)
    assert "SIDINGS_KAFKA='127.0.0.1:1'" in up.stdout
    server = devstack.Stack(stack_directory).postgres

    for action, state in [
        ("pause", ServerState.PAUSED),
        ("resume", ServerState.RUNNING),
        ("kill", ServerState.STOPPED),
        ("restart", ServerState.RUNNING),
    ]:
        assert run_devstack(stack_directory, action, "postgres", **external).returncode == 0
        assert server.status().state is state

    refused = run_devstack(stack_directory, "kill", "mysql")
    assert refused.returncode == 1
    assert "postgres, kafka" in refused.stderr


def test_two_ups_at_the_same_time_start_one_server(stack_directory: Path):
    answers: list[subprocess.CompletedProcess[str]] = []
    both = [
        threading.Thread(
            target=lambda: answers.append(run_devstack(stack_directory, "up", SIDINGS_KAFKA="127.0.0.1:1"))
        )
        for _ in range(2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert [answer.returncode for answer in answers] == [0, 0]
    assert answers[0].stdout == answers[1].stdout


# -- Postgres


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_postgres_keeps_what_was_committed_and_only_that(own_postgres, end: str):
    server: Postgres = own_postgres()
    query(server.dsn, "CREATE TABLE committed AS SELECT 1 AS n")

    async def die_with_a_transaction_open() -> None:
        connection = await asyncpg.connect(server.dsn)
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("INSERT INTO committed VALUES (2)")
        await asyncio.to_thread(getattr(server, end))
        connection.terminate()

    asyncio.run(die_with_a_transaction_open())
    assert server.status().state is ServerState.STOPPED
    with pytest.raises(ConnectionRefusedError):
        query(server.dsn, "SELECT 1")

    server.start()
    assert query(server.dsn, "SELECT array_agg(n) FROM committed") == [1]


def test_postgres_starts_again_after_a_sigkill_of_its_main_process_alone(own_postgres):
    server: Postgres = own_postgres()
    pid = server.pid
    assert pid is not None
    children = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)  # the children notice by themselves, a moment later
    assert wait_until(lambda: server.pid is None, timeout=SECONDS)
    server.start()
    assert query(server.dsn, "SELECT 1") == 1
    assert all(map(gone, children))


def test_a_paused_postgres_answers_nothing_until_it_is_resumed(own_postgres):
    server: Postgres = own_postgres()
    server.pause()
    assert server.status().state is ServerState.PAUSED
    with pytest.raises(TimeoutError):
        query(server.dsn, "SELECT 1", timeout=0.5)
    server.resume()
    assert server.status().state is ServerState.RUNNING
    assert query(server.dsn, "SELECT 1") == 1


def test_a_start_waits_for_a_postgres_that_another_has_launched(own_postgres):
    """As after an `up` that was interrupted: the next one returned at once, and nobody could connect."""
    server: Postgres = own_postgres()
    server.stop()
    server._launch((server.directory / "data").resolve())
    Postgres(server.directory).start()
    assert query(server.dsn, "SELECT 1") == 1


def test_a_paused_postgres_is_not_taken_for_one_that_is_started(own_postgres):
    server: Postgres = own_postgres()
    server.pause()
    with pytest.raises(ServerStateError, match=r"postgres is paused: resume it, by .* resume postgres`"):
        Postgres(server.directory).start()
    server.resume()
    server.start()


def test_a_server_that_another_has_launched_is_not_killed_where_it_is_not_ready_in_time(tmp_path: Path):
    process = ServerProcess("server", tmp_path)
    process.spawn(["sleep", "1000"], env=os.environ, cwd=tmp_path, account=None)
    try:
        with pytest.raises(ServerStartError, match="not ready after 0"):
            process.await_ready(lambda: False, timeout=0, own=False)
        process.require()
        with pytest.raises(ServerStartError, match="not ready after 0"):
            process.await_ready(lambda: False, timeout=0)
        assert process.find() is None
    finally:
        process.kill()


def test_a_paused_postgres_can_be_stopped_and_killed(own_postgres):
    server: Postgres = own_postgres()
    server.pause()
    server.stop()
    assert server.status().state is ServerState.STOPPED
    server.start()
    server.pause()
    server.kill()
    assert server.status().state is ServerState.STOPPED


def test_a_second_postgres_is_another_server(own_postgres):
    first: Postgres = own_postgres()
    second: Postgres = own_postgres({"work_mem": "7MB"})
    first.kill()
    assert query(second.dsn, "SHOW work_mem") == "7MB"
    assert query(second.dsn, "SHOW fsync") == "on"


def test_a_postgres_that_cannot_start_shows_its_log(own_postgres):
    with pytest.raises(ServerStartError, match="not-a-size") as caught:
        own_postgres({"shared_buffers": "not-a-size"})
    assert "postgres.log" in str(caught.value)


class KilledError(Exception):
    """Instead of the signal: what follows it does not happen."""


@pytest.fixture
def new_postgres(sidings_server_directory) -> Iterator[Postgres]:
    """A server that has not been started yet."""
    server = Postgres(sidings_server_directory("new-postgres"))
    yield server
    server.remove()


def test_a_postgres_whose_first_start_was_killed_after_initdb_starts(
    new_postgres: Postgres, monkeypatch: pytest.MonkeyPatch
):
    """Its cluster was there without a password: each later start succeeded, and nobody could connect."""
    update = SavedState.update

    def killed(state: SavedState, **values: str) -> None:
        if "password" in values:
            raise KilledError
        update(state, **values)

    with monkeypatch.context() as patch:
        patch.setattr(SavedState, "update", killed)
        with pytest.raises(KilledError):
            new_postgres.start()
    assert (new_postgres.directory / "data" / "PG_VERSION").exists()
    new_postgres.start()
    assert query(new_postgres.dsn, "SELECT 1") == 1


def test_a_postgres_whose_initdb_was_killed_starts(new_postgres: Postgres, monkeypatch: pytest.MonkeyPatch):
    """Half a cluster was taken for one, for ever."""

    def killed(_command: list[str], *, cwd: Path, **_options: object) -> None:
        (cwd / "base").mkdir()
        (cwd / "PG_VERSION").write_text("18\n")
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", killed)
        with pytest.raises(KilledError):
            new_postgres.start()
    assert (new_postgres.directory / "data" / "PG_VERSION").exists()
    new_postgres.start()
    assert query(new_postgres.dsn, "SELECT 1") == 1


def test_a_start_waits_for_the_initdb_of_one_that_was_killed(new_postgres: Postgres):
    """It goes on without its starter, and would write among the files of the second."""
    script = """if True:
        import subprocess, sys
        from sidings.devstack import Postgres
        run = subprocess.run
        subprocess.run = lambda _, **options: run(["sh", "-c", "read line; touch late"], **options)
        Postgres(sys.argv[1]).start()
    """
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(new_postgres.directory)],
        stdin=subprocess.PIPE,
        text=True,
    )
    with starter:
        assert starter.stdin is not None
        assert wait_until(lambda: bool(psutil.Process(starter.pid).children()), timeout=SECONDS)
        (initdb,) = psutil.Process(starter.pid).children()
        starter.kill()
        starter.wait(SECONDS)
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(new_postgres.start)
            assert not wait_until(started.done, timeout=1)
            starter.stdin.write("go on\n")
            starter.stdin.flush()
            started.result(3 * SECONDS)
    assert gone(initdb)
    assert query(new_postgres.dsn, "SELECT 1") == 1
    assert not (new_postgres.directory / "data" / "late").exists()


def test_a_postgres_whose_data_is_gone_is_made_anew(new_postgres: Postgres):
    """As where they lay in /var/tmp, and somebody has tidied up there."""
    new_postgres.start()
    new_postgres.stop()
    for path in (new_postgres.directory / "data").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    new_postgres.start()
    assert query(new_postgres.dsn, "SELECT 1") == 1


def test_a_cluster_that_the_devstack_has_not_made_starts(new_postgres: Postgres):
    """As a base backup. Its password is not known here."""
    new_postgres.start()
    new_postgres.stop()
    (new_postgres.directory / "postgres.json").unlink()
    for _ in range(2):
        new_postgres.start()
        assert new_postgres.pid is not None
        with pytest.raises(ServerStateError, match=r"password is not known.*delete this folder"):
            _ = new_postgres.dsn
        new_postgres.stop()


def test_files_that_are_not_the_devstacks_are_not_deleted_for_a_postgres(new_postgres: Postgres):
    mine = new_postgres.directory / "data" / "PG_VERSION"
    mine.parent.mkdir()
    mine.touch()
    with pytest.raises(ServerStateError, match="name another directory"):
        new_postgres.start()
    assert mine.exists()


def test_starting_and_stopping_twice_is_harmless(own_postgres):
    server: Postgres = own_postgres()
    pid = server.pid
    server.start()
    assert server.pid == pid
    server.stop()
    server.stop()
    server.kill()
    with pytest.raises(ServerStateError, match="not running"):
        server.pause()


def test_a_server_that_was_never_started_says_so(tmp_path: Path):
    server = Postgres(tmp_path / "never")
    assert server.status().state is ServerState.ABSENT
    with pytest.raises(ServerStateError, match="start it first"):
        _ = server.dsn


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's Postgres runs as another user")
def test_as_root_the_data_moves_where_the_other_user_can_reach_it(tmp_path: Path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    server = Postgres(closed / "postgres")
    data = closed / "postgres" / "data"
    try:
        server.start()
        assert not reachable(data.parent / "x")
        assert reachable(data.resolve())
        query(server.dsn, "CREATE TABLE kept AS SELECT 1 AS n")
        server.restart()  # finds the same stand-in again
        assert query(server.dsn, "SELECT n FROM kept") == 1
        elsewhere = data.resolve()
    finally:
        server.remove()
    assert not elsewhere.exists()


# -- pid files


def test_a_pid_file_that_names_another_process_sends_no_signal(tmp_path: Path):
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        server = ServerProcess("server", tmp_path)
        server.pid_file.write_text(json.dumps({"pid": bystander.pid, "birth": "another boot 1"}))
        assert server.find() is None
        server.terminate([(signal.SIGTERM, 1)])
        server.kill()
        assert bystander.poll() is None
    finally:
        bystander.communicate(timeout=SECONDS)


@pytest.fixture
def killed_postgres(own_postgres) -> Iterator[tuple[Postgres, int]]:
    """A server that was killed, and another process of its user that has the pid that it had."""
    server: Postgres = own_postgres()
    query(server.dsn, "CREATE TABLE kept AS SELECT 1 AS n")
    server.kill()
    account = server_account()
    user = {"user": account.uid, "group": account.gid, "extra_groups": []} if account else {}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, **user) as bystander:
        lock = server.directory / "data" / "postmaster.pid"
        lock.write_text(re.sub(r"\A\d+", str(bystander.pid), lock.read_text()))
        yield server, bystander.pid
        assert bystander.poll() is None


@pytest.mark.skipif(not BOOT.exists(), reason="no boot has an id here")
def test_after_a_restart_of_the_system_another_process_may_have_the_servers_pid(
    killed_postgres: tuple[Postgres, int],
):
    """Postgres took it for itself, and refused to start until its data was deleted."""
    server, pid = killed_postgres
    (server.directory / "postgres.pid").write_text(json.dumps({"pid": pid, "birth": "another-boot 1"}))
    server.start()
    assert query(server.dsn, "SELECT n FROM kept") == 1


@pytest.mark.parametrize("started", ["in this boot", "by another"])
def test_where_another_process_may_run_on_the_data_the_file_that_says_so_is_named(
    killed_postgres: tuple[Postgres, int], started: str, monkeypatch: pytest.MonkeyPatch
):
    """As after a container's restart, which no boot's id tells; or where somebody has started a server by hand."""
    server, pid = killed_postgres
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    noted = {"pid": pid, "birth": f"{boot} 1"} if started == "in this boot" else {"pid": pid + 1, "birth": "another 1"}
    (server.directory / "postgres.pid").write_text(json.dumps(noted))
    monkeypatch.setattr(postgres, "RETRY_SECONDS", 0)
    lock = (server.directory / "data" / "postmaster.pid").resolve()
    with pytest.raises(ServerStateError, match=rf"{re.escape(str(lock))} names the process {pid}, .*delete that file"):
        server.start()
    lock.unlink()
    server.start()
    assert query(server.dsn, "SELECT n FROM kept") == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_process_whose_pid_cannot_be_written_is_killed(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It went on, and nobody could find it."""
    before = psutil.Process().children()

    def fail(*_: object) -> None:
        raise error

    process = ServerProcess("server", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(type(error)):
            process.spawn(["sleep", "1000"], env=os.environ, cwd=tmp_path, account=None)
    left = [child for child in psutil.Process().children() if child not in before and not gone(child)]
    for child in left:
        child.kill()
    assert left == []


def test_a_killed_server_leaves_no_zombie(own_postgres):
    server: Postgres = own_postgres()
    pid = server.pid
    assert pid is not None
    server.kill()
    assert wait_until(lambda: not psutil.pid_exists(pid), timeout=SECONDS)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_removed_server_leaves_none_of_its_memory(own_postgres):
    """Each left a segment of System V's: after some thousand servers none started until the machine was restarted."""

    def segments() -> set[str]:
        return {line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}

    killed, running = own_postgres(), own_postgres()
    own = {
        (server.directory / "data/postmaster.pid").read_text().splitlines()[6].split()[1]
        for server in (killed, running)
    }
    assert own <= segments()
    killed.kill()
    for server in (killed, running):
        server.remove()
    assert own.isdisjoint(segments())


SESSION = """if True:
    from sidings.devstack import Postgres
    from sidings.devstack.sessions import session_directory
    with session_directory() as directory:
        server = Postgres(directory / "postgres")
        server.start()
        print(server.pid, flush=True)
        input()
"""


def killed_session() -> psutil.Process:
    """A server whose test session was killed."""
    with subprocess.Popen(
        [sys.executable, "-c", SESSION], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as session:
        assert session.stdout is not None
        left = psutil.Process(int(session.stdout.readline()))
        session.kill()
        session.wait(SECONDS)
    assert not gone(left)
    return left


def test_the_servers_of_a_killed_test_session_are_removed_by_the_next_one(
    sidings_devstack_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SIDINGS_DEVSTACK_HOME", str(sidings_devstack_directory / "home"))
    left = killed_session()
    with session_directory() as directory:
        assert gone(left)
        assert list(directory.parent.iterdir()) == [directory]


def test_the_servers_of_a_killed_test_session_are_removed_by_down_delete_and_those_of_others_stay(
    sidings_devstack_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """`make clean` then deleted all that told of them."""
    home = sidings_devstack_directory / "home"
    monkeypatch.setenv("SIDINGS_DEVSTACK_HOME", str(home))
    left = killed_session()
    try:
        assert run_devstack(home, "down", "--delete", SIDINGS_DEVSTACK_HOME=str(home)).returncode == 0
        assert gone(left)
        assert list((home / "sessions").iterdir()) == []
        with session_directory() as directory:
            assert run_devstack(home, "down", "--delete", SIDINGS_DEVSTACK_HOME=str(home)).returncode == 0
            assert list(directory.parent.iterdir()) == [directory]
    finally:
        with session_directory():
            pass  # which removes what is left


KILLED = """
def test_that_is_killed(own_postgres, sidings_server_directory):
    server = own_postgres()
    unfinished = sidings_server_directory("postgres")  # as while `initdb` is at work
    (unfinished / "data").mkdir(parents=True)
    print("\\nleft:", server.pid, server.directory, unfinished.resolve(), flush=True)
    input()
"""


def test_what_a_killed_test_run_leaves_in_memory_is_removed_by_the_next_one(
    sidings_devstack_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    home = sidings_devstack_directory / "killed"
    home.mkdir()
    monkeypatch.setenv("SIDINGS_DEVSTACK_HOME", str(home))
    (home / "pytest.ini").write_text("[pytest]\n")  # nothing of the project's own settings
    (home / "conftest.py").write_text('pytest_plugins = ["sidings.devstack.fixtures"]\n')
    (home / "test_killed.py").write_text(KILLED)
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "test_killed.py"],
        cwd=home,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        left = next(line for line in run.stdout if line.startswith("left:"))
        run.kill()
        run.wait(SECONDS)
    _, pid, *directories = left.split()
    server = psutil.Process(int(pid))
    assert not gone(server)
    assert all(Path(directory).is_dir() for directory in directories)

    with session_directory():
        assert gone(server)
        assert not any(Path(directory).exists() for directory in directories)


def test_sessions_that_begin_at_the_same_time_remove_what_is_left_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SIDINGS_DEVSTACK_HOME", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(SECONDS)
    for number in range(200):
        left = tmp_path / "sessions" / f"{number}-abcdef"
        left.mkdir(parents=True)
        (left / "owner").write_text(f"{dead.pid} long ago")
    together = threading.Barrier(4)

    def session(_: int) -> list[str]:
        together.wait(SECONDS)
        with session_directory() as mine:
            together.wait(SECONDS)
            seen = sorted(path.name for path in mine.parent.iterdir())
            together.wait(SECONDS)
            return seen

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(session, range(4), timeout=2 * SECONDS)
    assert len(first) == 4
    assert others == [first] * 3
    assert list((tmp_path / "sessions").iterdir()) == []


@pytest.mark.parametrize("owner", [None, "", "\0\0\0"])
def test_a_session_whose_owner_cannot_be_told_is_removed(
    owner: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As after a power failure: no session could begin any more."""
    monkeypatch.setenv("SIDINGS_DEVSTACK_HOME", str(tmp_path))
    left = tmp_path / "sessions" / "1-abcdef"
    left.mkdir(parents=True)
    if owner is not None:
        (left / "owner").write_text(owner)
    with session_directory() as directory:
        assert list(directory.parent.iterdir()) == [directory]


@pytest.mark.parametrize("is_home", [True, False])
def test_sessions_that_are_not_the_devstacks_are_left_alone(is_home: bool, tmp_path: Path):
    """`down --delete` deleted whatever stood in a folder of that name, and what links there led to."""
    kept = [tmp_path / "sessions" / "user-42" / "cart.json", tmp_path / "elsewhere" / "data" / "of-mine"]
    if not is_home:
        kept.append(tmp_path / "sessions" / "1-abcdef" / "of-mine")
    for file in kept:
        file.parent.mkdir(parents=True)
        file.touch()
    (tmp_path / "sessions" / "user-42" / "latest").symlink_to(tmp_path / "elsewhere")
    done = run_devstack(tmp_path, "down", "--delete", **({"SIDINGS_DEVSTACK_HOME": str(tmp_path)} if is_home else {}))
    assert done.returncode == 0
    assert all(file.exists() for file in kept)


@pytest.mark.parametrize("damaged", ["postgres/postgres.json", "postgres/postgres.pid", "kafka/kafka.json"])
def test_a_devstack_whose_files_are_empty_can_be_deleted(damaged: str, stack_directory: Path):
    """As after a power failure, or a full disk: each command ended in a traceback, and so did the deletion."""
    file = stack_directory / damaged
    file.parent.mkdir(parents=True)
    file.touch()
    for command in ("status", "down"):
        told = run_devstack(stack_directory, command).stderr
        assert "Traceback" not in told
        if (command, file.suffix) == ("status", ".json"):
            assert str(file) in told
            assert "down --delete" in told
    done = run_devstack(stack_directory, "down", "--delete")
    assert (done.returncode, done.stderr) == (0, "")
    assert not file.exists()


def test_the_brokers_of_a_kafka_whose_state_is_damaged_are_killed_with_it(tmp_path: Path):
    kafka = Kafka(tmp_path / "kafka")
    folder = kafka.directory / "broker-2"
    folder.mkdir(parents=True)
    process = ServerProcess("kafka-2", folder)
    process.spawn(["sleep", "1000"], env=os.environ, cwd=folder, account=None)
    (kafka.directory / "kafka.json").touch()
    running = process.require()
    kafka.remove()
    assert gone(running)
    assert not kafka.directory.exists()


# -- Kafka


@pytest.mark.long
def test_kafka_keeps_acknowledged_messages_through_sigkill_and_sigstop(own_kafka):
    kafka: Kafka = own_kafka()
    asyncio.run(create_topic(kafka.bootstrap, "numbers", partitions=1))
    asyncio.run(send(kafka.bootstrap, "numbers", b"1"))

    kafka.kill()
    assert [status.state for status in kafka.status()] == [ServerState.STOPPED]
    kafka.start()
    asyncio.run(send(kafka.bootstrap, "numbers", b"2"))

    port = kafka.broker(1).plan.port
    kafka.pause()
    assert [status.state for status in kafka.status()] == [ServerState.PAUSED]
    assert not answers(port, timeout=0.5)
    kafka.resume()
    assert wait_until(lambda: answers(port), timeout=SECONDS)

    assert asyncio.run(received(kafka.bootstrap, "numbers")) == [b"1", b"2"]


def test_a_start_waits_for_brokers_that_another_has_launched_and_takes_no_paused_one_for_started(
    sidings_server_directory,
):
    """As after an `up` that was interrupted: the next one returned at once, and nothing answered."""
    kafka = Kafka(sidings_server_directory("new-kafka"))
    try:
        kafka._invent()
        launched = kafka.broker(1)
        launched.launch()
        Kafka(kafka.directory).start()
        assert answers(launched.plan.port)

        kafka.pause()
        with pytest.raises(ServerStateError, match=r"kafka-1 is paused: resume it, by .* resume kafka-1`"):
            Kafka(kafka.directory).start()
        with pytest.raises(ServerStateError, match="paused"):
            kafka.broker(1).start()
        kafka.resume()
        kafka.broker(1).start()
        assert answers(launched.plan.port)

        other = kafka.broker(1)
        other.launch()  # does nothing
        launched.kill()
        with pytest.raises(ServerStartError, match="the process ended"):
            other.await_ready()
    finally:
        kafka.remove()


def test_a_kafka_that_cannot_start_shows_its_log(own_kafka):
    with pytest.raises(ServerStartError, match=r"(?s)last lines.*not-a-number"):
        own_kafka(settings={"num.io.threads": "not-a-number"})


def test_a_start_that_was_prepared_is_as_any_other(own_kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prepare()  # `make setup` has done it
    kafka: Kafka = own_kafka()
    prepared = kafka.broker(1)
    if sys.platform == "linux":
        used = {part.path for part in psutil.Process(prepared.pid).memory_maps()}
        assert str((broker.prepared() / broker.CLASSES).resolve()) in used, "Java has taken its archive"

    other = Broker(tmp_path, prepared.plan)
    monkeypatch.setattr(broker, "prepared", lambda: tmp_path / "nothing")
    monkeypatch.setattr(ServerProcess, "spawn", lambda *_, **__: None)
    other.launch()  # by Kafka's own tool

    def names(written: Broker) -> list[str]:
        lines = (written.fresh_storage.parent / "meta.properties").read_text().splitlines()
        return sorted(line.partition("=")[0] for line in lines if not line.startswith("#"))

    def features(written: Broker) -> list[bytes]:
        return re.findall(rb"[a-z.]+\.version\0.", written.fresh_storage.read_bytes(), re.DOTALL)

    assert names(prepared) == names(other)
    assert features(prepared) == features(other) != []


def test_what_was_prepared_of_other_jars_is_prepared_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Java takes no archive that was made of others: they were fetched, or copied, since. It was never made again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fetched = tmp_path / "sidings" / f"kafka-{jars.KAFKA_VERSION}"
    fetched.mkdir(parents=True)
    before = broker.prepared()
    assert broker.prepared() == before
    os.utime(fetched, (0, 0))
    assert broker.prepared() != before


def kill_once_it_speaks(script: str) -> None:
    """SIGKILL to a Python program when it has written its first line."""
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline()
        program.kill()


def test_what_a_killed_preparation_leaves_is_ended_and_deleted_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each left a broker that ran for ever, and what it had written."""
    fetched = jars.kafka_jars()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "sidings"
    cache.mkdir()
    (cache / fetched.name).symlink_to(fetched)
    kill_once_it_speaks(
        "from sidings.devstack import prepared\n"
        "prepared._use = lambda _: input('the broker runs\\n')\n"
        "prepared.prepare()\n"
    )
    [pid_file] = cache.glob("*/broker/kafka-1.pid")
    left = psutil.Process(json.loads(pid_file.read_text())["pid"])
    try:

        def start(broker: Broker) -> None:
            assert gone(left)
            assert {path.name for path in broker.directory.parent.iterdir()} == {"made"}
            raise DevstackError("enough")

        monkeypatch.setattr(Broker, "start", start)
        said: list[str] = []
        prepare(said.append)
        assert said[-1].endswith("enough")
        assert [path.name for path in cache.iterdir() if path.is_dir()] == [fetched.name]
    finally:
        if not gone(left):
            left.kill()


def test_what_a_killed_fetch_leaves_is_deleted_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kill_once_it_speaks(
        "from sidings.devstack import jars\njars._fetch = lambda *_: input('Ivy is at work\\n')\njars.kafka_jars()\n"
    )
    assert [path for path in (tmp_path / "sidings").iterdir() if path.is_dir()]
    monkeypatch.setattr(jars, "_fetch", lambda _, work, __: (work / "jars").mkdir())
    fetched = jars.kafka_jars()
    assert [path for path in (tmp_path / "sidings").iterdir() if path.is_dir()] == [fetched]


@pytest.mark.chaos
def test_three_brokers_go_on_while_one_is_dead(own_kafka):
    kafka: Kafka = own_kafka(brokers=3)
    config = {"min.insync.replicas": "2"}
    asyncio.run(create_topic(kafka.bootstrap, "numbers", partitions=1, replicas=3, config=config))
    for node in (1, 2):
        kafka.broker(node).kill()
        asyncio.run(send(kafka.bootstrap, "numbers", str(node).encode()))
        kafka.broker(node).start()
    assert asyncio.run(received(kafka.bootstrap, "numbers")) == [b"1", b"2"]
    with pytest.raises(DevstackError, match="there is no broker 4"):
        kafka.broker(4)
    with pytest.raises(ServerStateError, match="holds a cluster of 3"):
        Kafka(kafka.directory, brokers=1).start()


@pytest.mark.long
def test_the_secured_listener_wants_its_certificate_authority_and_its_password(own_kafka):
    kafka: Kafka = own_kafka(secure=True)
    security = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": kafka.username,
        "sasl_plain_password": kafka.password,
        "ssl_context": ssl.create_default_context(cafile=str(kafka.ca_file)),
    }
    asyncio.run(create_topic(kafka.bootstrap, "secrets", partitions=1))
    asyncio.run(send(kafka.secure_bootstrap, "secrets", b"hidden", **security))
    assert asyncio.run(received(kafka.secure_bootstrap, "secrets", **security)) == [b"hidden"]

    for wrong in ({"sasl_plain_password": "guess"}, {"ssl_context": ssl.create_default_context()}):
        with pytest.raises(KafkaError):
            asyncio.run(send(kafka.secure_bootstrap, "secrets", b"forged", **(security | wrong)))
    assert asyncio.run(received(kafka.bootstrap, "secrets")) == [b"hidden"]


@pytest.mark.long
def test_a_path_may_have_letters_of_any_language_and_commas(
    sidings_devstack_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """Kafka wrote its data beside the devstack, or did not start: it reads its settings as Latin-1, and lists."""
    monkeypatch.setenv("LC_ALL", "C")
    cache = locations.cache_directory()
    within = sidings_devstack_directory / f"größe, klein-{os.urandom(4).hex()}"
    within.mkdir()
    (within / "sidings").symlink_to(cache)  # Kafka's jars
    monkeypatch.setenv("XDG_CACHE_HOME", str(within))
    monkeypatch.setattr(broker, "prepared", lambda: within / "nothing")  # so that Kafka's own tool is run, too
    kafka = Kafka(within / "ŁÓDŹ", secure=True)
    try:
        kafka.start()
        asyncio.run(create_topic(kafka.bootstrap, "kept", partitions=1))
        asyncio.run(send(kafka.bootstrap, "kept", b"1"))
        assert list(kafka.directory.glob("broker-1/data/kept-0/*.log"))
        assert "kept" in kafka.broker(1).log.read_text()
        kafka.stop()
        kafka.start()
        assert asyncio.run(received(kafka.bootstrap, "kept")) == [b"1"]
    finally:
        kafka.remove()


# -- fetching


def test_processes_that_need_the_jars_at_once_fetch_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fetched: list[Path] = []
    waiting: list[str] = []
    go_on = threading.Event()

    def fetch(_jars: object, work: Path, _report: object) -> None:
        assert go_on.wait(SECONDS)
        (work / "jars").mkdir()
        fetched.append(work)

    monkeypatch.setattr(jars, "_fetch", fetch)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(jars.kafka_jars(waiting.append))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: len(waiting) == 2, timeout=SECONDS)
    go_on.set()
    for thread in threads:
        thread.join(SECONDS)
    assert len(fetched) == 1
    assert found == [tmp_path / "sidings" / f"kafka-{jars.KAFKA_VERSION}"] * 3
    assert not fetched[0].exists()


def test_a_fetch_that_fails_leaves_nothing_that_looks_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = "mkdir jars; touch jars/kafka_2.13-0.jar; echo the network is gone; exit 1"
    monkeypatch.setattr(jars, "_ivy_command", lambda *_: ["sh", "-c", script])
    with pytest.raises(DevstackError, match="the network is gone") as failed:
        jars.kafka_jars(lambda _: None)
    assert [path.name for path in (tmp_path / "sidings").iterdir() if path.is_dir()] == []
    for remedy in ("JAVA_TOOL_OPTIONS", "ivysettings.xml", str(tmp_path / "sidings" / f"kafka-{jars.KAFKA_VERSION}")):
        assert remedy in str(failed.value)


def test_a_fetch_whose_connection_stalls_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was waited for without end, by all that need the jars, and none of them said a word."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jars, "SILENT_SECONDS", 5)
    script = "mkdir jars; touch jars/kafka_2.13-0.jar; echo half; exec sleep 1000"
    monkeypatch.setattr(jars, "_ivy_command", lambda *_: ["sh", "-c", script])
    with pytest.raises(DevstackError, match=r"(?s)half.*killed: it said nothing for 5 seconds"):
        jars.kafka_jars(lambda _: None)
    assert [path.name for path in (tmp_path / "sidings").iterdir() if path.is_dir()] == []


def test_a_fetch_that_speaks_now_and_then_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jars, "SILENT_SECONDS", 3)
    script = "for _ in 1 2 3 4 5 6 7 8; do echo more; sleep 0.5; done"
    assert jars._run(["sh", "-c", script], tmp_path, lambda _: None) == ["more"] * 8


def test_a_cache_may_have_letters_of_any_language_in_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ivy did not find there what it was to do; in brackets it saw parts of a pattern."""
    monkeypatch.setenv("LC_ALL", "C")
    ivy = jars._ivy_jar() or pytest.skip("Ivy is part of pyspark")
    work = tmp_path / "größe, [x]"
    work.mkdir()
    of_nothing = jars.JarSet("nothing", "nothing", (), witness="", size="")
    said = jars._run(jars._ivy_command(of_nothing, ivy, work), work, lambda _: None)
    assert [line for line in said if "not found" in line or "error" in line.lower()] == []
    assert any("retrieving" in line for line in said), said
    assert list((work / "cache").iterdir())


SETTINGS_OF_IVY = """<ivysettings>
  <settings defaultResolver="own"/>
  <resolvers><ibiblio name="own" m2compatible="true" root="{repository}/"/></resolvers>
</ivysettings>
"""
POM = """<project><modelVersion>4.0.0</modelVersion>
  <groupId>sidings.test</groupId><artifactId>own</artifactId><version>1</version>
</project>
"""


def test_ivy_fetches_from_the_repository_that_the_users_settings_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By itself it reads no settings: where only an internal repository can be reached, nothing could be fetched."""
    ivy = jars._ivy_jar() or pytest.skip("Ivy is part of pyspark")
    published = tmp_path / "repository" / "sidings" / "test" / "own" / "1"
    published.mkdir(parents=True)
    (published / "own-1.pom").write_text(POM)
    (published / "own-1.jar").write_bytes(b"the user's own")
    settings = tmp_path / ".ivy2" / "ivysettings.xml"
    settings.parent.mkdir()
    settings.write_text(SETTINGS_OF_IVY.format(repository=(tmp_path / "repository").as_uri()))
    monkeypatch.setenv("HOME", str(tmp_path))
    work = tmp_path / "work"
    work.mkdir()
    own = jars.JarSet("own", "own", (("sidings.test", "own", "1"),), witness="own-", size="")
    said = jars._run(jars._ivy_command(own, ivy, work), work, lambda _: None)
    fetched = work / "jars" / "own-1.jar"
    assert fetched.exists(), said
    assert fetched.read_bytes() == b"the user's own"


def test_jars_that_are_not_those_that_were_tested_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ivy and Maven compare them with what the repository says, which may be anybody's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = "mkdir jars; touch jars/kafka_2.13-4.3.1.jar jars/of-another-version-1.0.jar"
    monkeypatch.setattr(jars, "_ivy_command", lambda *_: ["sh", "-c", script])
    with pytest.raises(DevstackError, match=r"other jars than those .*: kafka_2\.13-4\.3\.1\.jar; nothing is kept"):
        jars.kafka_jars(lambda _: None)
    assert [path.name for path in (tmp_path / "sidings").iterdir() if path.is_dir()] == []


def test_the_jars_that_are_here_are_those_that_were_tested():
    assert jars._not_as_tested([*jars.kafka_jars().glob("*.jar"), *jars.spark_jars()]) == []
    if "SIDINGS_KAFKA_VERSION" not in os.environ:
        known = (Path(jars.__file__).parent / "jars.sha256").read_text().split()
        assert {jar.name for jar in jars.kafka_jars().glob("*.jar")} <= set(known)


def test_without_ivy_and_maven_the_error_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jars, "_ivy_jar", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolMissingError, match=r"pyspark.*maven"):
        jars.kafka_jars(lambda _: None)


def test_a_start_that_cannot_be_prepared_keeps_nobody_from_what_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As where the cache may only be read: `fetch`, and with it `make`, failed although all was there."""
    fetched, said = jars.kafka_jars(), list[str]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "sidings").mkdir()
    (tmp_path / "sidings" / fetched.name).symlink_to(fetched)
    folder = broker.prepared()
    folder.with_name(f"{folder.name}.lock").mkdir()  # so that it can be made by nobody, a superuser either
    prepare(said.append)
    assert [line.partition(":")[0] for line in said] == ["Kafka's start is not prepared"]


def test_ports_lie_below_those_of_outgoing_connections():
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert all(port in PORTS for port in ports)
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if outgoing.exists() and int(outgoing.read_text().split()[0]) == 32768:  # Linux's default
        assert max(PORTS) < 32768


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", free_ports(1)[0]))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_that_is_taken_before_the_first_start_of_a_postgres_is_chosen_anew(
    new_postgres: Postgres, taken_port: int, monkeypatch: pytest.MonkeyPatch
):
    """It was kept, and no start succeeded; one that has once been told to others stays."""
    ports = [taken_port]
    monkeypatch.setattr(postgres, "free_port", lambda: ports.pop() if ports else free_ports(1)[0])
    new_postgres.start()
    assert query(new_postgres.dsn, "SELECT 1") == 1

    kept = new_postgres.port
    new_postgres.stop()
    with socket.create_server(("127.0.0.1", kept)), pytest.raises(ServerStartError, match="already in use"):
        new_postgres.start()
    assert new_postgres.port == kept


@pytest.mark.long
def test_ports_that_are_taken_before_the_first_start_of_a_kafka_are_chosen_anew(
    sidings_server_directory, taken_port: int, monkeypatch: pytest.MonkeyPatch
):
    given = Kafka(sidings_server_directory("new-kafka"), port=taken_port)
    try:
        with pytest.raises(ServerStartError, match="already in use"):  # a port that was asked for stays
            given.start()
    finally:
        given.remove()

    chosen = [[taken_port]]
    cluster = Kafka(sidings_server_directory("new-kafka"))
    monkeypatch.setattr(kafka, "free_ports", lambda count: [*(chosen.pop() if chosen else []), *free_ports(count)])
    try:
        cluster.start()
        assert answers(cluster.broker(1).plan.port)
    finally:
        cluster.remove()


# -- servers that the environment names, and the fixtures


def test_servers_that_the_environment_names_are_used_instead_of_own_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SIDINGS_POSTGRES", "postgresql://somewhere/else")
    monkeypatch.setenv("SIDINGS_KAFKA", "somewhere:9092")
    endpoints = devstack.ensure(tmp_path / "stack")
    assert endpoints == devstack.Endpoints("postgresql://somewhere/else", "somewhere:9092")
    assert not (tmp_path / "stack").exists()
    named = {"SIDINGS_POSTGRES": endpoints.postgres, "SIDINGS_KAFKA": endpoints.kafka}
    done = run_devstack(tmp_path / "stack", "up", **named)
    assert [line.split()[0] for line in done.stderr.splitlines()] == list(named)  # that none is started for them


def test_the_fixtures_use_the_server_that_the_environment_names_and_clean_up(tmp_path: Path, sidings_postgres: str):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["sidings.devstack.fixtures"]\n')
    (tmp_path / "test_user.py").write_text(
        "import asyncpg, os\n"
        "async def test_of_a_user(database):\n"
        "    connection = await asyncpg.connect(database)\n"  # left open on purpose
        "    name = await connection.fetchval('SELECT current_database()')\n"
        "    assert await connection.fetchval('SELECT count(*) FROM sidings.job') == 0\n"
        "    open('name', 'w').write(name)\n"
    )
    environment = os.environ | {
        "SIDINGS_POSTGRES": sidings_postgres,
        "SIDINGS_DEVSTACK_HOME": str(tmp_path / "home"),
    }
    arguments = ["-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "home").exists()  # no server of its own was started
    name = (tmp_path / "name").read_text()
    assert name.startswith("test_of_a_user_")
    assert query(sidings_postgres, f"SELECT count(*) FROM pg_database WHERE datname = '{name}'") == 0


def test_two_services_of_one_session_have_databases_of_their_own(tmp_path: Path, sidings_postgres: str):
    """The tests of the second one got databases of the first one's, whichever that was."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["sidings.devstack.fixtures"]\n')
    for service in ("billing", "tracker"):
        (tmp_path / service).mkdir()
        (tmp_path / service / "conftest.py").write_text(
            f"import pytest\n@pytest.fixture(scope='session')\ndef sidings_service():\n    return '{service}'\n"
        )
        (tmp_path / service / f"test_{service}.py").write_text(
            "import asyncpg\n"
            "async def test_owner(database):\n"
            "    connection = await asyncpg.connect(database)\n"
            f"    assert await connection.fetchval('SELECT name FROM sidings.service') == '{service}'\n"
            "    await connection.close()\n"
        )
    default = (tmp_path / "billing" / "test_billing.py").read_text().replace("billing", "test")
    (tmp_path / "test_default.py").write_text(default)
    arguments = ["-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"SIDINGS_POSTGRES": sidings_postgres, "SIDINGS_DEVSTACK_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_a_postgres_of_our_own_is_not_taken_for_another_where_kafka_was_never_started(
    stack_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` started nothing, and said where the server would be."""
    stack = devstack.Stack(stack_directory)
    stack.postgres.start()
    stack.postgres.stop()
    monkeypatch.setenv("SIDINGS_POSTGRES", stack.postgres.dsn)
    monkeypatch.setenv("SIDINGS_KAFKA", "127.0.0.1:1")
    assert stack.up() == devstack.Endpoints(stack.postgres.dsn, "127.0.0.1:1")
    assert query(stack.postgres.dsn, "SELECT 1") == 1


async def test_database_has_the_schema_and_empty_database_has_nothing(database: str, empty_database: str):
    found: list[bool] = []
    for dsn in (database, empty_database):
        connection = await asyncpg.connect(dsn)
        found.append(await connection.fetchval("SELECT to_regclass('sidings.job') IS NOT NULL"))
        await connection.close()
    assert found == [True, False]


@pytest.mark.parametrize(
    ("server", "dsn"),
    [
        ("postgresql:///postgres", "postgresql:///fresh"),
        ("postgresql://?host=/var/run/postgresql", "postgresql:///fresh?host=/var/run/postgresql"),
        ("postgresql://me:a@db:5433/postgres?sslmode=require", "postgresql://me:a@db:5433/fresh?sslmode=require"),
    ],
)
def test_a_database_of_a_server_without_a_host_has_a_dsn(server: str, dsn: str):
    """Of a Unix socket, it was `postgresql:/fresh`, which nothing takes."""
    assert database_dsn(server, "fresh") == dsn


async def test_a_database_is_dropped_whoever_is_connected(sidings_postgres: str):
    dsn = await create_database(sidings_postgres, f"busy_{os.urandom(4).hex()}")
    connection = await asyncpg.connect(dsn)
    await drop_database(sidings_postgres, dsn)
    with pytest.raises(asyncpg.InvalidCatalogNameError):
        await asyncpg.connect(dsn)
    connection.terminate()


async def test_topics_have_unique_names_their_partitions_and_their_settings(topic, sidings_kafka: str):
    first = await topic("positions", partitions=12)
    second = await topic("positions", partitions=3, config={"cleanup.policy": "compact"})
    assert first != second
    async with administering(sidings_kafka) as admin:
        described = await admin.describe_topics([first, second])
    assert [len(one["partitions"]) for one in described] == [12, 3]


async def test_a_topic_that_kafka_refuses_says_why(topic):
    with pytest.raises(DevstackError, match=r"(?i)replication"):
        await topic("positions", replicas=5)
