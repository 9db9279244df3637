"""By `Job.idempotency_key` a receiver knows what it has done already: the same for all attempts of a job, and for the
jobs that persons make of it by requeueing, which have all of its headers; another one for whatever else there is."""

import random
from datetime import timedelta
from typing import Any

import pytest
from sidings import Admin
from sidings.errors import EnqueueError
from sidings.jobs import Discard, Job, Registry, Retry
from sidings.jobs.job import idempotency_key
from sidings.testing import drain
from tenacity import stop_after_attempt, wait_fixed, wait_none

from .support import ORIGIN, Ride, connected, drained, enqueue, fetch, history, running

HEADERS = {"correlation_id": "c-1", "shop": "7", "ключ": "ä"}
TWICE = Retry(wait=wait_none(), stop=stop_after_attempt(2))


class Charges:
    """A type whose jobs fail. seen: those that its handler was called with."""

    def __init__(self, retry: Retry = TWICE, **options: Any) -> None:
        self.seen: list[Job[Ride]] = []
        self.registry = Registry()

        async def charge(job: Job[Ride]) -> None:
            self.seen.append(job)
            raise ConnectionError("the answer of the bank is lost")

        self.charge = self.registry.job(**{"group": "transport", "retry": retry} | options)(charge)

    @property
    def keys(self) -> list[str]:
        return [job.idempotency_key for job in self.seen]


async def requeue(database: str, id: int, *, force: bool = False) -> int:
    async with connected(database) as connection:
        return await Admin(connection, actor="alice").requeue(id, force=force)


@pytest.mark.parametrize("history", [True, False])
async def test_a_requeued_job_has_the_headers_and_the_key_of_the_first_one(database: str, history: bool):
    """It had a number and a time of its own, which were the key: what had been charged was charged again."""
    charges = Charges(history=history)
    [first] = await enqueue(database, charges.charge, [Ride(transport="a")], headers=HEADERS)
    async with running(database, charges.registry):
        await drained(database)
        second = await requeue(database, first)
        await drained(database)
        third = await requeue(database, second)
        await drained(database)
        await requeue(database, first, force=True)
        await drained(database)
    assert [job.id for job in charges.seen[:6]] == [first, first, second, second, third, third]
    assert len(charges.keys) == 8
    assert set(charges.keys) == {idempotency_key(first, charges.seen[0].enqueued_timestamp)}
    assert all(job.headers == HEADERS for job in charges.seen)


async def test_a_job_that_had_no_headers_comes_back_with_none_and_with_its_key(database: str):
    charges = Charges()
    [first] = await enqueue(database, charges.charge, [Ride(transport="a")])
    await drain(database, charges.registry)
    await requeue(database, first)
    await drain(database, charges.registry)
    assert [job.headers for job in charges.seen] == [{}] * 4
    assert len(set(charges.keys)) == 1


async def test_of_what_has_ended_before_the_correlation_id_comes_back(database: str):
    """Or what an instance of an earlier release has ended beside this one."""
    charges = Charges()
    [first] = await enqueue(database, charges.charge, [Ride(transport="a")], headers=HEADERS)
    await drain(database, charges.registry)
    await fetch(database, "UPDATE sidings.job_history SET headers = NULL")
    await requeue(database, first)
    await drain(database, charges.registry)
    assert charges.seen[-1].headers == {"correlation_id": "c-1"}
    assert len(set(charges.keys)) == 1


async def test_whatever_ends_a_job_and_keeps_its_payload_keeps_its_headers(database: str):
    charges = Charges()
    newest = charges.registry.job(name="newest", policy="latest", group="transport")(_nothing)
    made: list[int] = []
    for type, options in (
        (charges.charge, {}),
        (charges.charge, {}),
        (charges.charge, {"delay": 3600}),
        (newest, {}),
        (newest, {}),
        (newest, {"delay": timedelta(microseconds=1)}),
        (newest, {"delay": 3600}),
    ):
        made += await enqueue(database, type, [Ride(transport=type.name)], headers=HEADERS, **options)
    async with connected(database) as connection:
        admin = Admin(connection, actor="alice")
        await admin.cancel(made[0])
        assert [done.error async for done in admin.each("discard", made[1:2])] == [None]
        async with connection.transaction():
            assert await charges.charge.withdraw(connection, made[2])
        await drain(database, charges.registry)
        ended = {job.job_id: job for job in await admin.ended(outcomes=["cancelled", "discarded", "superseded"])}
        assert sorted(ended) == [*made[:4], made[5]], "the newest that was due has succeeded"
        for id in ended:
            assert (await admin.show(id)).headers == HEADERS
            assert (await admin.show(await admin.requeue(id))).headers.items() > HEADERS.items()


async def _nothing(job: Job[Ride]) -> None: ...


async def test_attempts_that_keep_no_payload_keep_no_headers(database: str):
    """What succeeds costs the history no more than before."""
    charges = Charges()
    fine = charges.registry.job(name="fine")(_nothing)
    await enqueue(database, charges.charge, [Ride(transport="a")], headers=HEADERS)
    await enqueue(database, fine, [Ride(transport="a")], headers=HEADERS)
    async with running(database, charges.registry):
        await drained(database)
    rows = await history(database, "outcome, headers, payload")
    kept = {row["outcome"]: (row["headers"] is not None, row["payload"] is not None) for row in rows}
    assert kept == {"retried": (False, False), "discarded": (True, True), "succeeded": (False, False)}


