"""The command line as a process: the executable, a terminal, connections, schemas, and its messages."""

import asyncio
import fcntl
import importlib
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from sidings import ConfigurationError, PostgresSettings, PostgresUnavailable
from sidings.cli.consumers import kafka_settings
from sidings.cli.session import open_session, postgres_settings
from sidings.cli.status import status
from sidings.schema import migrations

from .admin_support import a_job, some_jobs
from .cli_support import EXECUTABLE, cli, cli_json, executed, refused
from .faulty_proxy import Moment, proxied
from .support import SECONDS, connected, eventually, fetch, jobs_left, value
from .test_cli import execute

LAST = migrations()[-1].version


# -- the executable -----------------------------------------------------------------------------------------------


async def test_an_error_is_one_line_whatever_a_library_logs_beside_it(database: str):
    await execute(database, "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ('etas', 0, 5)")
    reset = ("consumers", "reset", "etas", "--to", "latest", "--yes", "--kafka", "127.0.0.1:1")
    result = await executed(*reset, SIDINGS_POSTGRES=database)
    assert result.returncode == 3
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the partitions of 'etas' could not be asked for")


async def test_the_executable_looks_and_acts(database: str):
    ids = await some_jobs(database, 2, "held")
    listed = await executed("jobs", "list", "--json", SIDINGS_POSTGRES=database)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert [job["id"] for job in json.loads(listed.stdout)["jobs"]] == ids
    refusal = await executed("jobs", "release", *ids, "--postgres", database)
    assert (refusal.returncode, refusal.stdout) == (1, "")
    assert "this would release 2 jobs; nothing was done: give --yes" in refusal.stderr
    done = await executed("jobs", "release", *ids, "--yes", "--postgres", database, "--by", "bob")
    assert done.returncode == 0, done.stderr
    assert await value(database, "SELECT count(*) FROM sidings.job WHERE held IS NULL") == 2
    assert await value(database, "SELECT count(*) FROM sidings.audit WHERE actor = 'bob'") == 2


@pytest.mark.parametrize(("answer", "left"), [("y", 0), ("n", 2), ("", 2)])
async def test_on_a_terminal_a_person_is_asked(database: str, answer: str, left: int):
    await some_jobs(database, 2)
    code, screen = await on_a_terminal(database, answer, "jobs", "cancel", "--type", "ride")
    assert "Cancel 2 jobs? [y/N]:" in screen
    assert code == (0 if left == 0 else 1)
    assert await jobs_left(database) == left


@pytest.mark.parametrize("verb", ["cancel", "requeue"])
async def test_ctrl_c_at_a_question_ends_it_and_nothing_was_done(database: str, verb: str):
    """The terminal was read on, and a second one ended it with another code."""
    ids = await some_jobs(database, 2)
    if verb == "requeue":
        await cli(database, "jobs", "discard", *ids, "--yes")
    left = await jobs_left(database)
    code, screen = await on_a_terminal(database, "\x03", "jobs", verb, "--type", "ride")
    assert code == 130
    assert screen.splitlines()[-1] == "nothing was done"
    assert "Traceback" not in screen
    assert await jobs_left(database) == left


async def test_a_table_on_a_terminal_stays_within_it_and_keeps_ids_whole(database: str):
    await some_jobs(database, 1, origin="a-topic-with-a-long-name/17", group="g" * 80)
    _, screen = await on_a_terminal(database, "", "jobs", "list")
    lines = screen.splitlines()
    assert any("a-topic-with-a-long-name/17" in line for line in lines)
    assert max(len(line) for line in lines) <= 100
    assert screen.count("g") >= 80


async def test_columns_of_which_nothing_is_known_are_left_out_on_a_terminal(database: str):
    await some_jobs(database, 1)
    _, screen = await on_a_terminal(database, "", "jobs", "list")
    assert "waiting" in screen
    assert "cause" not in screen
    await some_jobs(database, 1, "blocked")
    _, screen = await on_a_terminal(database, "", "jobs", "list")
    assert "cause" in screen


async def test_colours_are_left_out_when_the_environment_says_so(database: str):
    await some_jobs(database, 1, "blocked")
    red = "\x1b[31m"
    for no_color, expected in (("", True), ("1", False)):
        _, screen = await on_a_terminal(database, "", "jobs", "list", NO_COLOR=no_color, TERM="xterm-256color")
        assert "blocked" in screen
        assert (red in screen) is expected


