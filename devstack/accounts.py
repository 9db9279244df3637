"""The account that Postgres runs under.

Postgres refuses to run as root, as containers often do. Then it runs as `nobody`, who must be able to reach
the binaries and the data: where a folder on the way is closed to others (e.g. /root), the binaries are copied
and the data lives in /var/tmp. Nobody's permissions are widened.
"""

import hashlib
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import DevstackError

__all__ = ["Account", "open_copy", "open_directory", "readable", "server_account"]

OPEN_BASE = Path("/var/tmp")  # survives a reboot, unlike /tmp, and every account can reach it


@dataclass(frozen=True)
class Account:
    """Numeric user and group that a server process runs as."""

    uid: int
    gid: int


def server_account() -> Account | None:
    """`nobody` when we are root, None (stay who we are) otherwise."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError as error:
        raise DevstackError(
            "running as root, and there is no user `nobody` to run Postgres as; run as an ordinary user"
        ) from error
    return Account(entry.pw_uid, entry.pw_gid)


def reachable(path: Path) -> bool:
    """Whether every account can traverse the folders above `path`."""
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents if parent.exists())


def readable(path: Path) -> bool:
    """Whether every account can reach and read the file or folder `path`."""
    mode = path.stat().st_mode
    wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
    return mode & wanted == wanted and reachable(path)


def open_directory(wanted: Path, account: Account | None) -> Path:
    """A directory that `account` owns: `wanted` itself, or a stand-in for it where `wanted` is out of reach.

    The same `wanted` always gives the same answer. Where a stand-in is used, `wanted` becomes a link to it.
    """
    if account is None or (reachable(wanted) and not wanted.is_symlink()):
        directory = wanted
    else:
        digest = hashlib.sha256(str(wanted).encode()).hexdigest()[:12]
        directory = OPEN_BASE / f"sidings-devstack-{digest}"
        if not wanted.is_symlink():
            if directory.exists():  # left over from a `wanted` that was deleted without `remove()`
                shutil.rmtree(directory)
            wanted.symlink_to(directory)
    directory.mkdir(mode=0o700, exist_ok=True)
    if account is not None and directory.lstat().st_uid != account.uid:
        if directory.lstat().st_uid != 0 or directory.is_symlink():
            raise DevstackError(f"{directory} belongs to someone else; remove it")
        os.chown(directory, account.uid, account.gid)
    return directory


def open_copy(parts: Sequence[Path], base: Path, name: str) -> Path:
    """A folder holding copies of `parts`, each at its path relative to `base`, that every account can read.

    `name` must change whenever the content does: a copy that is there already is used as it is.
    """
    copy = OPEN_BASE / name
    if not copy.exists():
        partial = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=OPEN_BASE))
        try:
            for part in parts:
                shutil.copytree(part, partial / part.relative_to(base), symlinks=True)
            for path in [partial, *partial.rglob("*")]:
                if not path.is_symlink():
                    path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)
            partial.rename(copy)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            if not copy.exists():  # else another process was faster, and its copy is as good
                raise
    if copy.lstat().st_uid != os.geteuid():
        raise DevstackError(f"{copy} belongs to someone else; remove it")
    return copy