async def test_the_keys_of_python_and_of_sql_are_equal_at_any_time(database: str):
    """Of microseconds a float is too coarse from 2041 on; SQL has them whole."""
    rng = random.Random(1)
    micros = [rng.randrange(7_000_000_000_000_000) for _ in range(20_000)]  # until 2191
    micros += [each // 10**6 * 10**6 for each in micros[:99]]
    rows = await fetch(
        database,
        """SELECT n, date_part('epoch', at) AS enqueued, n || '-' || (extract(epoch FROM at) * 1000000)::bigint AS key
           FROM unnest($1::bigint[]) WITH ORDINALITY u (micros, n),
                LATERAL (SELECT timestamptz '1970-01-01Z' + micros * interval '1 microsecond' AS at) t""",
        micros,
    )
    assert [row["key"] for row in rows] == [f"{number}-{each}" for number, each in enumerate(micros, 1)]
    assert [idempotency_key(row["n"], row["enqueued"]) for row in rows] == [row["key"] for row in rows]


async def test_a_follow_up_has_a_key_of_its_own_and_learns_that_of_the_job_that_it_follows(database: str):
    """Also of a job that was requeued: its key must not travel on, for the refund is no repeat of the charge."""
    refunds: list[Job[Ride]] = []
    failing = True

    async def refund(job: Job[Ride]) -> None:
        refunds.append(job)
        if failing:
            raise Discard("no such account")

    charges = Charges()
    refund_type = charges.registry.job(group="transport")(refund)
    retry = Retry(stop=stop_after_attempt(1), on_exhausted=refund_type)
    pay = charges.registry.job(name="pay", group="transport", retry=retry)(charges.charge.handler)
    [first] = await enqueue(database, pay, [Ride(transport="a")], headers=HEADERS)
    async with running(database, charges.registry):
        await drained(database)
        await requeue(database, first)
        await drained(database)
        failing = False
        await requeue(database, refunds[0].id)
        await drained(database)
    assert len(set(charges.keys)) == 1
    assert len(charges.keys) == 2
    first_refund, second_refund, again = refunds
    assert [job.headers["sidings-job-key"] for job in refunds] == [charges.keys[0]] * 3
    assert first_refund.idempotency_key == idempotency_key(first_refund.id, first_refund.enqueued_timestamp)
    assert second_refund.idempotency_key == idempotency_key(second_refund.id, second_refund.enqueued_timestamp)
    assert again.idempotency_key == first_refund.idempotency_key
    assert again.headers == first_refund.headers  # it still knows why, and what it follows


async def test_a_follow_up_in_a_drain_learns_the_key_that_the_handler_saw_although_time_passes(database: str):
    refunds: list[Job[Ride]] = []
    charges = Charges()

    async def refund(job: Job[Ride]) -> None:
        refunds.append(job)

    retry = Retry(wait=wait_fixed(60), stop=stop_after_attempt(3), on_exhausted=charges.registry.job()(refund))
    pay = charges.registry.job(name="pay", retry=retry)(charges.charge.handler)
    await enqueue(database, pay, [Ride()])
    await drain(database, charges.registry, until=600)
    assert len(charges.keys) == 3
    assert set(charges.keys) == {refunds[0].headers["sidings-job-key"]}


async def test_what_a_requeued_job_enqueues_with_its_headers_has_a_key_of_its_own(database: str):
    told: list[Job[Ride]] = []
    registry = Registry()

    @registry.job()
    async def tell(job: Job[Ride]) -> None:
        told.append(job)

    @registry.job(transactional=True, retry=Retry(stop=stop_after_attempt(1)))
    async def charge(job: Job[Ride]) -> None:
        await tell.enqueue(job.tx, job.payload, headers=job.headers)

    [id] = await enqueue(database, charge, [Ride()], headers=HEADERS)
    async with connected(database) as connection:
        await Admin(connection, actor="alice").cancel(id)
    await requeue(database, id)
    await drain(database, registry)
    [job] = told
    assert job.headers == HEADERS
    assert job.idempotency_key == idempotency_key(job.id, job.enqueued_timestamp)


async def test_nobody_gives_a_job_the_key_of_another_one_as_a_header(database: str):
    charges = Charges()
    given = {"sidings-idempotency-key": "7-1"}
    for headers in (given, [given]):
        with pytest.raises(EnqueueError, match=r"'sidings-idempotency-key' is what a requeued job has"):
            async with connected(database) as connection, connection.transaction():
                await charges.charge.enqueue_many(connection, [Ride(transport="a")], origin=ORIGIN, headers=headers)


def test_a_jobs_key_can_be_given_in_a_test():
    assert Job.fake(1, id=7, idempotency_key="k").idempotency_key == "k"
    assert Job.fake(1, id=7).idempotency_key.startswith("7-")
