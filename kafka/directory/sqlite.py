"""Rows in a file: SQLite, embedded. Rows and positions change in one transaction, so a restart reads only what is new.

Statements that write run in a thread of their own; reads come from the event loop, on another connection, and wait for
nobody (WAL); a thread that goes through all keys has a connection of its own. They see a batch when `apply` has
returned, and not when the thread commits, in the middle of a handler.
A lock on a file beside keeps a second process out, for as long as the first one lives.
"""

import asyncio
import fcntl
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from io import FileIO
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import UUID
from weakref import WeakSet

from ...errors import ConfigurationError, StorageError
from ...schema import load_sql
from .columns import column_of, entry_of, named_row, pages_of, record_of, row_of
from .rows import BadRecord, Row
from .storage import Batch, Identity, Kept, Mark, Plan

__all__ = ["SQLite"]

log = logging.getLogger("sidings.directory")

T = TypeVar("T")
R = TypeVar("R")

_FORMAT = 3  # of the file; one of another format is built anew
_BUSY_SECONDS = 10.0
_BATCH_PAGES = 4  # that a batch writes, beside those of its rows, or so
_DAMAGES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PIECE = 1_000  # rows that are read at once, while other threads wait
_CHECKPOINT_PAGES = 4_000  # written, before they are brought from the -wal into the file itself

_locks: WeakSet[FileIO] = WeakSet()


def _close_in_child() -> None:
    """A forked process shares the lock: one that outlives a killed service, as those of a `ProcessPoolExecutor` do,
    would keep the file from the next one."""
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


