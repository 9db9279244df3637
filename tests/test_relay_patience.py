"""How long a relay waits for a topic that does not exist: from when Kafka says so, however long it was away before."""

import asyncio
from typing import Any

import pytest
from sidings.devstack.topics import create_topic
from sidings.kafka.outbox import lanes

from .outbox_support import arrived, emptied, publish, publishing, relaying
from .support import eventually


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_a_topic_that_is_missing_after_an_outage_is_waited_for_as_any_other(
    database: str, own_kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a cluster that is set up anew: all that waited was parked at its first answer, before its topics were
    made."""
    clock, ahead = lanes.now, 0.0
    monkeypatch.setattr(lanes, "now", lambda: clock() + ahead)
    kafka = await asyncio.to_thread(own_kafka)
    async with (
        relaying(database, kafka.bootstrap, max_backoff_seconds=0.3) as relay,
        publishing(database) as (outbox, _),
    ):
        await eventually(lambda: len(relay.held) == 16)
        await asyncio.to_thread(kafka.kill)
        await publish(database, "etas", [(f"k{n}", b"x") for n in range(20)])

        async def fails_with(words: str) -> bool:
            return any(words in state.error for state in await outbox.failing())

        await eventually(lambda: fails_with(""), seconds=60.0)  # with whatever is met first
        ahead = 1_000.0
        await asyncio.to_thread(kafka.start)
        await eventually(lambda: fails_with("does not exist"), seconds=60.0)
        failed = relay.metrics.count("failed", "etas")
        await eventually(
            lambda: relay.metrics.count("failed", "etas") > failed + 1 or relay.metrics.count("parked", "etas")
        )
        assert await outbox.parked() == []
        await create_topic(kafka.bootstrap, "etas", partitions=1)
        await emptied(database)
        assert await arrived(kafka.bootstrap, "etas") == 20


async def test_a_missing_topic_for_which_nothing_waits_any_more_does_not_fail(
    database: str, sidings_kafka: str, topic
) -> None:
    """Also where it was made meanwhile, and a person had it tried again, it counted as failing until the relay's end:
    all that waited for it had been parked, so that nothing showed that it was there."""
    missing = f"{await topic('etas')}-missing"
    options: dict[str, Any] = {"topic_patience_seconds": 0.5, "max_backoff_seconds": 0.3}
    async with relaying(database, sidings_kafka, **options) as relay, publishing(database) as (outbox, _):

        async def works() -> bool:
            return not await outbox.failing()

        await publish(database, missing, [("a", b"1")])
        await eventually(outbox.parked)
        await eventually(works)
        assert not relay.metrics.failing
        [worker] = relay._workers.values()
        assert worker._rounds._senders._own is None, "nor has it a producer of its own"
        failed = relay.metrics.count("failed", missing)
        await publish(database, missing, [("a", b"2")])
        await eventually(lambda: outbox.parked(missing, after=1))
        assert relay.metrics.count("failed", missing) == failed + 1, "its patience was over"
