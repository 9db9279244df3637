"""The command that analyses a history: what it says when it cannot, and what it leaves behind when it is stopped."""

import asyncio
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
from sidings.devstack import spark_jars
from sidings.spark_analytics.history.__main__ import main
from sidings.spark_analytics.history.files import claim_archive

from .history_support import Attempt, stored
from .spark_support import SHORT_LIVED
from .support import connected, eventually, value

NOW = datetime.now(UTC).replace(microsecond=0)
SINCE = f"{NOW - timedelta(days=2):%Y-%m-%d}"

pytestmark = pytest.mark.timeout(600)  # Spark starts


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that it says when it fails."""
    assert main([str(a) for a in arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def other(dsn: str, **parts: str) -> str:
    return urlunsplit(urlsplit(dsn)._replace(**parts))


@pytest.mark.parametrize(
    ("dsn", "reason"),
    [
        ("mysql://u:hush@localhost/db", "this is no DSN of Postgres"),
        ("tracker", "this is no DSN of Postgres"),
        ("", "this is no DSN of Postgres"),  # and not that of the environment
        ("postgresql://u:hush@[::1/db", "this is no DSN of Postgres"),
        ("postgresql://u:hu/sh@localhost/db", "write / as %2F"),
        ("postgresql://u:hush@localhost:port/db", "its host or port cannot be read"),
        ("postgresql://u:hush@localhost/db?sslmode=hush", "the DSN cannot be used"),
        ("postgresql://u:hush@localhost/db?sslpassword=hush", "the DSN's parameter 'sslpassword'"),
        ("postgresql://u:hush@localhost", "names no database"),
        ("postgresql://:hush@localhost/db", "names no user"),
        ("postgresql:///db?host=/tmp", "a Unix socket"),
        ("postgresql://u:hush@127.0.0.1:1/db", "Postgres cannot be reached"),
        ("postgresql://u:hush@nowhere.invalid/db", "Postgres cannot be reached"),
    ],
)
def test_a_dsn_that_cannot_be_used_is_told_without_its_password(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsn: str, reason: str
):
    monkeypatch.delenv("PGUSER", raising=False)
    monkeypatch.setenv("SIDINGS_POSTGRES", "postgresql://u:hush@127.0.0.1:1/another")
    text = said(capsys, "--postgres", dsn, "--from", SINCE, "--out", tmp_path / "out")
    assert reason in text
    assert "hush" not in text.replace("sslmode=hush", "")
    assert not list(tmp_path.iterdir())
    assert "hush" not in said(capsys, "archive", "--postgres", dsn, "--to", tmp_path / "archive")
    assert not list(tmp_path.iterdir())


def test_a_database_that_cannot_be_read_is_told(
    capsys: pytest.CaptureFixture[str], empty_database: str, database: str, tmp_path: Path, monkeypatch
):
    common = ("--from", SINCE, "--out", tmp_path / "out")
    assert "no schema 'sidings' of Sidings" in said(capsys, "--postgres", empty_database, *common)
    assert "no schema 'other' of Sidings" in said(capsys, "--postgres", database, "--schema", "other", *common)
    assert "schema='Sidings' is not usable" in said(capsys, "--postgres", database, "--schema", "Sidings", *common)
    with monkeypatch.context() as environment:
        environment.setenv("SIDINGS_SCHEMA", "another")
        assert "no schema 'another' of Sidings" in said(capsys, "--postgres", database, *common)
        archive = ("archive", "--postgres", database, "--to", tmp_path / "archive")
        assert "no schema 'another' of Sidings" in said(capsys, *archive)
    assert "no schema" in said(capsys, "archive", "--postgres", empty_database, "--to", tmp_path / "archive")
    missing = said(capsys, "--postgres", other(database, path="/none"), *common)
    assert 'database "none" does not exist' in missing
    assert not list(tmp_path.iterdir())


async def test_a_role_without_rights_is_told_which_it_lacks(
    capsys: pytest.CaptureFixture[str], database: str, tmp_path: Path
):
    await stored(database, [an_attempt(NOW - timedelta(days=2))])
    async with connected(database) as connection:
        role = f"reader_{os.getpid()}"
        await connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA sidings TO {role}")
        try:
            parts = urlsplit(database)
            dsn = other(database, netloc=f"{role}:x@{parts.hostname}:{parts.port}")

            def fails(*arguments: object) -> str:
                return said(capsys, *arguments)

            text = await asyncio.to_thread(fails, "--postgres", dsn, "--from", SINCE, "--out", tmp_path / "out")
            assert "may not read sidings.job_history: GRANT it SELECT" in text
            await connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA sidings TO {role}")
            text = await asyncio.to_thread(fails, "archive", "--postgres", dsn, "--to", tmp_path / "archive")
            assert "must own them" in text
        finally:
            await connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_folder_that_cannot_be_used_is_told(capsys: pytest.CaptureFixture[str], database: str, tmp_path: Path):
    source = ("--postgres", database, "--from", SINCE)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    assert "exists already" in said(capsys, *source, "--out", tmp_path / "there")
    text = said(capsys, *source, "--out", tmp_path / "file" / "out")
    assert "File exists" in text
    assert "Postgres" not in text
    assert "is no archive of a history" in said(capsys, *source, "--archive", tmp_path, "--out", tmp_path / "out")
    (tmp_path / "there" / "sidings-history.json").write_text("{")
    assert "is damaged" in said(capsys, *source, "--archive", tmp_path / "there", "--out", tmp_path / "out")
    text = said(capsys, "archive", "--postgres", database, "--to", tmp_path / "file" / "archive")
    assert "Not a directory" in text
    assert "Postgres" not in text


def test_a_server_that_does_not_answer_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch):
    """A limit that runs out has no text of its own: nothing was said of it."""
    monkeypatch.setattr("sidings.spark_analytics.history.database._CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"postgresql://u:hush@127.0.0.1:{silent.getsockname()[1]}/db"
        assert "cannot be reached: TimeoutError;" in said(capsys, "archive", "--postgres", dsn, "--to", tmp_path / "to")


@pytest.mark.parametrize("room", [0, 5])  # for the mark of the directory, or for nothing
async def test_an_archive_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str], database: str, tmp_path: Path, room: int
):
    """It said "No space left on device", and not where."""
    await stored(database, [an_attempt(NOW - timedelta(days=2))])
    directory = tmp_path / "archive"
    if room:
        claim_archive(directory, await value(database, "SELECT name FROM sidings.service"), entered=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # to write more fails, as where the disk is full
    try:
        text = await asyncio.to_thread(said, capsys, "archive", "--postgres", database, "--to", directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{directory} cannot be written: [Errno 27]" in text
    assert not [file for file in directory.rglob(".*") if file.is_file()], "nothing is left behind"
    assert await asyncio.to_thread(main, ["archive", "--postgres", database, "--to", str(directory)]) == 0


def test_arguments_without_sense_are_told_before_anything_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    source = ("--postgres", "postgresql://u@127.0.0.1:1/db", "--out", tmp_path / "out")
    assert "the window is empty" in said(capsys, *source, "--from", "2026-03-02", "--to", "2026-03-01")
    assert "give both --compare-from" in said(capsys, *source, "--from", SINCE, "--compare-from", "2026-03-01")
    assert "concurrency=0" in said(capsys, *source, "--from", SINCE, "--concurrency", "0")
    assert "utilisation=nan" in said(capsys, *source, "--from", SINCE, "--utilisation", "nan")


def an_attempt(ended: datetime, job: int = 1) -> Attempt:
    return Attempt(job, 1, "succeeded", ended - timedelta(seconds=2), ended, ended - timedelta(seconds=1))


@asynccontextmanager
async def command(
    *arguments: object, temporary: Path, together: bool = False, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command in a process of its own, its temporary files in that directory; killed at the end. together: it leads
    a group of processes, so that all of them can be sent a signal."""
    environment |= {
        "TMPDIR": str(temporary),
        "SIDINGS_SPARK_JARS": ",".join(map(str, spark_jars())),
        "PYSPARK_SUBMIT_ARGS": f"--driver-java-options '{SHORT_LIVED}' pyspark-shell",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidings.spark_analytics.history", *map(str, arguments),
        env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"} | environment, start_new_session=together,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_without_java_it_says_so(database: str, tmp_path: Path):
    source = ("--postgres", database, "--from", SINCE, "--out", tmp_path / "out")
    async with command(*source, temporary=tmp_path, JAVA_HOME=str(tmp_path / "nowhere")) as process:
        _, err = await process.communicate()
    assert process.returncode == 1
    last = err.decode().splitlines()[-1]
    assert last.startswith("error: Spark does not start: ")
    assert "it needs Java 17 or newer" in last
    assert not list(tmp_path.iterdir())


@pytest.mark.chaos
async def test_stopped_while_it_waits_for_postgres_it_leaves_nothing_behind(database: str, tmp_path: Path):
    await stored(database, [an_attempt(NOW - timedelta(days=1))])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    source = ("--postgres", database, "--from", SINCE, "--out", tmp_path / "out")
    async with connected(database) as connection, connection.transaction():
        await connection.execute(f"LOCK TABLE sidings.job_history_{NOW - timedelta(days=1):%Y%m%d}")
        async with command(*source, temporary=temporary) as process:
            waits = (
                "SELECT count(*) FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database "
                "WHERE datname = current_database())"
            )
            await eventually(lambda: connection.fetchval(waits), "it waits for the lock", seconds=300)
            assert list(temporary.glob("sidings-history-*"))
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "error: interrupted, nothing is left behind"
    await eventually(lambda: not list(temporary.iterdir()), "Java has gone too")
    assert list(tmp_path.iterdir()) == [temporary]


@pytest.mark.chaos
async def test_stopped_while_spark_reads_it_leaves_nothing_behind(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    await stored(database, [an_attempt(NOW - timedelta(days=1))])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    source = ("--postgres", database, "--from", SINCE, "--out", tmp_path / "out")
    stalled = "CREATE FUNCTION stall() RETURNS boolean LANGUAGE sql VOLATILE AS 'SELECT pg_sleep(600) IS NOT NULL'"
    async with connected(database) as connection:
        await connection.execute(stalled)
        await connection.execute("ALTER TABLE sidings.job_history ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        await connection.execute("CREATE POLICY stall ON sidings.job_history USING (stall())")
        role = f"slow_{os.getpid()}"
        await connection.execute(
            f"CREATE ROLE {role} LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA sidings TO {role}; "
            f"GRANT SELECT ON ALL TABLES IN SCHEMA sidings TO {role}"
        )
        parts = urlsplit(database)
        dsn = other(database, netloc=f"{role}:expired@{parts.hostname}:{parts.port}")
        monkeypatch.setenv("SIDINGS_POSTGRES_PASSWORD", "x")  # which stands for the one of the DSN
        try:
            async with command("--postgres", dsn, *source[2:], temporary=temporary) as process:
                sleeps = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1 AND wait_event = 'PgSleep'"
                await eventually(lambda: connection.fetchval(sleeps, role), "Spark reads", seconds=300)
                process.terminate()
                _, err = await process.communicate()
            assert process.returncode == 130
            # Not always the last line: the task that was reading may still tell its own end.
            assert "error: interrupted, nothing is left behind" in err.decode().splitlines()
            await eventually(lambda: not list(temporary.iterdir()), "Java has gone too")
            assert list(tmp_path.iterdir()) == [temporary]
        finally:
            await connection.execute(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = $1", role
            )
            await connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.chaos  # long: Spark starts each time
@pytest.mark.parametrize("everyone", [False, True])
async def test_stopped_while_spark_works_it_leaves_nothing_behind(database: str, tmp_path: Path, everyone: bool):
    """everyone: Java is sent the signal too, as systemd does it."""
    await stored(database, [an_attempt(NOW - timedelta(days=1), job) for job in range(1_000)])
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    source = ("--postgres", database, "--from", SINCE, "--out", tmp_path / "out")
    async with command(*source, temporary=temporary, together=True) as process:
        assert process.stderr
        while not (line := await process.stderr.readline()).startswith(b"wrote "):
            assert line, "it has ended"
        [draft] = tmp_path.glob(".out-*")
        assert list(draft.iterdir())
        if everyone:
            os.killpg(process.pid, signal.SIGTERM)
        else:
            process.terminate()
        _, err = await process.communicate()
    assert process.returncode == 130
    # Not always the last line: a thread that asks Java for something may still tell that it has gone.
    assert "error: interrupted, nothing is left behind" in err.decode().splitlines()
    assert list(tmp_path.iterdir()) == [temporary]
    await eventually(lambda: not list(temporary.iterdir()), "Java has gone too")
