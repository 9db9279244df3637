"""Processes that handlers fork with `os.fork`, and that come out of the handler instead of ending there."""

import logging
import os

__all__ = ["end_if_forked"]

log = logging.getLogger("sidings.executor")


def end_if_forked(pid: int, error: BaseException | None = None) -> None:
    """End this process if it is not `pid`, which has called a handler, but a child of it: as where `os.exec` fails, or
    `sys.exit` is to end it. With its copy of the event loop and of the connections it would be a second executor.

    error: what the handler has raised.
    """
    if os.getpid() == pid:
        return
    if not isinstance(error, SystemExit):
        log.error("a process that a handler has forked has come out of the handler, and ends", exc_info=error)
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else int(code is not None))
