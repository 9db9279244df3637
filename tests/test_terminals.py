"""The terminals example, as its reader runs it; and a payment that comes twice."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from examples.terminals.routing import Authorization, Payment, TerminalAcquirer, make_routing
from examples.terminals.stage import Servers, topics
from examples.terminals.story import Story

from .consumer_support import producing
from .directory_support import put
from .outbox_support import records
from .support import eventually

ROOT = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_payments_go_on_while_postgres_is_away(sidings_kafka: str):
    done = subprocess.run(
        [sys.executable, "-m", "examples.terminals"],
        cwd=ROOT,
        env=os.environ | {"SIDINGS_KAFKA": sidings_kafka},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Postgres is killed" in done.stdout
    assert done.stdout.endswith("Payments went on, whatever became of Postgres.\n")
    assert done.stderr == ""


async def test_a_payment_that_comes_again_after_an_edit_keeps_its_first_bank(sidings_kafka: str):
    async with topics(sidings_kafka) as names, producing(sidings_kafka) as producer:
        routing = make_routing(sidings_kafka, names)
        told = Story(Servers(cast(Any, None), sidings_kafka), names)  # nothing here needs Postgres
        listening = asyncio.create_task(told._listen())

        async def edit(bank: str) -> None:
            row = TerminalAcquirer(terminal_id="T-1", acquirer_id=bank)
            await put(sidings_kafka, names.directory, {"T-1": row.model_dump_json().encode()})
            await eventually(lambda: routing.terminals.ready and routing.terminals["T-1"] == row, bank)

        async def pay(number: int) -> None:
            payment = Payment(number=number, terminal_id="T-1").model_dump_json().encode()
            await producer.send_and_wait(names.payments, payment, key=b"T-1")

        try:
            async with routing.service:
                await edit("Alpha Bank")
                await pay(1)
                await eventually(lambda: 1 in told._authorizations, "payment 1 is decided")
                await edit("Beta Bank")
                await pay(1)
                await pay(2)
                await eventually(lambda: 2 in told._authorizations, "all is decided and read: it is of one key")
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        sent = [Authorization.model_validate_json(r.value) for r in await records(sidings_kafka, names.authorizations)]
        assert [(one.number, one.acquirer_id) for one in sent] == [
            (1, "Alpha Bank"),
            (1, "Beta Bank"),
            (2, "Beta Bank"),
        ]
        assert told._authorizations == {1: "Alpha Bank", 2: "Beta Bank"}
