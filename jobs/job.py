"""What a handler gets to see of its job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Generic, NamedTuple, NewType, TypeVar

from ..errors import ConfigurationError
from .context import travelling
from .transaction import Transaction

__all__ = ["IDEMPOTENCY_KEY", "Fence", "Job", "JobId", "P", "idempotency_key"]

IDEMPOTENCY_KEY = "sidings-idempotency-key"  # a header of what was requeued, and of no other job

P = TypeVar("P")
F = TypeVar("F")
JobId = NewType("JobId", int)


class Fence(NamedTuple):
    """A fencing token for effects outside the database.

    Send it along, and let the receiver refuse an epoch smaller than the largest that it has seen of the origin. Of two
    tokens of one origin the one with the larger epoch is right, also after a failover of Postgres that has lost
    takeovers.

    Attributes:
        origin: ``topic/partition``.
        epoch: Grows with every change of owner.
    """

    origin: str
    epoch: int


_NO_FENCE = Fence("", 0)


@dataclass(slots=True)
class Job(Generic[P]):
    """One attempt of a job, as its handler receives it.

    Attributes:
        payload: Validated against the type's model.
        type: Name of the job type.
        origin: ``topic/partition``.
        group: None for a job without one.
        attempt: Counts runs from 1, lost and snoozed ones included.
        failures: Counts those runs that failed.
        priority: -100 to 100, larger first.
        enqueued_timestamp: Seconds since 1970, by the database's clock. `enqueued_at` is the same as a datetime.
        headers: What was given at the `enqueue`, with the correlation id and the trace.
        fence: A fencing token, for effects outside the database.
        transaction: What `tx` gives; None unless the type is transactional.
        first_key: Of a job that was requeued the `idempotency_key` of the first one; else empty.
    """

    payload: P
    id: JobId = JobId(0)
    type: str = ""
    origin: str = ""
    group: str | None = None
    attempt: int = 1
    failures: int = 0
    priority: int = 0
    enqueued_timestamp: float = 0.0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    fence: Fence = _NO_FENCE
    transaction: Transaction | None = None
    first_key: str = ""

    @staticmethod
    def fake(
        payload: F,
        *,
        id: int = 1,
        type: str = "fake",
        origin: str = "fake/0",
        group: str | None = None,
        attempt: int = 1,
        failures: int = 0,
        priority: int = 0,
        enqueued_at: datetime | None = None,
        headers: Mapping[str, str] | None = None,
        epoch: int = 1,
        tx: Transaction | None = None,
        idempotency_key: str = "",
    ) -> "Job[F]":
        """A job that is in no database, to call a handler with::

            await send_eta(Job.fake(SendEta(...)))

        Args:
            origin: What the handler enqueues belongs to it, unless the handler says otherwise.
            enqueued_at: Default: now.
            epoch: Of the job's `fence`.
            tx: For a transactional handler: a `Transaction` around a connection of the test's.
            idempotency_key: Default: made of `id` and `enqueued_at`, as of a job that was not requeued.
        """
        return Job(
            payload,
            JobId(id),
            type,
            origin,
            group,
            attempt,
            failures,
            priority,
            (enqueued_at or datetime.now(UTC)).timestamp(),
            dict(headers or {}),
            Fence(origin, epoch),
            tx,
            idempotency_key,
        )

    @property
    def tx(self) -> Transaction:
        """The transaction that ends this job, for types declared with ``transactional=True``.

        Raises:
            ConfigurationError: The type is not transactional, or `fake` was given no `tx`.
        """
        if self.transaction is None:
            raise ConfigurationError(
                f"{self.type}: job.tx exists where the type is declared with transactional=True; a test gives it by "
                "Job.fake(..., tx=Transaction(connection))"
            )
        return self.transaction

    @property
    def idempotency_key(self) -> str:
        """By this a receiver knows what it has done for this job already::

            await bank.post("/charges", json=..., headers={"Idempotency-Key": job.idempotency_key})

        The same for all attempts of the job, and for the jobs that `Admin.requeue` makes of it; no other job of this
        schema ever has it. A job that follows another one (`Retry(on_exhausted=)`) has a key of its own, and that of
        the other one in its header ``sidings-job-key``.
        """
        return self.first_key or idempotency_key(self.id, self.enqueued_timestamp)

    def travelling(self) -> dict[str, str]:
        """The headers that go on to what the handler enqueues and publishes (docs/observability.md)."""
        return travelling(self.headers.items()) if self.headers else {}

    def log_fields(self) -> dict[str, object]:
        """What `LogContext` adds to each line of the log."""
        return {
            "job_id": self.id,
            "job_type": self.type,
            "origin": self.origin,
            "group": self.group,
            "attempt": self.attempt,
        }

    @property
    def enqueued_at(self) -> datetime:
        """When the job was enqueued, by the database's clock, in UTC."""
        return datetime.fromtimestamp(self.enqueued_timestamp, UTC)


def idempotency_key(id: int, enqueued_timestamp: float) -> str:
    """That of a job that was not requeued: its id, and when it was enqueued, since after a failover that has lost
    commits ids come again. As ``sidings.requeue_job`` in SQL."""
    seconds, fraction = divmod(enqueued_timestamp, 1)  # apart: in microseconds a float is too coarse from 2041 on
    return f"{id}-{int(seconds) * 1_000_000 + round(fraction * 1e6)}"
