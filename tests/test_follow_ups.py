"""A job that gives up is followed by another one (`Retry(on_exhausted=refund)`): exactly once, whatever goes wrong
around the cycle that ends it, and never where something else ends it."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from sidings import Service, StaticAssignment
from sidings.errors import ConfigurationError, JobNotFound
from sidings.executor import Executor, ExecutorSettings, PostgresSettings, cycles
from sidings.executor.recording import plain, without_follow_ups
from sidings.jobs import Discard, End, ErrorInfo, Job, OutcomeName, Registry, Retry, Tick, current_headers
from sidings.jobs.admin import Admin
from sidings.schema import load_sql
from sidings.testing import drain
from tenacity import (
    retry_if_exception_type,
    retry_if_not_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_none,
)

from . import fleet as fleets
from .chaos_worker import Journal, Work
from .faulty_proxy import Moment, proxied
from .fleet import Fleet, until
from .follow_up_worker import registry_of
from .support import (
    ORIGIN,
    SECONDS,
    Ride,
    connected,
    drained,
    enqueue,
    eventually,
    fetch,
    history,
    lose,
    running,
    value,
    without_place,
)

TWICE = Retry(wait=wait_none(), stop=stop_after_attempt(2))
ONCE = Retry(stop=stop_after_attempt(1))


class Bank:
    """Charges that give up, and the refunds that follow them. refunded: those jobs, in order. called: numbers of the
    payloads, of a refund negative, in the order of the calls."""

    def __init__(self, **options: Any) -> None:
        self.registry = Registry()
        self.refunded: list[Job[Ride]] = []
        self.called: list[int] = []

        async def refund(job: Job[Ride]) -> None:
            self.refunded.append(job)
            self.called.append(-job.payload.number)

        self.refund = self.registry.job(**{"group": "transport"} | options)(refund)

    def charge(self, handler: Callable[..., Any], retry: Retry = ONCE, **options: Any) -> Any:
        """A type of jobs that a refund follows."""
        made = {"name": "charge", "group": "transport", "retry": replace(retry, on_exhausted=self.refund)}
        return self.registry.job(**made | options)(handler)

    def failing(self, text: str = "the bank does not answer", **options: Any) -> Any:
        async def charge(job: Job[Ride]) -> None:
            self.called.append(job.payload.number)
            raise ConnectionError(text)

        return self.charge(charge, **options)


async def execute(database: str, script: str) -> None:
    async with connected(database) as connection:
        await connection.execute(script)


async def pause(database: str, type: str) -> None:
    """Its jobs are stored, and do not start."""
    async with connected(database) as connection:
        await Admin(connection, actor="alice").pause(type=type, reason="to look at them")


async def ends(database: str) -> list[tuple[str, str]]:
    """Type and outcome of the attempts that ended a job."""
    rows = await history(database, "type, outcome")
    return [(row["type"], row["outcome"]) for row in rows if OutcomeName(row["outcome"]).terminal]


# -- what follows ---------------------------------------------------------------------------------------------------


async def test_a_job_that_gives_up_is_followed_by_one_with_its_payload_at_the_end_of_its_group(
    database: str, caplog: pytest.LogCaptureFixture
):
    bank = Bank()

    async def charge(job: Job[Ride]) -> None:
        bank.called.append(job.payload.number)
        if job.payload.number == 1:
            raise ConnectionError("the bank does not answer")

    charge_type = bank.charge(charge, TWICE)
    trace = {"correlation_id": "c-1", "shop": "7"}
    async with connected(database) as connection, connection.transaction():
        first, _, _ = [
            await charge_type.enqueue(
                connection,
                Ride(transport="a", number=number),
                origin=ORIGIN,
                priority=7,
                headers=trace,
                unique_key=f"order {number}",
            )
            for number in (1, 2, 3)
        ]
    async with running(database, bank.registry):
        await drained(database)
    assert bank.called == [1, 1, 2, 3, -1]
    [job] = bank.refunded
    assert (job.type, job.origin, job.group, job.priority, job.attempt) == ("refund", ORIGIN, "a", 7, 1)
    error = job.headers.pop("sidings-error")
    assert without_place(error) == "ConnectionError: the bank does not answer"
    assert "tests.test_follow_ups" in error  # as in the history
    key = job.headers.pop("sidings-job-key")
    assert key.startswith(f"{first}-")
    assert job.headers == trace | {"sidings-job-id": str(first), "sidings-job-type": "charge"}
    rows = [row for row in await history(database) if row["job_id"] == first]
    assert [row["outcome"] for row in rows] == ["retried", "followed"]
    assert Ride.model_validate_json(rows[1]["payload"]).number == 1
    assert f"{rows[1]['error_class']}: {rows[1]['error_message']}" == error
    assert "failed, followed by a job refund: ConnectionError" in caplog.text


async def test_what_follows_starts_at_once_and_not_at_the_next_poll(database: str):
    bank = Bank()
    [id] = await enqueue(database, bank.failing(), [Ride(transport="a", number=1)])
    async with running(database, bank.registry, poll_seconds=10 * SECONDS):
        await drained(database)
    assert [job.headers["sidings-job-id"] for job in bank.refunded] == [str(id)]


@pytest.mark.parametrize("policy", ["serial", "parallel"])
async def test_what_follows_has_the_policy_of_its_own_type(database: str, policy: str):
    bank = Bank(policy=policy)
    await enqueue(database, bank.failing(), [Ride(transport="a", number=1)])
    await pause(database, "refund")
    async with running(database, bank.registry):
        await eventually(lambda: fetch(database, "SELECT FROM sidings.job WHERE type = 'refund'"))
    [row] = await fetch(database, 'SELECT policy, "group", position, unique_key, run_at FROM sidings.job')
    assert (row["policy"], row["group"]) == ({"serial": 0, "parallel": 2}[policy], "a")
    assert row["position"] is not None
    assert (row["unique_key"], row["run_at"]) == (None, None)


async def test_what_has_no_groups_follows_a_job_of_a_group_and_leaves_it(database: str):
    bank = Bank(group=None)
    await enqueue(database, bank.failing(), [Ride(transport="a", number=1)])
    async with running(database, bank.registry):
        await drained(database)
    assert [job.group for job in bank.refunded] == [None]


async def test_a_job_that_sql_has_stored_without_its_types_group_is_followed_by_one_without(database: str):
    bank = Bank()
    bank.failing()
    async with connected(database) as connection:
        await connection.execute("SELECT sidings.enqueue('charge', '{\"number\": 5}', $1)", ORIGIN)
    async with running(database, bank.registry):
        await drained(database)
    assert [(job.group, job.payload) for job in bank.refunded] == [(None, Ride(number=5))]


async def test_what_follows_may_give_up_as_well_and_tells_of_its_own_error(database: str):
    bank = Bank()

    async def refund_later(job: Job[Any]) -> None:
        raise ValueError(f"not either: {job.payload['number']}")

    later = bank.registry.job(retry=replace(ONCE, on_exhausted=bank.registry.job(name="tell")(_nothing)))(refund_later)

    async def charge(job: Job[Ride]) -> None:
        raise ConnectionError("x")

    bank.registry.job(name="order", group="transport", retry=replace(ONCE, on_exhausted=later))(charge)
    [id] = await enqueue(database, bank.registry["order"], [Ride(transport="a", number=1)])
    await pause(database, "tell")
    async with running(database, bank.registry):
        await eventually(lambda: fetch(database, "SELECT FROM sidings.job WHERE type = 'tell'"))
    headers = json.loads(await value(database, "SELECT headers FROM sidings.job"))
    assert without_place(headers.pop("sidings-error")) == "ValueError: not either: 1"
    followed = headers.pop("sidings-job-id")
    assert int(followed) > id
    assert headers.pop("sidings-job-key").startswith(f"{followed}-")
    assert headers == {"sidings-job-type": "refund_later"}


async def _nothing(job: Job[Any]) -> None: ...


async def test_why_a_job_gave_up_does_not_travel_on_to_other_jobs(database: str):
    registry, handed_on = Registry(), list[dict[str, str]]()

    @registry.job()
    async def refund(job: Job[Ride]) -> None:
        handed_on.append(current_headers())

    @registry.job(retry=replace(ONCE, on_exhausted=refund))
    async def charge(job: Job[Ride]) -> None:
        raise ConnectionError("x")

    await enqueue(database, charge, [Ride()], headers={"correlation_id": "c-1"})
    async with running(database, registry):
        await drained(database)
    assert handed_on == [{"correlation_id": "c-1"}]


async def test_an_error_text_of_any_length_and_kind_is_told(database: str):
    bank = Bank()
    await enqueue(database, bank.failing("a\0b\ud800" + "x" * 5_000), [Ride(transport="a")])
    async with running(database, bank.registry):
        await drained(database)
    [job] = bank.refunded
    error = job.headers["sidings-error"]
    assert len(error) == 1_000
    assert error.startswith("ConnectionError: a\\0b\\ud800xxx")
    assert re.search(r"xxx \(tests\.test_follow_ups:\d+ in charge\)$", error), "the place, whatever the message is"


async def test_a_tick_that_gives_up_is_followed_by_a_job_with_the_tick(database: str):
    registry, ticks = Registry(), list[Tick]()

    @registry.job()
    async def tell(job: Job[Tick]) -> None:
        ticks.append(job.payload)

    @registry.periodic(every=3_600, retry=replace(ONCE, on_exhausted=tell))
    async def nightly(job: Job[Tick]) -> None:
        raise ValueError("x")

    tick = Tick(scheduled_at=datetime(2026, 5, 1, tzinfo=UTC))
    await enqueue(database, nightly, [tick])
    await drain(database, registry)
    assert tick in ticks


async def test_a_person_may_requeue_what_has_given_up_and_both_are_there(database: str):
    bank = Bank()
    [id] = await enqueue(database, bank.failing(), [Ride(transport="a", number=1)])
    assert [(a.type, a.outcome) for a in await drain(database, bank.registry)] == [
        ("charge", "followed"),
        ("refund", "succeeded"),
    ]
    async with connected(database) as connection:
        again = await Admin(connection, actor="alice").requeue(id)
    await drain(database, bank.registry)
    assert [job.headers["sidings-job-id"] for job in bank.refunded] == [str(id), str(again)]


async def test_what_was_followed_is_not_among_what_a_person_brings_back(database: str, admin: Admin):
    """It ended as discarded: the alert on that named a command that delivered what had been refunded."""
    bank = Bank()
    ids = await enqueue(database, bank.failing(history=False), [Ride(transport="a", number=n) for n in range(3)])
    async with running(database, bank.registry) as executor:
        await drained(database)
        counts = {name: executor.metrics.count(name, "charge") for name in OutcomeName}
    assert counts == dict.fromkeys(OutcomeName, 0) | {OutcomeName.FOLLOWED: 3}
    assert await admin.requeueable() == []
    assert [row.job_id for row in await admin.requeueable(outcomes=["followed"])] == ids
    assert {row.job_id: row.outcome for row in await admin.ended()} == dict.fromkeys(ids, "followed")
    for act in (admin.cancel, admin.release):
        with pytest.raises(
            JobNotFound, match=f"no job {ids[0]} any more: followed at .* It can be requeued; then both"
        ):
            await act(ids[0])
    again = await admin.requeue(ids[0])
    assert (await admin.show(ids[0])).actions[0].detail == {"found": "followed", "new_job": again}
    assert [row.job_id for row in await admin.requeueable(outcomes=["followed"])] == ids[1:]


# -- who gives up, and who does not -----------------------------------------------------------------------------------


async def _fails(job: Job[Ride]) -> None:
    raise KeyError("x")


async def _is_zero(job: Job[Ride]) -> int:
    return 0


def _plain(job: Job[Ride]) -> None:
    raise KeyError("x")


async def _takes_long(job: Job[Ride]) -> None:
    await asyncio.sleep(SECONDS)


async def _discards(job: Job[Ride]) -> None:
    raise Discard("no such order")


async def _writes_and_fails(job: Job[Ride]) -> None:
    await job.tx.execute("SELECT 1")
    raise KeyError("x")


async def _lists(batch: list[Job[Ride]]) -> list[Exception | None]:
    return [KeyError("x") if job.payload.number == 1 else None for job in batch]


async def _discards_lists(batch: list[Job[Ride]]) -> list[Exception]:
    return [Discard("x") for _ in batch]


async def _fails_lists(batch: list[Job[Ride]]) -> None:
    raise KeyError("x")


JUDGE = replace(ONCE, retry=retry_if_result(lambda result: result == 0) | retry_if_exception_type(Exception))
NOT_WORTH_IT = Retry(retry=retry_if_not_exception_type(KeyError))


@pytest.mark.parametrize(
    ("handler", "options", "followed"),
    [
        (_fails, {}, True),
        (_plain, {}, True),
        (_fails, {"retry": NOT_WORTH_IT}, True),
        (_fails, {"history": False}, True),
        (_is_zero, {"retry": JUDGE}, True),
        (_takes_long, {"timeout": 0.05}, True),
        (_writes_and_fails, {"transactional": True}, True),
        (_is_zero, {"transactional": True, "retry": JUDGE}, True),
        (_lists, {"batch": 5, "payload": Ride}, True),
        (_fails_lists, {"batch": 5, "payload": Ride}, True),
        (_discards, {}, False),
        (_discards_lists, {"batch": 5, "payload": Ride}, False),
    ],
    ids=[
        *("fails", "plain", "not worth it", "no history", "result", "timeout", "transactional", "its result"),
        *("in a list", "a list", "discards", "discards a list"),
    ],
)
async def test_whatever_a_policy_gives_up_is_followed_and_nothing_else(
    database: str, handler: Any, options: dict[str, Any], followed: bool
):
    bank = Bank()
    options = dict(options)
    charge = bank.charge(handler, options.pop("retry", ONCE), **options)
    [id] = await enqueue(database, charge, [Ride(transport="a", number=1)])
    async with running(database, bank.registry):
        await drained(database)
    assert [job.headers["sidings-job-id"] for job in bank.refunded] == ([str(id)] if followed else [])
    assert ("charge", "followed" if followed else "discarded") in await ends(database)


async def test_a_job_whose_payload_does_not_validate_is_held_and_not_followed(database: str):
    bank = Bank()
    bank.failing()
    async with connected(database) as connection:
        await connection.execute("SELECT sidings.enqueue('charge', '{\"number\": \"x\"}', $1)", ORIGIN)
    await drain(database, bank.registry)
    assert [row["type"] for row in await fetch(database, "SELECT type FROM sidings.job WHERE held IS NOT NULL")] == [
        "charge"
    ]


async def test_poison_is_held_and_not_followed(database: str):
    bank = Bank()
    [id] = await enqueue(database, bank.failing(), [Ride(transport="a")])
    await lose(database, [id], 7)
    await drain(database, bank.registry)
    assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.job WHERE held IS NOT NULL")] == [id]


@pytest.mark.parametrize("by", ["cancel", "discard", "row"])
async def test_a_job_that_somebody_has_ended_meanwhile_is_not_followed(database: str, admin: Admin, by: str):
    bank, started, gate = Bank(), threading.Event(), threading.Event()

    def charge(job: Job[Ride]) -> None:
        started.set()
        gate.wait(SECONDS)
        raise ConnectionError("x")

    charge_type = bank.charge(charge)
    [id] = await enqueue(database, charge_type, [Ride(transport="a")])
    async with running(database, bank.registry):
        await eventually(started.is_set)
        if by == "row":
            await fetch(database, "DELETE FROM sidings.job WHERE id = $1", id)
        else:
            await getattr(admin, by)(id)
        await enqueue(database, charge_type, [Ride(transport="a", number=2)])  # is followed
        gate.set()
        await drained(database)
    assert [job.payload.number for job in bank.refunded] == [2]


# -- exactly once -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def impatient(dsn: str, registry: Registry) -> AsyncIterator[Executor]:
    """An executor that waits for no answer for long."""
    postgres = PostgresSettings(dsn=dsn, call_seconds=0.6, connect_seconds=1.0)
    settings = ExecutorSettings(poll_seconds=0.02, shutdown_seconds=2.0, exit_when_fenced=False)
    executor = Executor("test", registry, postgres, settings, prometheus=CollectorRegistry())
    await executor.start()
    try:
        executor.assign([ORIGIN])
        await executor.settled(SECONDS)
        yield executor
    finally:
        await executor.stop()


@pytest.mark.parametrize("enough", [300, 1], ids=["one cycle", "two cycles"])
@pytest.mark.parametrize(
    "moment", [each for each in Moment if each not in (Moment.HELD, Moment.KEPT)], ids=lambda each: each.name.lower()
)
async def test_a_cycle_that_is_repeated_brings_what_follows_once(
    database: str, monkeypatch: pytest.MonkeyPatch, moment: Moment, enough: int
):
    """Its connection is lost before, at or after its commit."""
    await note_what_follows(database)
    monkeypatch.setattr(cycles, "_ENOUGH", enough)
    bank, count = Bank(), 30
    async with proxied(database) as proxy:

        async def charge(job: Job[Ride]) -> None:
            bank.called.append(job.payload.number)
            if len(bank.called) in (5, 20):
                faults.append(proxy.arm("cycle", moment))
            await asyncio.sleep(0.002 * job.payload.number)
            raise ConnectionError("x")

        faults: list[Any] = []
        charge_type = bank.charge(charge)
        rides = [Ride(transport=f"t{number % 10}", number=number) for number in range(count)]
        ids = await enqueue(database, charge_type, rides)
        async with impatient(proxy.dsn, bank.registry):
            await drained(database)
        await eventually(lambda: [fault.hits for fault in faults] == [1, 1])  # one arrives late
    await followed_once(database, ids)


async def followed_once(database: str, ids: list[int]) -> None:
    """Each of these jobs has given up, and one job has followed it, which succeeded."""
    rows = await fetch(database, "SELECT job, followed FROM public.following")
    assert sorted(row["followed"] for row in rows) == sorted(ids)
    attempts = await history(database, "job_id, type, outcome")
    assert sorted(row["job_id"] for row in attempts if row["outcome"] == "followed") == sorted(ids)
    succeeded = [row["job_id"] for row in attempts if row["outcome"] == "succeeded"]
    assert sorted(succeeded) == sorted(row["job"] for row in rows)


async def note_what_follows(database: str) -> None:
    """From now on a table has each job that was stored to follow another, and which."""
    await execute(
        database,
        """CREATE TABLE public.following (job bigint, followed bigint);
        CREATE FUNCTION public.noted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO public.following VALUES (NEW.id, (NEW.headers ->> 'sidings-job-id')::bigint);
            RETURN NULL;
        END $$;
        CREATE TRIGGER noted AFTER INSERT ON sidings.job FOR EACH ROW
            WHEN (NEW.headers ? 'sidings-job-id') EXECUTE FUNCTION public.noted()""",
    )


@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.KEPT, Moment.HELD], ids=lambda each: each.name.lower())
async def test_a_kill_around_the_cycle_that_gives_up_leaves_one_that_follows(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: Moment
):
    """Killed before its cycle is sent, while that is on its way (it arrives after the takeover), and when it has been
    committed and nobody has been told."""
    await note_what_follows(database)
    monkeypatch.setattr(fleets, "WORKER", Path(__file__).with_name("follow_up_worker.py"))
    types = registry_of(Journal(tmp_path / "unused", "test"))
    async with proxied(database) as proxy, Fleet(database, tmp_path) as fleet:
        gate = fleet.gate()
        doomed = fleet.spawn("doomed", ["t/0"], dsn=proxy.dsn)
        [id] = await enqueue(database, types["charge"], [Work(g="a", gate=str(gate))], origin="t/0")
        await until(lambda: fleet.started(id), "the attempt")
        cycle = proxy.arm("cycle", moment)
        gate.touch()
        await until(lambda: cycle.hits, "its cycle")
        if moment is Moment.HELD:
            await until(lambda: fleet.outcomes(id), "its commit")
        doomed.kill()
        heir = fleet.spawn("heir", ["t/0"])
        if moment is Moment.KEPT:
            await until(lambda: fleet.started(id, pid=heir.pid), "the same job elsewhere")
            proxy.let_go()
        await fleet.finish()
        proxy.let_go()
        await heir.stop()
        assert await fleet.outcomes(id) == (["followed"] if moment is Moment.HELD else ["lost", "followed"])
    await followed_once(database, [id])


async def test_outcomes_that_postgres_refuses_are_followed_once_with_the_others(
    database: str, caplog: pytest.LogCaptureFixture
):
    """The cycle is halved until the culprits stand alone, and are recorded without their texts."""
    await note_what_follows(database)
    bank, gathered = Bank(group=None), asyncio.Event()

    async def charge(job: Job[Ride]) -> None:
        await gathered.wait()
        raise ValueError("unwanted" if job.payload.number % 5 == 0 else "x")

    charge_type = bank.charge(charge, group=None)
    await execute(
        database, "ALTER TABLE sidings.job_history ADD CONSTRAINT picky CHECK (error_message NOT LIKE 'unwanted%')"
    )
    ids = await enqueue(database, charge_type, [Ride(number=number) for number in range(20)])
    async with running(database, bank.registry) as executor:
        await eventually(lambda: executor.workers.running() == 20, "all handlers run")
        gathered.set()
        await drained(database)
    await followed_once(database, ids)
    why = {job.payload.number: without_place(job.headers["sidings-error"]) for job in bank.refunded}
    refused = "unrecordable: the error's text could not be stored"
    assert why == {number: "ValueError: x" if number % 5 else refused for number in range(20)}
    assert "a cycle was refused" in caplog.text


async def test_a_job_does_not_end_while_postgres_refuses_what_follows(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    await note_what_follows(database)
    monkeypatch.setattr(cycles, "_REFUSED_RETRY_SECONDS", 0.1)
    bank = Bank()
    ids = await enqueue(database, bank.failing(), [Ride(transport="a"), Ride(transport="a")])
    await execute(database, "ALTER TABLE sidings.job ADD CONSTRAINT picky CHECK (type <> 'refund')")
    async with running(database, bank.registry) as executor:
        await eventually(lambda: "picky" in str(executor.problems()), "it says so")
        assert await fetch(database, "SELECT id FROM sidings.job ORDER BY id") == [(id,) for id in ids]
        assert await history(database) == []
        await execute(database, "ALTER TABLE sidings.job DROP CONSTRAINT picky")
        await drained(database)
    await followed_once(database, ids)


async def test_an_outcome_that_waits_for_a_locked_row_is_followed_once(database: str, caplog: pytest.LogCaptureFixture):
    await note_what_follows(database)
    bank, gate = Bank(), asyncio.Event()

    async def charge(job: Job[Ride]) -> None:
        bank.called.append(job.payload.number)
        await gate.wait()
        raise ConnectionError("x")

    ids = await enqueue(database, bank.charge(charge), [Ride(transport=name, number=1) for name in "ab"])
    async with running(database, bank.registry), connected(database) as blocker:
        await eventually(lambda: bank.called == [1, 1])
        async with blocker.transaction():
            await blocker.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", ids[0])
            gate.set()
            await eventually(lambda: "are locked by another transaction" in caplog.text)
            await eventually(lambda: [job.group for job in bank.refunded] == ["b"])
        await drained(database)
    await followed_once(database, ids)


async def test_what_follows_stays_in_the_origin_of_its_group_where_its_topic_has_grown(database: str):
    """Also a job that somebody stores while that is all that its group has."""
    bank = Bank()
    charge = bank.failing()
    await note_what_follows(database)
    await pause(database, "refund")
    [id] = await enqueue(database, charge, [Ride(transport="a", number=1)], origin="transports/0")
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.topic (topic, partitions, former) VALUES ('transports', 8, '{1}')"
        )
        others = await connection.fetchval("SELECT sidings.known_origin('a', 'transports')")
        assert others != "transports/0"
        async with running(database, bank.registry):
            await eventually(lambda: fetch(database, "SELECT FROM sidings.job WHERE type = 'refund'"))
        place = "SELECT sidings.place($1, 'a')"
        assert await connection.fetchval(place, others) == "transports/0"
    assert await value(database, "SELECT origin FROM sidings.job") == "transports/0"
    assert await value(database, "SELECT followed FROM public.following") == id


def test_an_outcome_that_is_recorded_without_its_text_is_followed_all_the_same():
    bank = Bank()
    outcome = End(OutcomeName.FOLLOWED, ErrorInfo.from_text("X", "y"), bank.refund)
    recorded: Any = plain((None, outcome, 0.0, 0.0))[1]  # type: ignore[arg-type]
    assert (recorded.follow_up, recorded.error.error_class) == (bank.refund, "unrecordable")


def test_a_cycle_that_has_nothing_to_store_is_sent_without_that_part():
    cycle = load_sql("sidings.executor", "cycle")
    usual = without_follow_ups(cycle)
    assert ["followed AS" in text for text in (cycle, usual)] == [True, False]
    assert ["INTO sidings.job (" in text for text in (cycle, usual)] == [True, False]
    assert usual.splitlines() == [line for line in cycle.splitlines() if line in usual.splitlines()]


# -- what is refused --------------------------------------------------------------------------------------------------


class Other(BaseModel):
    transport: str = ""


async def _takes_another(job: Job[Other]) -> None: ...


async def _takes_any(job: Job[Any]) -> None: ...


async def _takes_ride(job: Job[Ride]) -> None: ...


async def _takes_tick(job: Job[Tick]) -> None: ...


@pytest.mark.parametrize("given", [5, None, _takes_ride, Ride, ["skip"], "refund"])
def test_what_is_neither_a_word_nor_a_job_type_is_refused(given: Any):
    with pytest.raises(ConfigurationError, match=r"give 'skip', 'block' or 'hold', or a job type, which @service\.job"):
        Retry(on_exhausted=given)


@pytest.mark.parametrize(
    ("handler", "its", "options", "text"),
    [
        (
            _takes_another,
            {},
            {},
            "charge: on_exhausted=x takes another payload, Other, than .* Ride: declare both",
        ),
        (_takes_ride, {"payload": list[Ride]}, {}, "another payload, list"),
        (_takes_ride, {"group": "transport"}, {}, "x has groups, and charge has none .* leave group= out there, or"),
        (
            _takes_ride,
            {"group": "transport", "home": "orders"},
            {"group": "transport"},
            "x has home='orders', but follows a job in that one's origin: give charge the same home=, or",
        ),
        (
            _takes_ride,
            {"group": "transport", "home": "orders"},
            {"group": "transport", "home": "others"},
            "x has home='orders'",
        ),
        (
            _takes_ride,
            {"group": "transport", "policy": "latest"},
            {"group": "transport"},
            "on_exhausted=x has policy='latest', .* one is to run for each .*: give 'serial' or 'parallel' there",
        ),
        (
            _takes_ride,
            {"group": "transport", "home": "orders"},
            {"group": "number", "home": "orders"},
            "x has group='transport', but would stand in the group of .*, by 'number': give both the same, or",
        ),
    ],
)
def test_what_could_not_follow_is_refused_when_it_is_declared(
    handler: Any, its: dict[str, Any], options: dict[str, Any], text: str
):
    registry = Registry()
    retry = Retry(on_exhausted=registry.job(name="x", **its)(handler))
    with pytest.raises(ConfigurationError, match=text):
        registry.job(name="charge", retry=retry, **options)(_takes_ride)


@pytest.mark.parametrize(
    ("handler", "its", "options"),
    [
        (_takes_any, {}, {}),
        (_takes_ride, {"payload": object}, {}),
        (_takes_ride, {}, {"group": "transport", "home": "orders"}),
        (_takes_ride, {"group": "transport", "home": "orders"}, {"group": "transport", "home": "orders"}),
        (_takes_ride, {"group": "transport"}, {"group": lambda ride: ride.transport}),  # nobody can tell
    ],
)
def test_what_can_follow_may_be_declared(handler: Any, its: dict[str, Any], options: dict[str, Any]):
    registry = Registry()
    follow_up = registry.job(name="x", **its)(handler)
    charge = registry.job(name="charge", retry=Retry(on_exhausted=follow_up), **options)(_takes_ride)
    assert charge.retry.follow_up is follow_up


def test_a_type_with_a_schedule_follows_none():
    registry = Registry()
    nightly = registry.periodic(every=3_600, name="nightly")(_takes_tick)
    with pytest.raises(ConfigurationError, match="charge: on_exhausted=nightly has a schedule, which makes its jobs"):
        registry.job(name="charge", retry=Retry(on_exhausted=nightly))(_takes_tick)


@pytest.mark.parametrize("policy", ["serial", "parallel"])
def test_what_follows_a_tick_has_no_groups(policy: Any):
    """It would stand in the group of the ticks, and while it fails the schedule would stand still."""
    registry = Registry()
    tell = registry.job(name="tell", group="scheduled_at", policy=policy)(_takes_tick)
    with pytest.raises(ConfigurationError, match=r"nightly: on_exhausted=tell has groups, .*: leave group= out there"):
        registry.periodic(every=3_600, name="nightly", retry=Retry(on_exhausted=tell))(_takes_tick)
    assert registry.get("nightly") is None


def test_a_tick_is_not_followed_by_one_of_another_schedule():
    registry = Registry()
    other = registry.periodic(every=3_600, name="other")(_takes_tick)
    with pytest.raises(ConfigurationError, match="nightly: on_exhausted=other has a schedule"):
        registry.periodic(every=3_600, name="nightly", retry=Retry(on_exhausted=other))(_takes_tick)


def test_a_policy_without_a_follow_up_has_none():
    assert [Retry(on_exhausted=word).follow_up for word in ("skip", "hold", "block")] == [None] * 3  # type: ignore[arg-type]


async def test_a_drain_does_not_begin_with_a_type_whose_follow_up_it_does_not_run(database: str):
    """It ended well, and the refund, which waits for ever, was missed by no test."""
    elsewhere, jobs = Registry(), Registry()
    refund = elsewhere.job(name="refund")(_takes_ride)
    charge = jobs.job(name="charge", retry=replace(ONCE, on_exhausted=refund))(_fails)
    await enqueue(database, charge, [Ride()])
    with pytest.raises(ConfigurationError, match=r"'charge' that is given up is followed by one of 'refund'"):
        await drain(database, jobs)
    jobs.include(elsewhere)
    assert [attempt.outcome for attempt in await drain(database, jobs)] == ["followed", "succeeded"]


async def test_a_service_does_not_start_with_a_type_whose_follow_up_it_does_not_run(database: str):
    elsewhere, jobs = Registry(), Registry()
    refund = elsewhere.job(name="refund")(_takes_ride)
    jobs.job(name="charge", retry=Retry(on_exhausted=refund))(_takes_ride)

    def a_service() -> Service:
        made = Service("test", postgres=database, assignment=StaticAssignment([ORIGIN]), prometheus=None)
        made.include(jobs)
        return made

    service = a_service()
    text = r"'charge' that is given up is followed by one of 'refund', .*: include\(\.\.\.\) the registry"
    with pytest.raises(ConfigurationError, match=text):
        async with service:
            pass
    service = a_service()
    service.job(name="refund")(_takes_any)  # another one of that name
    with pytest.raises(ConfigurationError, match=text):
        async with service:
            pass
    service = a_service()
    service.include(elsewhere)
    async with service:
        pass