class SQLite(Generic[T]):
    """Holds the rows of a directory in a file, so that a restart reads only what is new.

    After a kill the file is as after the last batch. After a power failure the last batches may be missing, and are
    read again. A damaged file is put aside as ``path.damaged``, and built anew.

    Args:
        path: The file is made if it is not there; beside it are ``-wal``, ``-shm`` and ``.lock``. Two processes cannot
            share one.

    Raises:
        ConfigurationError: `path` is no path.
        StorageError: From its methods, where the file cannot be used.
    """

    def __init__(self, path: str | Path) -> None:
        if not path or not isinstance(path, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"SQLite({path!r}): give the path of a file, on a volume of this instance's own")
        self._path = Path(path)
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        # The metrics' thread counts, and those of plain handlers read: to close what one of them uses ends the process.
        self._reading = threading.RLock()
        self._home: int | None = None  # the event loop's thread
        self._lock: FileIO | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._written = 0  # pages since the last checkpoint, about
        self._plan: Plan[T] | None = None
        self._damage: sqlite3.Error | None = None  # which a read has met

    # -- the port: what writes --------------------------------------------------------------------------------------

    async def open(self, plan: Plan[T]) -> Kept:
        """Begin, with what is in the file.

        Raises:
            StorageError: The file cannot be used; the message says why.
        """
        if self._thread is not None or self._lock is not None:  # the latter after a `close` that was cancelled
            raise self._in_use()
        self._plan = plan
        self._damage = None  # was that of a file which is put aside now
        self._home = threading.get_ident()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"sidings-directory-{plan.topic}")
        try:
            return await self._work(self._open)
        except BaseException:
            await self.close()
            raise

    async def reset(self, identity: Identity) -> None:
        """Forget everything.

        Raises:
            StorageError: The file cannot be used.
        """
        await self._work(lambda: self._reset(identity))

    async def apply(self, batch: Batch[T]) -> None:
        """Apply `batch` in one transaction, which is seen when this returns.

        Raises:
            StorageError: The file cannot be used.
        """
        if self._damage is not None:
            raise self._unusable(self._damage)
        if self._written > _CHECKPOINT_PAGES:
            self._written = 0
            await self._work(self._checkpoint)
        self._written += _BATCH_PAGES + sum(pages_of(record) for _, _, _, record in batch.changes)
        with self._as_it_was():
            await self._work(lambda: self._apply(batch))

    async def close(self) -> None:
        """Close the file; where this is cancelled, the thread does so all the same."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        closing = asyncio.wrap_future(thread.submit(self._close))
        thread.shutdown(wait=False)
        await asyncio.wait([closing])  # cancelled, it withdraws nothing
        closing.result()

    # -- the port: what reads ---------------------------------------------------------------------------------------

    def get(self, key: Hashable) -> T | None:
        """The value of a key.

        Raises:
            StorageError: The file is closed, or cannot be read, as for all reading.
        """
        column = column_of(key)
        for most in (1, -1):  # all of a key's rows only where a validator refuses the youngest one now
            with self._reads() as (plan, reader):
                if plan.derived:
                    found = reader.execute(load_sql(__package__, "get_key"), (column, most)).fetchall()
                else:
                    found = reader.execute(load_sql(__package__, "get_row"), (column,)).fetchall()
            for entry in found:
                if (value := plan.decode(record_of(plan.topic, entry))) is not None:
                    return value
            if not (found and plan.derived):
                break
        return None

    def __len__(self) -> int:
        with self._reading:
            if self._reader is None:
                return 0
            with self._reads() as (plan, reader):
                query = load_sql(__package__, "count_keys") if plan.derived else "SELECT count(*) FROM entry"
                return reader.execute(query).fetchone()[0]

    def items(self) -> list[tuple[Hashable, T]]:
        """All keys and values: all of the file is read and decoded, and the event loop waits where it has asked."""
        found: dict[Hashable, T] = {}
        with self._all() as (plan, cursor):
            while entries := self._next_of(cursor):
                for entry in entries:
                    value = plan.decode(record_of(plan.topic, entry))
                    if value is not None:
                        found[plan.key_of(entry[6], value)] = value
        return list(found.items())

    @contextmanager
    def _all(self) -> Generator[tuple[Plan[T], sqlite3.Cursor]]:
        """To go through the file with. Until that has ended, all that reads on the cursor's connection sees what was
        there when it began: so a thread has one of its own. Where the event loop asks, nothing is applied meanwhile."""
        with self._reads() as (plan, reader):
            if apart := threading.get_ident() != self._home:
                reader = self._connect_reader()
            cursor = reader.execute(load_sql(__package__, "list_keys" if plan.derived else "list_rows"))
        try:
            yield plan, cursor
        finally:
            with self._reading:
                if apart:
                    reader.close()
                elif reader is self._reader:  # else the file has been closed meanwhile, and the cursor with it
                    cursor.close()

    def _next_of(self, cursor: sqlite3.Cursor) -> list[Any]:
        with self._reads():
            return cursor.fetchmany(_PIECE)

    def rows(self) -> Iterable[Row]:
        """All rows, read piece by piece: others have their turn between two of them."""
        with self._reads() as (_, reader):
            cursor = reader.execute("SELECT row FROM entry")
        while found := self._next_of(cursor):
            yield from (row for (row,) in found)

    def keys_of(self, rows: Iterable[Row]) -> Iterable[Hashable]:
        """The keys that these rows have now."""
        with self._reads() as (plan, reader):
            if not plan.derived:
                return rows
            keys: list[Hashable] = []
            for row in rows:
                found = reader.execute(load_sql(__package__, "get_row"), (row,)).fetchone()
                if found is not None and (value := plan.decode(record_of(plan.topic, found))) is not None:
                    keys.append(plan.key_of(row, value))
            return keys

    @contextmanager
    def _reads(self) -> Generator[tuple[Plan[T], sqlite3.Connection]]:
        """A file that is closed is no empty one. What is found to be damaged, or gone, is told at the next `apply`, so
        that the service ends, and builds the file anew when it starts."""
        with self._reading:
            if self._plan is None or self._reader is None:
                raise StorageError(f"the store {str(self._path)!r} is not open")
            try:
                yield self._plan, self._reader
            except sqlite3.Error as error:
                if _code(error) in (*_DAMAGES, sqlite3.SQLITE_IOERR) or not self._path.exists():
                    self._damage = error
                raise self._unusable(error) from error

    @contextmanager
    def _as_it_was(self) -> Generator[None]:
        """Whoever reads in here reads what was there before."""
        with self._reads() as (_, reader):
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM position").fetchone()  # only now it stands
        try:
            yield
        finally:
            with self._reading:
                reader.execute("COMMIT")

    # -- in the thread ----------------------------------------------------------------------------------------------

    async def _work(self, work: Callable[[], R]) -> R:
        if self._thread is None:
            raise StorageError(f"the store {str(self._path)!r} is not open")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, sqlite3.Error) and _code(error) in _DAMAGES:
                self._damage = error
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> StorageError:
        told = f"the store {str(self._path)!r} cannot be used: {error}"
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_IOERR_SHMSIZE:  # there is no room for the -shm
            told += ": the disk is full"
        elif code == sqlite3.SQLITE_IOERR_WRITE:  # which of them it is SQLite does not say
            told += ": no more can be written: a quota or a limit of the size of files is reached, or the disk fails"
        return StorageError(told)

    def _in_use(self) -> StorageError:
        return StorageError(
            f"the store {str(self._path)!r} is in use: by another process, or by another directory of this one. "
            "Give each of them a file of its own"
        )

    def _open(self) -> Kept:
        self._path = Path(os.path.realpath(self._path))  # by a link, too, the lock is found
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._path.with_name(self._path.name + ".lock").open("wb", buffering=0)
        _locks.add(self._lock)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise self._in_use() from None
        try:
            return self._connect()
        except (sqlite3.DatabaseError, ValueError) as error:
            if isinstance(error, sqlite3.OperationalError) and _code(error) not in (*_DAMAGES, sqlite3.SQLITE_ERROR):
                raise  # the disk is full, the file is locked: that is no damage
            self._put_aside(error)
            return self._connect()

    def _connect(self) -> Kept:
        with suppress(FileExistsError):  # other users do not read it; SQLite makes -wal and -shm alike
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o660))
        writer = self._writer = sqlite3.connect(
            self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA synchronous = NORMAL")  # a power failure may cost the last batches, which are read again
        writer.execute("PRAGMA wal_autocheckpoint = 0")  # at a commit a reader stands in its way, see `_as_it_was`
        (sound,) = writer.execute("PRAGMA quick_check(1)").fetchone()
        if sound != "ok":
            raise sqlite3.DatabaseError(sound)
        writer.executescript(load_sql(__package__, "store_schema"))
        self._checkpoint()  # of a life that was killed before it came to one
        self._reader = self._connect_reader()
        return self._kept(writer)

    def _connect_reader(self) -> sqlite3.Connection:
        reader = sqlite3.connect(
            f"{self._path.absolute().as_uri()}?mode=rw",  # where somebody has deleted it, none is made
            uri=True,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=16,
        )
        reader.execute("PRAGMA query_only = ON")
        return reader

    def _kept(self, writer: sqlite3.Connection) -> Kept:
        notes: dict[str, Any] = dict(writer.execute("SELECT name, value FROM note"))
        if notes.get("format") != _FORMAT:
            return Kept(None, {}, {}, {}, 0.0)
        positions = writer.execute(
            "SELECT partition, next_offset, mark_offset, mark_timestamp, epoch "
            "FROM position LEFT JOIN mark_epoch USING (partition, mark_offset)"
        ).fetchall()
        return Kept(
            Identity(notes["topic"], notes["cluster"], notes["reading"]),
            {partition: offset for partition, offset, _, _, _ in positions},
            # One that is not before the position an earlier version has left there: it is of what is to be read again.
            {p: Mark(*mark) for p, offset, *mark in positions if mark[0] is not None and mark[0] < offset},
            {row_of(row): BadRecord(**bad) for row, bad in json.loads(notes.get("bad", "[]"))},
            notes.get("complete_at", 0.0),
            UUID(notes["topic_id"]) if "topic_id" in notes else None,
        )

    def _put_aside(self, error: Exception) -> None:
        """The file is damaged: keep it for a person, and make a new one."""
        log.error("the store %s is damaged (%s): it is put aside as .damaged, and built anew", self._path, error)
        for connection in (self._writer, self._reader):
            if connection is not None:
                connection.close()
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._path.replace(self._path.with_name(self._path.name + ".damaged"))

    def _reset(self, identity: Identity) -> None:
        assert self._writer is not None
        with _transaction(self._writer) as writer:
            for table in ("entry", "position", "mark_epoch", "note"):
                writer.execute(f"DELETE FROM {table}")
            notes = {"format": _FORMAT, **identity._asdict()}
            writer.executemany("INSERT INTO note (name, value) VALUES (?, ?)", notes.items())

    def _checkpoint(self) -> None:
        assert self._writer is not None
        self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def _apply(self, batch: Batch[T]) -> None:
        assert self._writer is not None
        assert self._plan is not None
        derived = self._plan.derived
        last = {change[0]: change for change in batch.changes}  # of several changes of a row the last one counts
        put = [
            entry_of(row, column_of(key) if derived else None, record)
            for row, key, _, record in last.values()
            if record is not None
        ]
        gone = [(row,) for row, _, _, record in last.values() if record is None]
        notes: dict[str, Any] = {"complete_at": batch.complete_at}
        if batch.bad is not None:
            notes["bad"] = json.dumps([(named_row(row), asdict(bad)) for row, bad in batch.bad.items()])
        if batch.topic_id is not None:
            notes["topic_id"] = str(batch.topic_id)
        positions = [
            (partition, offset, *(batch.marks.get(partition) or (None, None))[:2])
            for partition, offset in batch.positions.items()
        ]
        epochs = [
            (partition, mark.offset, mark.epoch) for partition, mark in batch.marks.items() if mark.epoch is not None
        ]
        unknown = [(partition,) for partition, mark in batch.marks.items() if mark.epoch is None]
        with _transaction(self._writer) as writer:
            if batch.read_anew:
                writer.execute("DELETE FROM position")
                writer.execute("DELETE FROM mark_epoch")
            writer.executemany("DELETE FROM entry WHERE row = ?", gone)
            writer.executemany(load_sql(__package__, "put_entry"), put)
            writer.executemany(load_sql(__package__, "put_position"), positions)
            writer.executemany("DELETE FROM mark_epoch WHERE partition = ?", unknown)
            writer.executemany("REPLACE INTO mark_epoch (partition, mark_offset, epoch) VALUES (?, ?, ?)", epochs)
            writer.executemany("REPLACE INTO note (name, value) VALUES (?, ?)", notes.items())

    def _close(self) -> None:
        with self._reading:
            if self._reader is not None:
                self._reader.close()
            self._reader = None
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        if self._damage is not None and _code(self._damage) in _DAMAGES:
            with suppress(OSError):  # it is gone, or may not be moved
                self._put_aside(self._damage)  # the check at the next start does not see all damage
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _code(error: sqlite3.Error) -> int:
    """SQLite's, or that of damage where Python itself raises it: a text of the file is no UTF-8."""
    of_pythons = sqlite3.SQLITE_CORRUPT if isinstance(error, sqlite3.OperationalError) else sqlite3.SQLITE_OK
    return getattr(error, "sqlite_errorcode", of_pythons) & 0xFF


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """The connection is in autocommit, so that nothing is begun behind our back."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    except BaseException:
        if connection.in_transaction:  # a full disk has ended it already, and is what is to be told
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