async def test_a_watch_shows_it_again_until_ctrl_c(database: str):
    code, screen = await on_a_terminal(database, "", "status", "--watch", "0.2", after="no jobs", TERM="xterm")
    assert code == 130
    assert screen.count("service test") > 1
    assert screen.count("\x1b[2J") > 1  # each on an empty screen
    assert "Traceback" not in screen


async def test_a_watch_in_a_pipe_is_a_document_each_time(database: str):
    process = await watching(database, "--json")
    decoder, text, documents = json.JSONDecoder(), "", 0
    async with asyncio.timeout(SECONDS):
        while documents < 2:
            text += (await process.stdout.read(4096)).decode()  # type: ignore[union-attr]
            try:
                document, end = decoder.raw_decode(text)
            except json.JSONDecodeError:
                continue
            assert document["service"] == "test"
            documents, text = documents + 1, text[end:].lstrip()
    process.send_signal(signal.SIGINT)
    _, errors = await asyncio.wait_for(process.communicate(), SECONDS)
    assert (process.returncode, errors) == (130, b"")


async def test_a_watch_ends_where_the_server_ceases_to_answer(
    database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sidings.cli.session._STATEMENT_SECONDS", 2.0)
    async with proxied(database) as proxy, open_session(PostgresSettings(dsn=proxy.dsn)) as session:
        shows = asyncio.create_task(status(session, watch=1.0))
        await eventually(lambda: "service test" in capsys.readouterr().out)  # it waits for its next look
        proxy.silence()
        with pytest.raises(PostgresUnavailable, match="Postgres did not answer"):
            await asyncio.wait_for(shows, 15)


async def test_a_watch_ends_where_the_end_of_another_statement_is_not_answered(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """asyncpg keeps a statement for five minutes, and waited for the answer to its end, for ever."""
    monkeypatch.setattr("sidings.cli.session._STATEMENT_SECONDS", 1.0)
    async with proxied(database) as proxy, open_session(PostgresSettings(dsn=proxy.dsn)) as session:
        for number in range(100):
            await session.connection.fetch(f"SELECT {number}")
        proxy.arm("close", Moment.SILENT_BEFORE)
        shows = asyncio.create_task(session.look_at_clock())
        await asyncio.wait([shows], timeout=12)
        assert isinstance(shows.exception() if shows.done() else None, PostgresUnavailable)


async def test_a_table_that_somebody_has_locked_is_told_of(database: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sidings.cli.session._STATEMENT_SECONDS", 4.0)
    monkeypatch.setattr("sidings.cli.session._LOCK_TIMEOUT", "SET lock_timeout = '100ms'", raising=False)
    async with connected(database) as other, other.transaction():
        await other.execute("LOCK TABLE sidings.job")
        for command in (["status"], ["groups", "list"], ["jobs", "list"]):
            assert "has a table locked" in await refused(database, *command)


async def test_a_watch_ends_where_the_server_closes_its_connection(database: str):
    process = await watching(database, every=0.6)
    assert process.stdout is not None
    async with asyncio.timeout(SECONDS):
        while b"no jobs" not in await process.stdout.readline():
            pass
        idle = "WHERE datname = current_database() AND pid <> pg_backend_pid() AND state = 'idle'"
        await eventually(  # it waits for its next look
            lambda: fetch(database, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity {idle}")
        )
        _, errors = await process.communicate()
    assert process.returncode == 3, errors
    (line,) = errors.decode().splitlines()
    assert line.startswith("error: Postgres did not answer")


async def test_whoever_reads_only_the_beginning_ends_it_without_a_word(database: str):
    process = await watching(database)
    assert process.stdout is not None
    async with asyncio.timeout(SECONDS):
        assert (await process.stdout.readline()).startswith(b"service test")
        process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined] # as `head -1` does
        assert await process.stderr.read() == b""  # type: ignore[union-attr]
        assert await process.wait() == 1


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("status >/dev/full", "No space left on device"),
        ("jobs list --json >/dev/full", "No space left on device"),
        ("--version >/dev/full", "No space left on device"),
        ("jobs list >&-", "the standard output is closed"),
        ("jobs cancel --type ride <&-", "give --yes where nobody can be asked"),
    ],
)
async def test_where_nothing_can_be_written_or_asked_one_line_says_so(database: str, command: str, told: str):
    """It was a traceback."""
    await a_job(database)
    process = await asyncio.create_subprocess_shell(
        f"exec {EXECUTABLE} {command}",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"SIDINGS_POSTGRES": database},
    )
    _, errors = await asyncio.wait_for(process.communicate(), SECONDS)
    assert "Traceback" not in errors.decode()
    assert errors.decode().splitlines()[-1].startswith("error: ")
    assert (told in errors.decode(), process.returncode) == (True, 1)


