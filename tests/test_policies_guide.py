"""The examples of docs/policies.md do what the page says."""

from datetime import timedelta
from typing import Any

from sidings.jobs import Job, Transaction
from sidings.testing import drain

from .guide import run as guide
from .support import ORIGIN, connected, drained, enqueue, eventually, fetch, history, jobs_left, running, value

PAGE = "policies.md"


async def test_the_debounce_of_the_guide_leaves_only_the_last(database: str):
    names = guide(PAGE, "", "How the jobs of a group relate", "Debounce")
    async with connected(database) as connection, connection.transaction():
        await connection.execute("INSERT INTO sidings.topic (topic, partitions) VALUES ('transports', 1)")
        for _ in range(3):
            await names["changed"](Transaction(connection), "t-1")
    rows = await fetch(database, "SELECT run_at - enqueued_at AS delay FROM sidings.job")
    assert all(timedelta(seconds=4) < row["delay"] < timedelta(seconds=6) for row in rows)
    await fetch(database, "UPDATE sidings.job SET run_at = now()")
    async with running(database, names["jobs"]):
        await drained(database)
    assert sorted(row["outcome"] for row in await history(database, "outcome")) == ["succeeded", *["superseded"] * 2]


async def test_the_unique_job_of_the_guide_is_stored_once(database: str):
    names = guide(PAGE, "", "A job at most once at a time")
    async with connected(database) as connection, connection.transaction():
        tx = Transaction(connection)
        assert await names["ask_for_rebuild"](tx) == await names["ask_for_rebuild"](tx)
    assert await jobs_left(database) == 1


async def test_the_batch_of_the_guide_ends_each_job_as_it_deserves(database: str):
    names = guide(PAGE, "", "Many jobs in one call")
    position = names["Position"]
    payloads = [position(transport_id=f"t{n}", latitude=90.5 if n == 3 else 1.0) for n in range(9)]
    await enqueue(database, names["push"], payloads)
    async with running(database, names["jobs"]):
        await drained(database)
    assert sorted(row["outcome"] for row in await history(database, "outcome")) == ["discarded", *["succeeded"] * 8]


async def test_the_type_of_the_guide_with_a_limit_is_declared_so(database: str):
    names = guide(PAGE, "", "No more calls at once than another system takes")
    assert names["book"].concurrency == 5
    await enqueue(database, names["book"], [names["Position"](transport_id=f"t{n}") for n in range(9)])
    async with running(database, names["jobs"]):
        await drained(database)


async def test_the_types_of_the_guide_that_give_up_are_declared_so(database: str):
    names = guide(PAGE, "", "When a job has used up its attempts")
    assert names["invoice"].retry.on_exhausted == "block"
    [job] = await enqueue(database, names["invoice"], [names["Position"](transport_id="t")], origin=ORIGIN)
    async with running(database, names["jobs"]):
        await eventually(lambda: value(database, "SELECT count(*) = 0 FROM sidings.job WHERE id = $1", job))


async def test_the_delivery_of_the_guide_that_gives_up_is_followed_by_a_refund(database: str):
    names = guide(PAGE, "", "Another job follows")
    refund, deliver = names["refund"], names["deliver"]
    assert deliver.retry.follow_up is refund

    sent, asked = set[str](), list[str]()

    async def fail(job: Job[Any]) -> None:
        sent.add(job.idempotency_key)
        raise ConnectionError("the courier does not answer")

    async def delivered(key: str) -> bool:
        asked.append(key)
        return True

    deliver.handler, names["delivered"] = fail, delivered
    await enqueue(database, deliver, [names["Order"](order_id="o-1", cents=5)])
    attempts = await drain(database, names["jobs"], until=3_600)
    assert [(a.type, a.outcome) for a in attempts[4:]] == [("deliver", "followed"), ("refund", "succeeded")]
    assert (len(attempts), asked) == (6, list(sent))
    assert attempts[-1].payload == names["Order"](order_id="o-1", cents=5)
