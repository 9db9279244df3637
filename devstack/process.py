"""One server process: started detached, found again by its pid file, signalled only when it is really ours.

A pid alone proves nothing: after a reboot, or a long time, another program can have it. So the pid file also
holds when the process was born, and both must match before any signal is sent.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

try:
    import psutil
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the devstack needs psutil: pip install 'sidings[devstack]'", name=error.name) from None

from .accounts import Account
from .errors import ServerStartError, ServerStateError

__all__ = ["ServerProcess", "birth", "clean_environment", "gone", "wait_until"]

LOG_LINES_SHOWN = 20
POLL_SECONDS = 0.02
STOP_SECONDS = 10
KILL_SECONDS = 30
BOOT = Path("/proc/sys/kernel/random/boot_id")


def wait_until(condition: Callable[[], bool], *, timeout: float) -> bool:
    """Poll `condition` until it holds; False when it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def birth(pid: int) -> str | None:
    """A text that tells this process from any other that has or had its pid; None when it does not run.

    On Linux, ticks since boot and the boot's id: what psutil computes from them moves when the clock is set.
    """
    try:
        boot = BOOT.read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else f"{boot} {fields[19]}"
    except (FileNotFoundError, ProcessLookupError):
        pass  # gone, or not a Linux
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


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

    def spawn(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, account: Account | None) -> None:
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
        try:
            # Reaped at once, whoever killed it: Postgres takes a zombie for a running server and would not start.
            threading.Thread(target=child.wait, name=f"reap {self.name}", daemon=True).start()
            partial = self.pid_file.with_suffix(".pid.new")
            partial.write_text(json.dumps({"pid": child.pid, "birth": birth(child.pid) or "died at once"}))
            partial.replace(self.pid_file)
        except BaseException:  # a full disk, Ctrl-C: nobody would find it
            child.kill()
            child.wait()
            raise

    def find(self) -> psutil.Process | None:
        """The running process, or None. A pid file that names another process, or cannot be read, is ignored."""
        try:
            noted = json.loads(self.pid_file.read_text())
            process = psutil.Process(noted["pid"])
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):  # ValueError: empty, as after a power failure
            return None
        return process if birth(process.pid) == noted["birth"] else None

    def pid_before_boot(self) -> int | None:
        """The pid in the file, if the system has been started anew since: that process is gone, and all its children.

        None also where no boot has an id. A container has its host's: started anew, it is not told from before.
        """
        try:
            noted = json.loads(self.pid_file.read_text())
            boot, _ = noted["birth"].split()
            return noted["pid"] if boot != BOOT.read_text().strip() else None
        except (FileNotFoundError, ValueError):  # ValueError: empty, or a birth without a boot
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

    def refuse_paused(self) -> None:
        """Raises ServerStateError when the process is paused: it cannot become ready."""
        if self.paused:
            raise ServerStateError(
                f"{self.name} is paused: resume it, by `python -m sidings.devstack resume {self.name}` or its resume()"
            )

    def pause(self) -> None:
        """SIGSTOP to the process and all its children; returns when all have stopped."""
        self._freeze(self.require())

    def _freeze(self, leader: psutil.Process) -> list[psutil.Process]:
        # The leader first, and only then the list of its children: stopped, it forks no more.
        family = [leader]
        _signal(leader, signal.SIGSTOP)
        if wait_until(lambda: _stopped(leader), timeout=STOP_SECONDS):
            family += _children(leader)
            for process in family[1:]:
                _signal(process, signal.SIGSTOP)
            if wait_until(lambda: all(map(_stopped, family)), timeout=STOP_SECONDS):
                return family
        raise ServerStateError(f"{self.name} did not stop on SIGSTOP within {STOP_SECONDS} seconds")

    def resume(self) -> None:
        """SIGCONT to the process and all its children."""
        leader = self.require()
        for process in [*_children(leader), leader]:
            _signal(process, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the process and all its children, as when the power fails; returns when all are gone."""
        leader = self.find()
        if leader is not None:
            family = self._freeze(leader)  # a child forked after the list was made would survive
            for process in family:
                _signal(process, signal.SIGKILL)
            if not wait_until(lambda: all(map(gone, family)), timeout=KILL_SECONDS):
                raise ServerStateError(f"{self.name} did not die on SIGKILL within {KILL_SECONDS} seconds")
        self.pid_file.unlink(missing_ok=True)

    def terminate(self, signals: Sequence[tuple[signal.Signals, float]]) -> None:
        """Ask with each signal in turn, waiting the given seconds for the end; kill what is still there."""
        leader = self.find()
        if leader is not None:
            if self.paused:
                self.resume()
            family = [leader, *_children(leader)]
            for number, seconds in signals:
                _signal(leader, number)
                if wait_until(lambda: all(map(gone, family)), timeout=seconds):
                    break
            else:
                self.kill()
        self.pid_file.unlink(missing_ok=True)

    def await_ready(self, ready: Callable[[], bool], *, timeout: float, since: int = 0, own: bool = True) -> None:
        """Wait until `ready`.

        Args:
            since: size of the log before the start, so that only new lines are shown.
            own: whether the caller has started the process, and it is killed when it is not ready in time.

        Raises:
            ServerStartError: the process ended, or was not ready after `timeout` seconds.
        """
        finished = wait_until(lambda: self.find() is None or ready(), timeout=timeout)
        if self.find() is None:
            raise ServerStartError(self.name, "the process ended", self.log, self.log_lines(since=since))
        if not finished:
            if own:
                self.kill()
            reason = f"it was not ready after {timeout:g} seconds"
            raise ServerStartError(self.name, reason, self.log, self.log_lines(since=since))

    def log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def log_lines(self, *, since: int) -> list[str]:
        """The last lines of the log, of those written after byte `since`."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace").splitlines()[-LOG_LINES_SHOWN:]


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    # psutil checks before it signals that the pid has not been given to another process meanwhile.
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def gone(process: psutil.Process) -> bool:
    """Whether the process has ended; one whose parent has not yet asked how (a zombie) has ended too."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _stopped(process: psutil.Process) -> bool:
    return gone(process) or process.status() == psutil.STATUS_STOPPED


def clean_environment(**extra: str) -> dict[str, str]:
    """Our environment without what would redirect a server (`PG…`, `KAFKA_…`), plus `extra`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PG", "KAFKA_"))}
    return kept | extra