@pytest.mark.parametrize("encoding", ["cp1252", "iso8859-1"])
async def test_what_an_encoding_lacks_is_escaped_and_changes_no_exit_code(database: str, encoding: str):
    """As that of a Windows console, or of a locale without UTF-8: one key in a list was a traceback, and the code 1."""
    await a_job(database, group="Łodz 🚚")
    environment = {"SIDINGS_POSTGRES": database, "PYTHONIOENCODING": encoding}
    listed = await executed("jobs", "list", **environment)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "\\ud83d\\ude9a" in listed.stdout
    document = await executed("jobs", "list", "--json", **environment)
    assert json.loads(document.stdout)["jobs"][0]["group"] == "Łodz 🚚"
    unknown = await executed("jobs", "list", "--state", "🚚", **environment)
    assert (unknown.returncode, unknown.stderr.count("Traceback")) == (2, 0)


async def watching(dsn: str, *arguments: str, every: float = 0.2) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    environment = {**os.environ, "SIDINGS_POSTGRES": dsn}
    return await asyncio.create_subprocess_exec(
        EXECUTABLE, "status", "--watch", str(every), *arguments, stdout=pipe, stderr=pipe, env=environment
    )


async def on_a_terminal(
    dsn: str, answer: str, *arguments: str, after: str | None = None, **more: str
) -> tuple[int, str]:
    """Run the executable on a pseudo-terminal of 100 columns, and answer what it asks: exit code and screen.

    after: Ctrl-C when this has been shown twice. more: of the environment.
    """
    primary, secondary = pty.openpty()
    environment = {**os.environ, "SIDINGS_POSTGRES": dsn, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", **more}
    process = await asyncio.create_subprocess_exec(
        *(EXECUTABLE, *arguments),
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is its own
    )
    os.close(secondary)
    try:
        async with asyncio.timeout(SECONDS):
            screen = await asyncio.to_thread(_converse, primary, answer, after)
            return await process.wait(), screen.replace("\r\n", "\n")
    finally:
        if process.returncode is None:
            process.kill()
        os.close(primary)


def _converse(terminal: int, answer: str, after: str | None) -> str:
    screen, answered = b"", False
    while True:
        try:
            part = os.read(terminal, 65_536)
        except OSError:  # its other end is closed: the process has ended
            return screen.decode()
        if not part:
            return screen.decode()
        screen += part
        if after is not None and not answered and screen.count(after.encode()) > 1:
            os.write(terminal, b"\x03")
            answered = True
        if not answered and b"[y/N]:" in screen:
            os.write(terminal, f"{answer}\n".encode())
            answered = True


async def test_without_its_libraries_it_names_the_extra():
    script = (
        "import sys\n"
        "sys.modules['typer'] = None\n"  # as Python marks a module that cannot be imported
        "from sidings.cli import main\n"
        "main()\n"
    )
    result = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert result.returncode == 1
    assert result.stderr == "error: the command line needs typer: pip install 'sidings[cli]'\n"


async def test_it_runs_as_a_module_and_tells_its_version():
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "sidings.cli", "--version"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.stdout.startswith("sidings 0.")


# Not pydantic: typer has a use for it, too.
SLOW = {"aiokafka", "asyncpg", "prometheus_client", "pydantic_settings", "pyspark", "tenacity"}


async def imported(*arguments: object, **environment: str) -> tuple[str, set[str]]:
    """Run a command in a process of its own: what it prints, and what of `SLOW` it has imported."""
    script = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr))\n"
        "from sidings.cli import main\n"
        "main()\n"
    )
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", script, *(str(argument) for argument in arguments)],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return result.stdout, SLOW & set(result.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [("--help",), ("jobs", "--help"), ("status", "--help"), ("--version",)])
async def test_help_does_not_wait_for_the_libraries_that_commands_use(arguments: tuple[str, ...]):
    shown, slow = await imported(*arguments)
    assert "sidings" in shown
    assert slow == set()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("sidings outbox re", {"retry", "release"}),
        ("sidings jobs list --state b", {"backing-off", "blocked"}),
        ("sidings jobs ended --outcome s", {"superseded"}),
    ],
)
async def test_the_completion_of_a_shell_does_not_wait_for_them_either(words: str, offered: set[str]):
    complete = {"_SIDINGS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    shown, slow = await imported(**complete)
    assert set(shown.split()) == offered
    assert slow == set()


async def test_what_has_nothing_to_do_with_kafka_does_not_import_its_client(database: str):
    (id,) = await some_jobs(database, 1)
    shown, slow = await imported("jobs", "list", "--json", SIDINGS_POSTGRES=database)
    assert [job["id"] for job in json.loads(shown)["jobs"]] == [id]
    assert "asyncpg" in slow
    assert "aiokafka" not in slow


async def test_the_devstack_s_commands_go_through(tmp_path: Path):
    result = await executed("dev", "status", "--directory", tmp_path)
    assert result.returncode == 1  # nothing runs there
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [["postgres", "absent"], ["kafka", "absent"]]
    assert (await executed("dev", "logs", "mysql", "--directory", tmp_path)).stderr.startswith(
        "error: there is no server"
    )


@pytest.mark.parametrize(
    ("arguments", "passed_on"),
    [
        (("up",), ["up", "--brokers", "1"]),
        (("up", "--brokers", "3", "--secure"), ["up", "--brokers", "3", "--secure"]),
        (("topic", "rides"), ["topic", "--partitions", "3", "--", "rides"]),
        (
            ("topic", "rides", "--partitions", "6", "--compacted"),
            ["topic", "--partitions", "6", "--compacted", "--", "rides"],
        ),
        (("down",), ["down"]),
        (("down", "--delete"), ["down", "--delete"]),
        (("logs", "kafka", "-n", "7"), ["logs", "--lines", "7", "kafka"]),
        *[((verb, "kafka-2"), [verb, "kafka-2"]) for verb in ("restart", "kill", "pause", "resume")],
        (("fetch",), ["fetch"]),
        (("fetch", "--spark"), ["fetch", "--spark"]),
    ],
)
async def test_the_devstack_gets_what_it_is_told_and_gives_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], passed_on: list[str]
):
    told: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        told.append(arguments)
        return 7

    monkeypatch.setattr("sidings.devstack.__main__.main", main)
    await cli(None, "dev", *arguments, exit_code=7)
    await cli(None, "dev", *arguments, "--directory", "here", exit_code=7)
    assert told == [passed_on, ["--directory", "here", *passed_on]]


