"""A real Postgres 18 server of one's own, on a loopback port."""

import ctypes
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from .accounts import open_directory, server_account
from .binaries import postgres_program
from .errors import ServerStartError, ServerStateError
from .locations import LOOPBACK, free_port, is_free, locked
from .process import ServerProcess, clean_environment
from .state import SavedState, ServerStatus, describe

__all__ = ["Postgres"]

START_SECONDS = 60
RETRY_SECONDS = 60  # for what passes: a port that somebody takes first, an old server whose children leave
USER = "postgres"

# fsync stays on: the tests are about what survives. Sized for a small machine that also runs everything else.
SETTINGS: Mapping[str, str] = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",  # a socket's path is limited to about 100 characters; TCP has no such trap
    "max_connections": "300",
    "shared_buffers": "256MB",
    # In files of the data directory, so that a server that was killed leaves none of its memory behind in /dev/shm.
    "dynamic_shared_memory_type": "mmap",
    "wal_level": "replica",
    "max_prepared_transactions": "10",
    "max_wal_size": "4GB",
    "log_line_prefix": "%m [%p] %q%a %d ",
    "log_timezone": "UTC",
    "timezone": "UTC",
}


class Postgres:
    """A Postgres server in a directory; a second server is another object with another directory::

        server = Postgres("/tmp/pg")
        server.start()
        connection = await asyncpg.connect(server.dsn)

    The methods block (start about half a second); from async code call them through `asyncio.to_thread`. They work from
    any process: the server is found again through its pid file.

    Args:
        directory: The server's own; made when missing. Data, log and pid file live in it.
        port: Loopback port. Default: a free one, chosen at the first start and kept.
        settings: Server settings beside or instead of the devstack's own, e.g. ``{"fsync": "off"}``.
    """

    def __init__(
        self, directory: Path | str, port: int | None = None, settings: Mapping[str, str] | None = None
    ) -> None:
        self.directory = Path(directory).resolve()
        self._state = SavedState(self.directory / "postgres.json")
        self._port = port
        self._settings = dict(settings or {})
        self._process = ServerProcess("postgres", self.directory)

    @property
    def port(self) -> int:
        """The TCP port.

        Raises:
            ServerStateError: The server was never started.
        """
        return int(self._state["port"])

    @property
    def dsn(self) -> str:
        """Connection string of the superuser and the database ``postgres``.

        Raises:
            ServerStateError: The server was never started, or its cluster is not the devstack's.
        """
        if "port" in self._state and "password" not in self._state:
            raise ServerStateError(
                f"{self.directory} holds a server whose password is not known: the devstack did not make it, or was "
                "killed while it did. If it is not needed, stop it, delete this folder, and start anew"
            )
        password = quote(self._state["password"])
        return f"postgresql://{USER}:{password}@{LOOPBACK}:{self.port}/postgres"

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self._process.log

    @property
    def pid(self) -> int | None:
        """The postmaster's pid, or None when it does not run."""
        process = self._process.find()
        return process.pid if process else None

    def start(self) -> None:
        """Start the server, unless it runs, and wait until it accepts connections.

        The first time, its cluster is created.

        Raises:
            ServerStartError: It ended or was not ready in time; the text carries the last log lines.
            ServerStateError: It is paused, files that are not the devstack's are where its data would be, or another
                process has the pid in the lock file of its data.
            ToolMissingError: The binaries are missing.
        """
        if self._process.find() is not None:
            # Whoever started it may have been interrupted while it waited.
            self._process.refuse_paused()
            self._process.await_ready(self._says_ready, timeout=START_SECONDS, own=False)
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        account = server_account()
        data = open_directory(self.directory / "data", account)
        created = self._ensure_cluster(data)
        deadline = time.monotonic() + RETRY_SECONDS
        while True:
            since = self._process.log_size()
            try:
                self._launch(data)
                self._process.await_ready(self._says_ready, timeout=START_SECONDS, since=since)
                return
            except ServerStartError as error:
                if created and self._port is None and not is_free(self.port) and time.monotonic() < deadline:
                    # Somebody has taken the port since it was chosen. Nobody knows it yet, so another does as well.
                    self._state.update(port=str(free_port()))
                    continue
                # After a SIGKILL from elsewhere the old server's children may take a moment to notice and
                # leave.
                attached = any("pre-existing shared memory block" in line for line in error.lines)
                locked = any('lock file "postmaster.pid" already exists' in line for line in error.lines)
                late = time.monotonic() > deadline
                if late and locked:
                    lock = data / "postmaster.pid"
                    raise ServerStateError(
                        f"{lock} names the process {_pid_in(lock)}, which runs and is not this server: if no Postgres "
                        "runs on this folder, delete that file (no more of it), and start again"
                    ) from error
                if late or not (attached or locked):
                    raise
                time.sleep(0.1)

    def stop(self) -> None:
        """Shut down cleanly: sessions are ended, transactions rolled back, a checkpoint written."""
        self._process.terminate([(signal.SIGINT, 30), (signal.SIGQUIT, 10)])

    def kill(self) -> None:
        """SIGKILL to the whole server, as when the power fails; returns when all its processes are gone."""
        self._process.kill()

    def pause(self) -> None:
        """SIGSTOP to the whole server: connections stay open, and nothing answers."""
        self._process.pause()

    def resume(self) -> None:
        """SIGCONT to the whole server."""
        self._process.resume()

    def restart(self) -> None:
        """`stop()`, then `start()`."""
        self.stop()
        self.start()

    def status(self) -> ServerStatus:
        """What the server is doing now."""
        address = f"{LOOPBACK}:{self._state['port']}" if "port" in self._state else None
        return describe(self._process, address)

    def remove(self) -> None:
        """Kill the server and delete its directory with all data."""
        self.kill()
        data = self.directory / "data"
        _free_memory(data / "postmaster.pid")
        if data.is_symlink():
            shutil.rmtree(data.resolve(), ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _ensure_cluster(self, data: Path) -> bool:
        """Create the cluster, unless there is one. The password of one that is created is stored last: what a killed
        process has left of it is deleted. Returns whether it was created."""
        # An `initdb` whose starter was killed goes on, and has the lock until it ends.
        with locked(self.directory / "initdb.lock") as lock:
            self._unlock(data / "postmaster.pid")
            left = list(data.iterdir())
            if left and "password" in self._state:
                return False
            if left and "initdb" not in self._state:  # not the devstack's: a base backup, or named by mistake
                if (data / "global" / "pg_control").exists():
                    return False
                raise ServerStateError(
                    f"{data} holds files, but no whole cluster of Postgres: name another directory, or delete them"
                )
            for path in left:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            self._state.update(initdb="begun")
            self._create_cluster(data, lock.fileno())
            return True

    def _unlock(self, lock: Path) -> None:
        """Delete the lock file of a server that ran before the system was started anew. Postgres does so itself, unless
        another process has the pid now. One that names another server is left: somebody may have started it by hand."""
        pid = self._process.pid_before_boot()
        if pid is not None and pid == _pid_in(lock):
            lock.unlink()

    def _create_cluster(self, data: Path, lock: int) -> None:
        account = server_account()
        password = secrets.token_urlsafe(18)
        with tempfile.NamedTemporaryFile("w", prefix="sidings-") as pwfile:
            pwfile.write(password)
            pwfile.flush()
            if account:
                shutil.chown(pwfile.name, account.uid, account.gid)
            command = [
                *(postgres_program("initdb"), "--pgdata", str(data), "--no-sync", "--no-instructions"),
                *("--username", USER, "--pwfile", pwfile.name, "--auth", "scram-sha-256"),
                # The password is random and long; iterations would only make each connection slower.
                *("--set", "scram_iterations=1"),
                *("--encoding", "UTF8", "--locale", "C"),
                *("--locale-provider", "builtin", "--builtin-locale", "C.UTF-8"),
            ]
            made = subprocess.run(
                command,
                capture_output=True,
                text=True,
                env=clean_environment(LC_ALL="C"),
                cwd=data,
                user=account.uid if account else None,
                group=account.gid if account else None,
                extra_groups=[] if account else None,
                pass_fds=[lock],
                check=False,
                timeout=120,
            )
        if made.returncode != 0:
            lines = (made.stdout + made.stderr).splitlines()[-20:]
            raise ServerStartError("initdb", f"it exited with {made.returncode}", self.log, lines)
        self._state.update(password=password)

    def _launch(self, data: Path) -> None:
        if self._port is not None:
            self._state.update(port=str(self._port))
        elif "port" not in self._state:
            self._state.update(port=str(free_port()))
        chosen = {**SETTINGS, **self._settings, "port": self._state["port"]}
        options = [part for name, value in chosen.items() for part in ("-c", f"{name}={value}")]
        self._process.spawn(
            [postgres_program("postgres"), "-D", str(data), *options],
            env=clean_environment(LC_ALL="C"),
            cwd=data,
            account=server_account(),
        )

    def _says_ready(self) -> bool:
        """Postgres writes its state into line 8 of postmaster.pid; pg_ctl waits for the same word."""
        try:
            lines = (self.directory / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # A killed server leaves the file behind, with its pid and "ready".
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"


def _pid_in(lock: Path) -> int | None:
    try:
        return int(lock.read_text().split("\n")[0])
    except (FileNotFoundError, ValueError):
        return None


def _free_memory(pid_file: Path) -> None:
    """What a killed server leaves of System V's shared memory, 56 bytes by which the next one on the same data would
    see that it still runs: a machine has room for some thousands, and without room no server starts."""
    try:
        key, segment = map(int, pid_file.read_text().splitlines()[6].split())
    except (FileNotFoundError, IndexError, ValueError):
        return  # not started, or stopped cleanly
    libc = ctypes.CDLL(None)
    if libc.shmget(key, 0, 0) == segment:  # else somebody else's: the machine has been restarted since
        libc.shmctl(segment, 0, None)  # IPC_RMID
