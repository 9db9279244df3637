"""TLS by files that are replaced while the process lives, as certificates are that run out after some days."""

import logging
import ssl
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

from aiokafka.helpers import create_ssl_context

__all__ = ["context_of"]

log = logging.getLogger("sidings.kafka")

_Stamp = tuple[tuple[int, int, int], ...]


@cache
def context_of(
    cafile: Path | None, certfile: Path | None, keyfile: Path | None, password: str | None
) -> ssl.SSLContext:
    """The context of all clients with these files. Raises `OSError` (`ssl.SSLError` is one) where they cannot be used
    now; later, what was read before is used until they can."""
    return _Renewed(cafile, certfile, keyfile, password)


class _Renewed(ssl.SSLContext):
    """Each new connection gets what stands in the files then. A client has one context, and connects again for as long
    as it lives: to a broker with a certificate of a new authority it could not, though the file had come before, nor to
    any with a certificate of its own that had run out."""

    def __new__(cls, cafile: Path | None, certfile: Path | None, keyfile: Path | None, password: str | None) -> Self:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, cafile: Path | None, certfile: Path | None, keyfile: Path | None, password: str | None) -> None:
        self._files = [file for file in (cafile, certfile, keyfile) if file is not None]
        self._make = partial(create_ssl_context, cafile=cafile, certfile=certfile, keyfile=keyfile, password=password)
        self._stamp = self._look()
        self._current = self._make()

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """What asyncio calls for each connection."""
        self._renew()
        return self._current.wrap_bio(*args, **kwargs)

    def _renew(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp  # also of files that cannot be used: they are read again when they change again
        names = ", ".join(str(file) for file in self._files)
        try:
            self._current = self._make()
        except OSError as error:
            log.warning(
                "the TLS files were replaced and cannot be used, going on with those of before: %s: %s", names, error
            )
        else:
            log.info("the TLS files were replaced, and read again: %s", names)

    def _look(self) -> _Stamp | None:
        """What changes when a file does; None: one is not there, as for a moment while it is replaced."""
        try:
            found = [file.stat() for file in self._files]
        except OSError:
            return None
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in found)