async def test_an_empty_directory_is_not_the_devstack_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As of a variable that is not set: `dev down --delete` deleted the data of another one."""
    monkeypatch.setattr("sidings.devstack.stack.Stack.remove", lambda stack: pytest.fail(f"{stack.directory}"))
    monkeypatch.setenv("SIDINGS_DEVSTACK_HOME", str(tmp_path))
    assert "--directory: it is empty" in await refused(None, "dev", "down", "--delete", "--directory", "")


# -- connections and schemas --------------------------------------------------------------------------------------


async def test_a_database_that_cannot_be_used_is_named_without_its_password(database: str):
    server, _, name = database.rpartition("/")
    user, _, address = server.partition("@")
    closed = "postgresql://somebody:secret@127.0.0.1:1/x"
    text = await refused(closed, "status", exit_code=3)
    assert text.startswith("no connection to postgresql://127.0.0.1:1/x: ")
    assert f'database "{name}x" does not exist' in await refused(f"{database}x", "status", exit_code=3)
    wrong = await refused(f"{user}x@{address}/{name}", "status", exit_code=3)
    assert "password authentication failed" in wrong
    for text in (wrong, await refused("host=x password=secret", "status", exit_code=2)):
        assert "secret" not in text
        assert user.rpartition(":")[2] not in text
    assert "set SIDINGS_POSTGRES" in await refused(None, "status", exit_code=2)
    for odd, code in (("u:sec/ret@127.0.0.1:1/x", 2), ("u:1/sec@ret@127.0.0.1:1/x", 3)):
        text = await refused(f"postgresql://{odd}", "status", exit_code=code)
        assert "sec" not in text
        assert "ret" not in text
    assert "`sslmode` parameter must be" in await refused(f"{database}?sslmode=x", "status", exit_code=2)


async def test_settings_of_the_environment_count_as_for_the_service(database: str):
    text = await refused(database, "status", exit_code=2, SIDINGS_POSTGRES_CALL_SECONDS="-1")
    assert "call_seconds" in text.lower()
    assert "schema='A B' is not usable" in await refused(database, "status", "--schema", "A B", exit_code=2)
    await execute(database, "ALTER SCHEMA sidings RENAME TO elsewhere")
    for command in (("status",), ("jobs", "list"), ("migrate", "status")):
        text = await refused(database, *command)
        assert "has no schema 'sidings' of Sidings (there is elsewhere: give --schema)" in text


@pytest.mark.parametrize("named", ["sidings", "elsewhere"])
async def test_an_empty_schema_is_refused_and_one_of_the_environment_is_none(database: str, named: str):
    """As of a variable of a script that is not set: it acted on `sidings`, whatever the environment named."""
    for arguments in (("status",), ("migrate", "apply")):
        text = await refused(database, *arguments, "--schema", "", exit_code=2, SIDINGS_SCHEMA=named)
        assert "schema='' is not usable" in text
    assert "service=''" in await refused(database, "migrate", "apply", "--service", "", exit_code=2)
    await cli(database, "pauses", SIDINGS_SCHEMA="")


@pytest.mark.parametrize("named", ["postgresql://localhost/tracker", "postgresql://localhost/other", None])
def test_the_settings_of_the_environment_are_those_of_any_database_but_the_password(
    monkeypatch: pytest.MonkeyPatch, named: str | None
):
    """With --postgres none of them counted: behind PgBouncer the command asked for what had been set."""
    dsn = "postgresql://localhost/tracker"
    monkeypatch.setenv("SIDINGS_POSTGRES", named or "")
    monkeypatch.setenv("SIDINGS_SCHEMA", "theirs")
    for name, text in (("CALL_SECONDS", "3"), ("PGBOUNCER", "true"), ("PASSWORD", "secret")):
        monkeypatch.setenv(f"SIDINGS_POSTGRES_{name}", text)
    found = postgres_settings(dsn, "own")
    assert (found.dsn, found.schema_name, found.call_seconds, found.pgbouncer) == (dsn, "own", 3, True)
    assert found.secret() == ("secret" if named == dsn else None), "another server is not told it"
    assert postgres_settings(dsn, None).schema_name == "sidings"
    monkeypatch.setenv("SIDINGS_POSTGRES_PGBOUNCER", "perhaps")
    with pytest.raises(ConfigurationError, match=r"^environment: SIDINGS_POSTGRES_PGBOUNCER: "):
        postgres_settings(dsn, None)


@pytest.mark.parametrize("also", [True, False], ids=["with other settings of the environment", "alone"])
def test_a_dsn_that_is_wrong_is_blamed_on_the_option_or_on_the_variable(monkeypatch: pytest.MonkeyPatch, also: bool):
    """The variable was blamed for the option, where any other one of the environment's settings was there."""
    wrong = "postgresql://localhost:99999/tracker"
    monkeypatch.setenv("SIDINGS_POSTGRES", "postgresql://localhost/tracker")
    if also:
        monkeypatch.setenv("SIDINGS_POSTGRES_CALL_SECONDS", "3")
    with pytest.raises(ConfigurationError, match=r"^--postgres: a port in it is none"):
        postgres_settings(wrong, None)
    monkeypatch.setenv("SIDINGS_POSTGRES", wrong)
    with pytest.raises(ConfigurationError, match=r"^SIDINGS_POSTGRES: a port in it is none"):
        postgres_settings(wrong, None)


