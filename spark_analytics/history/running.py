"""Spark's work in threads, so that it can be interrupted."""

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from functools import partial

from pyspark import SparkContext

__all__ = ["run_all"]


def run_all(context: SparkContext, tasks: Sequence[Callable[[], None]], at_once: int = 1) -> None:
    """Run them, so many at once. Where one fails, or this is interrupted, the jobs of the others are cancelled, and
    their threads have ended when the error is raised.

    The calling thread only waits: an exception out of a signal's handler, in a call to Java, would leave the answer to
    that call as the next one's.
    """
    tag = f"history-{secrets.token_hex(4)}"
    pool = ThreadPoolExecutor(at_once, "history")
    started = [pool.submit(partial(_tagged, context, tag, task)) for task in tasks]
    try:
        for done in as_completed(started):
            done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        while any(future.running() for future in started):
            context.cancelJobsWithTag(tag)  # again: it may have been about to start one
            wait(started, timeout=0.2)


def _tagged(context: SparkContext, tag: str, task: Callable[[], None]) -> None:
    context.addJobTag(tag)  # of what this thread starts
    task()
