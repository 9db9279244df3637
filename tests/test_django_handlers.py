"""Plain handlers that use Django's connection: one for each thread, and in these no request begins or ends."""

import django.db
import pytest
from sidings.jobs import Job, Registry, Retry
from tenacity import wait_fixed

from .support import Ride, connected, enqueue, eventually, outcomes, running
from .ways import use_django


@pytest.mark.parametrize(
    ("max_age", "expected"),
    [
        (None, ["succeeded", "retried", "succeeded", "retried", "succeeded"]),
        (0, ["succeeded", "succeeded", "succeeded"]),
    ],
    ids=["kept", "closed"],
)
async def test_a_lost_connection_costs_one_attempt_at_most(
    database: str, max_age: int | None, expected: list[str]
) -> None:
    """Django looks at its connections where a request ends, and in the threads of plain handlers none does: "the
    connection is closed" was what each further job of the thread got, until the process ended."""
    registry, pids = Registry(), list[int]()
    use_django(database)
    django.db.connections.settings["default"]["CONN_MAX_AGE"] = max_age

    @registry.job(retry=Retry(wait=wait_fixed(0.05)))
    def ride(job: Job[Ride]) -> None:
        with django.db.connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            pids.append(cursor.fetchone()[0])

    async with running(database, registry, concurrency=1), connected(database) as other:
        for number in range(3):
            await enqueue(database, ride, [Ride(number=number)])
            await eventually(lambda number=number: len(pids) > number, lambda: pids)
            await other.fetch("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid = $1", pids[-1])
        await eventually(lambda: all_ended(database))
    assert await outcomes(database) == expected


async def all_ended(dsn: str) -> bool:
    return (await outcomes(dsn)).count("succeeded") == 3