def test_a_command_asks_for_no_settings_that_it_does_not_need(monkeypatch: pytest.MonkeyPatch):
    """Kubernetes sets such a variable for a Service `sidings-postgres`: Kafka's settings ended `jobs list` then."""
    dsn = "postgresql://localhost/tracker"
    monkeypatch.setenv("SIDINGS_POSTGRES", dsn)
    monkeypatch.setenv("SIDINGS_POSTGRES_PORT", "tcp://10.0.0.1:5432")
    monkeypatch.setenv("SIDINGS_KAFKA", "b:9092")
    monkeypatch.setenv("SIDINGS_KAFKA_SECURITY_PROTOCOL", "SASL_SSL")
    monkeypatch.setenv("SIDINGS_KAFKA_SASL_MECHANISM", "OAUTHBEARER")
    monkeypatch.setenv("SIDINGS_EXECUTOR_CONCURRENCY", "many")
    assert postgres_settings(dsn, None).dsn == dsn
    monkeypatch.setenv("SIDINGS_POSTGRES_CALL_SECONDS", "soon")
    monkeypatch.setenv("SIDINGS_KAFKA_SECURITY_PROTOCOL", "PLAINTEXT")
    monkeypatch.setenv("SIDINGS_KAFKA_SASL_MECHANISM", "PLAIN")
    assert kafka_settings("b:9092").bootstrap == "b:9092"


