"""The example that produces Kafka messages in jobs: order by group, and a retry that takes the same path."""

import asyncio
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from examples import produce_in_a_job as example

from .outbox_support import records
from .support import ORIGIN, drained, value


async def test_messages_produced_by_jobs_stand_in_the_order_of_their_group(
    database: str, sidings_kafka: str, topic
) -> None:
    etas, late = await topic("etas", partitions=3), await topic("late")
    service = example.make_service(database, sidings_kafka, etas, late, name="test")
    async with service:
        service.executor.assign([ORIGIN])
        for n in range(40):
            async with service.transaction() as tx:
                seen = example.Seen(vehicle=f"v{n % 4}", number=n)
                await service.registry.enqueue(tx, "produce_eta", seen, origin=ORIGIN)
        await drained(database)
    by_key: dict[bytes, list[int]] = {}
    by_header: set[bytes] = set()
    for record in await records(sidings_kafka, etas):
        by_header.add(dict(record.headers)["job"])
        by_key.setdefault(record.key, []).append(example.Eta.model_validate_json(record.value).number)
    assert by_key == {b"v%d" % v: list(range(v, 40, 4)) for v in range(4)}
    assert len(by_header) == 40


async def test_a_retry_announces_again_although_the_vehicle_is_no_longer_late(
    database: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    etas, late = await topic("etas"), await topic("late")
    clock = [datetime.now(UTC)]
    attempts: list[int] = []

    async def die_once(job: Any) -> None:
        attempts.append(job.attempt)
        clock[0] -= timedelta(hours=2)  # asked again, the clock would say: not late
        if len(attempts) == 1:
            raise RuntimeError("died after sending")

    monkeypatch.setattr(example, "now", lambda: clock[0])
    monkeypatch.setattr(example, "after_sending", die_once)
    service = example.make_service(database, sidings_kafka, etas, late, name="test")
    async with service:
        service.executor.assign([ORIGIN])
        async with service.transaction() as tx:
            await tx.execute(example.TABLES)
            await tx.execute("INSERT INTO vehicle VALUES ('v', $1)", clock[0] - timedelta(minutes=1))
            await service.registry.enqueue(tx, "announce", example.Seen(vehicle="v", number=1), origin=ORIGIN)
        await drained(database)
    assert attempts == [1, 2]
    first, again = await records(sidings_kafka, late)  # at least once: the retry does not skip what follows
    header = dict(first.headers)["job"]
    assert dict(again.headers)["job"] == header, "by which a reader knows the repeated one"
    assert re.fullmatch(r"\d+-\d+", header.decode()), "an id alone may come again for another job"
    assert await value(database, "SELECT count(*) FROM announcement") == 1


async def test_a_service_relays_what_its_transactions_publish(database: str, sidings_kafka: str, topic) -> None:
    etas, late = await topic("etas"), await topic("late")
    service = example.make_service(database, sidings_kafka, etas, late, name="test")
    async with service:
        async with service.transaction() as tx:
            receipt = await service.outbox.publish(tx, etas, key="v", value=b"x")
        await service.outbox.published(receipt, timeout=20)
    assert [r.value for r in await records(sidings_kafka, etas)] == [b"x"]


async def test_it_runs_by_itself_in_a_database_with_another_services_schema(database: str, sidings_kafka: str) -> None:
    environment = os.environ | {"SIDINGS_POSTGRES": database, "SIDINGS_KAFKA": sidings_kafka}
    command = [sys.executable, "examples/produce_in_a_job.py"]
    root = Path(__file__).parent.parent
    done = await asyncio.to_thread(
        lambda: subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=90)
    )
    assert "10 estimates in etas-" in done.stdout, done.stdout + done.stderr
