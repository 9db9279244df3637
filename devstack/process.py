"""One server process: started detached, found again by its pid file, signalled only when it is really ours.

A pid alone proves nothing: after a reboot, or a long time, another program can have it. So the pid file also
holds the process's creation time, and both must match before any signal is sent.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from .accounts import Account
from .errors import ServerStartError, ServerStateError

__all__ = ["ServerProcess", "clean_environment", "wait_until"]

# Creation times are compared with a tolerance: they are kernel ticks (10 ms), converted through the boot
# time.
SAME_START_SECONDS = 0.05
LOG_LINES_SHOWN = 20
_children: list[subprocess.Popen[bytes]] = []  # kept until they end, so that none stays a zombie


def wait_until(condition: Callable[[], bool], *, timeout: float, interval: float = 0.02) -> bool:
    """Poll `condition` until it holds; False when it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


class ServerProcess:
    """A process with a pid file and a log file.

    Args:
        name: for messages, e.g. `postgres`.
        directory: holds `<name>.pid` and `<name>.log`; it must exist.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.pid_file = directory / f"{name}.pid"
        self.log = directory / f"{name}.log"

    def spawn(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, account: Account | None
    ) -> None:
        """Start `command` in a session of its own (it outlives us, and Ctrl-C does not reach it)."""
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                user=account.uid if account else None,
                group=account.gid if account else None,
                extra_groups=[] if account else None,
            )
        _children.append(child)
        started = psutil.Process(child.pid).create_time()
        partial = self.pid_file.with_suffix(".pid.new")
        partial.write_text(json.dumps({"pid": child.pid, "started": started}))
        partial.replace(self.pid_file)

    def find(self) -> psutil.Process | None:
        """The running process, or None. A pid file that names another process is ignored."""
        _reap()
        try:
            noted = json.loads(self.pid_file.read_text())
            process = psutil.Process(noted["pid"])
            if abs(process.create_time() - noted["started"]) > SAME_START_SECONDS:
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except (FileNotFoundError, json.JSONDecodeError, KeyError, psutil.NoSuchProcess):
            return None

    def require(self) -> psutil.Process:
        """The running process.

        Raises:
            ServerStateError: it does not run.
        """
        process = self.find()
        if process is None:
            raise ServerStateError(f"{self.name} is not running")
        return process

    @property
    def paused(self) -> bool:
        process = self.find()
        return process is not None and process.status() == psutil.STATUS_STOPPED

    def pause(self) -> None:
        """SIGSTOP to the process and all its children; returns when all have stopped."""
        leader = self.require()
        leader.suspend()  # first: from now on it forks no more
        family = [leader, *leader.children(recursive=True)]
        for process in family[1:]:
            _signal(process, signal.SIGSTOP)
        if not wait_until(lambda: all(_stopped(process) for process in family), timeout=10):
            raise ServerStateError(f"{self.name} did not stop on SIGSTOP within 10 seconds")

    def resume(self) -> None:
        """SIGCONT to the process and all its children."""
        leader = self.require()
        for process in [*leader.children(recursive=True), leader]:
            _signal(process, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the process and all its children, as when the power fails; returns when all are gone."""
        leader = self.find()
        if leader is not None:
            leader.suspend()  # what it forked after the list was made would survive
            family = [leader, *leader.children(recursive=True)]
            for process in family:
                _signal(process, signal.SIGKILL)
            if not wait_until(lambda: all(_gone(process) for process in family), timeout=30):
                raise ServerStateError(f"{self.name} did not die on SIGKILL within 30 seconds")
        self.pid_file.unlink(missing_ok=True)

    def terminate(self, signals: Sequence[tuple[signal.Signals, float]]) -> None:
        """Ask with each signal in turn, waiting the given seconds for the end; kill what is still there."""
        process = self.find()
        if process is None:
            self.pid_file.unlink(missing_ok=True)
            return
        if self.paused:
            self.resume()
        family = [process, *process.children(recursive=True)]
        for number, seconds in signals:
            _signal(process, number)
            if wait_until(lambda: all(_gone(member) for member in family), timeout=seconds):
                self.pid_file.unlink(missing_ok=True)
                return
        self.kill()

    def await_ready(self, ready: Callable[[], bool], *, timeout: float, since: int = 0) -> None:
        """Wait until `ready`.

        Args:
            since: size of the log before the start, so that only new lines are shown.

        Raises:
            ServerStartError: the process ended, or was not ready after `timeout` seconds (it is killed then).
        """
        finished = wait_until(lambda: self.find() is None or ready(), timeout=timeout, interval=0.02)
        if self.find() is None:
            raise ServerStartError(self.name, "the process ended", self.log, self.log_lines(since=since))
        if not finished:
            self.kill()
            reason = f"it was not ready after {timeout:g} seconds"
            raise ServerStartError(self.name, reason, self.log, self.log_lines(since=since))

    def log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def log_lines(self, count: int = LOG_LINES_SHOWN, *, since: int = 0) -> list[str]:
        """The last `count` lines of the log, of those written after byte `since`."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace").splitlines()[-count:]


def _reap() -> None:
    _children[:] = [child for child in _children if child.poll() is None]


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    # psutil compares creation times before it signals, so a reused pid is never hit.
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _gone(process: psutil.Process) -> bool:
    _reap()
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def clean_environment(**extra: str) -> dict[str, str]:
    """Our environment without what would redirect a server (`PG…`, `KAFKA_…`), plus `extra`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PG", "KAFKA_"))}
    return kept | extra
