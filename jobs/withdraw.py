"""Which job is to be withdrawn, checked before anything is sent."""

from collections.abc import Callable

from ..errors import EnqueueError
from .connections import Statement, Storing
from .enqueue import short

__all__ = ["WITHDRAWALS", "withdrawal"]

WITHDRAWALS = Storing(__package__ or "", "job's withdrawal", "withdraw", many=False)


def withdrawal(
    schema: str, type_name: str, history: bool, job_id: int | None, unique_key: str | None
) -> Callable[[], Statement]:
    """What gives the statement that withdraws one job; see `JobType.withdraw`. Raises `EnqueueError`."""
    if (job_id is None) == (unique_key is None):
        raise EnqueueError(f"{type_name}: give job_id= or unique_key= to withdraw a job, one of the two")
    if unique_key == "":
        raise EnqueueError("unique_key is empty: give the one that the job was enqueued with")
    if job_id is not None and (type(job_id) is not int or job_id.bit_length() > 63):
        raise EnqueueError(f"job_id={job_id!r} is no job's id: give what `enqueue` has returned, or unique_key=")
    statement = Statement("withdraw_job", schema, (type_name, job_id, short("unique_key", unique_key), history), 1, "")
    return lambda: statement