async def test_the_schema_is_made_once_its_service_is_named(empty_database: str):
    assert "sidings migrate apply --service NAME" in await refused(empty_database, "status")
    assert "give --service NAME" in await refused(empty_database, "migrate", "apply", exit_code=2)
    made = await cli(empty_database, "migrate", "apply", "--service", "tracker", "--schema", "own")
    assert made.stdout.splitlines()[0] == "applied 0045_jobs"
    assert made.stdout.splitlines()[-1] == "the schema 'own' of the service 'tracker' is up to date"
    again = await cli(empty_database, "migrate", "apply", SIDINGS_SCHEMA="own")
    assert again.stdout.splitlines() == made.stdout.splitlines()[-1:]
    text = await refused(empty_database, "migrate", "apply", "--service", "billing", "--schema", "own")
    assert "belongs to the service 'tracker'" in text
    status = await cli_json(empty_database, "status", "--schema", "own")
    assert (status["service"], status["schema"], status["version"]) == ("tracker", "own", LAST)


async def test_status_says_where_the_schema_stands_also_where_a_later_release_has_migrated_it(database: str):
    """As where a release was rolled back; it said the last migration that it knew."""
    later = (
        f"INSERT INTO sidings.migration (version, name, checksum, runs_with) VALUES ({LAST + 1}, 'later', 'x', {LAST})"
    )
    await execute(database, later)
    assert (await cli_json(database, "status"))["version"] == LAST + 1
    assert f"schema sidings at {LAST + 1:04}," in (await cli(database, "status")).stdout


async def test_a_schema_of_another_release_is_not_touched(database: str):
    fine = await cli_json(database, "migrate", "status")
    assert (len(fine["applied"]), fine["missing"], fine["problem"]) == (len(migrations()), [], None)
    await execute(database, "INSERT INTO sidings.migration (version, name, checksum) VALUES (9999, 'future', 'x')")
    newer = await cli_json(database, "migrate", "status", exit_code=4)
    assert (newer["missing"], "a newer release" in newer["problem"]) == ([], True)
    await execute(database, "DELETE FROM sidings.migration WHERE version = 9999")
    await execute(database, f"DELETE FROM sidings.migration WHERE version = {LAST}")
    assert "run `sidings migrate apply`" in await refused(database, "jobs", "list")
    older = await cli_json(database, "migrate", "status", exit_code=4)
    assert [name[:4] for name in older["missing"]] == [f"{LAST:04}"]
    await execute(database, "INSERT INTO sidings.migration (version, name, checksum) VALUES (9999, 'future', 'x')")
    assert "a newer release of sidings has migrated it" in await refused(database, "jobs", "list")


async def test_whoever_migrates_sees_whose_locks_it_waits_for(database: str, monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module("sidings.schema.migrate")  # the package's `migrate` is the function
    later = (*migrations(), module.Migration(LAST + 1, "later", "ALTER TABLE sidings.job ADD COLUMN later int"))
    monkeypatch.setattr(module, "migrations", lambda: later)
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 3.5)  # for two attempts
    async with connected(database, application_name="a report") as other, other.transaction():
        pid = other.get_server_pid()
        await other.execute("LOCK TABLE sidings.job IN SHARE MODE")
        result = await cli(database, "migrate", "apply", exit_code=1)
    waits, *_, error = result.stderr.splitlines()
    assert waits.startswith(f"migrating sidings waits for locks, trying again: pid {pid} (")
    assert error.startswith("error: the schema 'sidings' could not be migrated within 3.5 s, because of locks")
    assert (await cli(database, "migrate", "apply")).stdout.startswith(f"applied {LAST + 1:04}_later")


async def test_a_role_that_may_not_look_is_told_so(database: str):
    async with connected(database) as connection:
        await connection.execute("CREATE ROLE cli_stranger LOGIN PASSWORD 'x'")
        try:
            stranger = database.replace(database[len("postgresql://") : database.index("@")], "cli_stranger:x")
            text = await refused(stranger, "jobs", "list")
            assert text.startswith("permission denied for schema sidings: use the role that owns the schema")
        finally:
            await connection.execute("DROP ROLE cli_stranger")


async def test_someone_else_s_lock_is_an_error_that_says_try_again(database: str):
    (id,) = await some_jobs(database, 1)
    async with connected(database) as connection, connection.transaction():
        await connection.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", id)
        text = await refused(database, "jobs", "cancel", id)
    assert text == f"job {id} is being changed by somebody else: Try again."
    assert await jobs_left(database) == 1
