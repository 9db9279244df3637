"""The example of a workflow: fan-out, fan-in, and one invoice whatever fails on the way."""

import asyncio
import inspect
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sidings.testing import drain, enqueued

from examples import workflow as example
from examples.workflow import Line, Purchase

from . import guide
from .support import connected, eventually, fetch, history, value

ROOT = Path(__file__).resolve().parents[1]
PURCHASES = [Purchase(id="p0", items=["tyre"]), Purchase(id="p1", items=[f"part{n:02}" for n in range(20)])]


async def started(database: str, purchases: Sequence[Purchase] = PURCHASES) -> Any:
    """A service whose purchases are enqueued."""
    service = example.make_service(database, name="test")
    async with connected(database) as connection:
        await connection.execute(example.TABLES)
        async with connection.transaction():
            split = service.registry["split"]
            await split.enqueue_many(connection, purchases, origin=example.ORIGIN)
    return service


async def finished(database: str) -> bool:
    return await value(database, "SELECT count(*) FROM invoice") == len(PURCHASES)


async def assert_each_step_has_happened_once(database: str) -> None:
    assert [tuple(row) for row in await fetch(database, "SELECT * FROM invoice ORDER BY 1")] == [
        ("p0", 400),
        ("p1", 20 * 600),
    ]
    assert [tuple(row) for row in await fetch(database, "SELECT items, priced FROM purchase ORDER BY id")] == [
        (1, 1),
        (20, 20),
    ]
    done = Counter(row["type"] for row in await history(database) if row["outcome"] == "succeeded")
    assert done == {"split": 2, "price": 21, "send_invoice": 2}
    assert await value(database, "SELECT count(*) FROM sidings.job") == 0


async def test_items_are_priced_at_once_and_the_last_one_sends_the_invoice(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They meet: all prices are known at the same moment."""
    meeting = asyncio.Barrier(20)

    async def price_of(item: str) -> int:
        if item.startswith("part"):
            await meeting.wait()
        return 100 * len(item)

    monkeypatch.setattr(example, "price_of", price_of)
    async with await started(database):
        await eventually(lambda: finished(database))
    await assert_each_step_has_happened_once(database)


async def test_a_step_that_fails_counts_once_and_late(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first attempts end in any place, also when everything has been written."""
    service = await started(database)
    failed: Counter[int] = Counter()

    async def fail_twice(call: Any, call_next: Any) -> None:
        [job] = call.jobs
        failed[job.id] += 1
        if failed[job.id] == 1:
            raise ConnectionError("before")
        await call_next()
        if failed[job.id] == 2:
            raise ConnectionError("after all has been written")

    service.middleware(fail_twice)
    attempts = await drain(service, until=60)
    await assert_each_step_has_happened_once(database)
    assert set(failed.values()) == {3}
    assert len(attempts) == 3 * 25


async def test_while_a_price_is_asked_for_no_transaction_is_open(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow somebody else is, no lock and no connection waits for him; and a job does not wait for ever."""
    query = """
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
    """

    async def none_open() -> bool:
        return await value(database, query) == 0

    async def price_of(item: str) -> int:
        await eventually(none_open, "no transaction is open", seconds=5)
        return 100 * len(item)

    monkeypatch.setattr(example, "price_of", price_of)
    service = await started(database, PURCHASES[:1])
    assert service.registry["price"].timeout is not None
    assert {attempt.outcome for attempt in await drain(service)} == {"succeeded"}
    assert await value(database, "SELECT cents FROM invoice") == 400


async def test_there_is_no_invoice_before_the_last_item_is_priced(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def price_of(item: str) -> int:
        if item == "part07":
            raise ConnectionError("no price yet")
        return 100 * len(item)

    monkeypatch.setattr(example, "price_of", price_of)
    service = await started(database)
    await drain(service)
    assert [tuple(row) for row in await fetch(database, "SELECT purchase FROM invoice")] == [("p0",)]
    async with connected(database) as connection:
        assert await enqueued(connection, service.registry["price"]) == [Line(purchase="p1", number=7, item="part07")]
        assert await enqueued(connection, service.registry["send_invoice"]) == []
    monkeypatch.undo()
    await drain(service, until=60)
    await assert_each_step_has_happened_once(database)


@pytest.mark.parametrize(
    ("purchases", "invoices"),
    [
        ([Purchase(id="p", items=["tyre", "tyre"])], [("p", 800)]),
        ([Purchase(id="p", items=[])], [("p", 0)]),
        ([Purchase(id="p", items=["tyre", "wiper"])] * 2, [("p", 900)]),
    ],
    ids=["an item twice", "no items", "ordered twice"],
)
async def test_each_purchase_is_invoiced_once(
    database: str, purchases: list[Purchase], invoices: list[tuple[str, int]]
) -> None:
    """A line's key was its item, nobody was the last of no items, and the second order failed for ever."""
    attempts = await drain(await started(database, purchases), until=2)
    assert {attempt.outcome for attempt in attempts} == {"succeeded"}, attempts
    assert [tuple(row) for row in await fetch(database, "SELECT * FROM invoice")] == invoices


def test_the_example_runs_and_ends_by_itself(sidings_postgres: str, sidings_kafka: str) -> None:
    environment = os.environ | {"SIDINGS_POSTGRES": sidings_postgres, "SIDINGS_KAFKA": sidings_kafka}
    command = [sys.executable, "-m", "examples.workflow"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(": ")[1] for line in done.stdout.splitlines()] == ["4.00", "9.00", "15.00"]


def test_the_documentation_shows_what_the_example_runs() -> None:
    def squeezed(text: str) -> str:
        return " ".join(line for line in text.split("\n") if not line.strip().startswith("#")).replace(" ", "")

    shown = guide.block("enqueueing.md", "Workflows", "python")
    assert squeezed(shown) in squeezed(inspect.getsource(example))
