"""What the log says of servers that are away."""

import asyncio
import logging

import asyncpg
import pytest
from sidings import Message, Transaction, migrate
from sidings.kafka.handling import BatchFailed
from sidings.outage import Outage

from .consumer_support import Number, a_service, effects_table, offset_reaches, produce, record
from .support import eventually, value

log = logging.getLogger("sidings.test")


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time is its only element."""
    time = [1_000.0]
    monkeypatch.setattr("sidings.outage.time.monotonic", lambda: time[0])
    return time


def test_an_outage_tells_what_postgres_says_but_not_what_stands_in_the_row(caplog):
    fields = {"C": "23514", "M": "a trigger says\nCRITICAL no", "D": "Failing row contains (4111-secret).", "H": "ask"}
    error = asyncpg.PostgresError.new(fields)
    assert "4111-secret" in str(error)
    outage = Outage(log, "the outbox could not be read")
    outage.failed(error)
    [told] = [record.getMessage() for record in caplog.records]
    assert told == "the outbox could not be read, trying again: a trigger says\n    CRITICAL no\n    HINT:  ask"
    assert outage.error == told.removeprefix("the outbox could not be read, trying again: ")


def test_nor_does_what_a_consumer_says_of_a_message_that_could_not_be_parked():
    fields = {"C": "23514", "M": "it violates a constraint", "D": "Failing row contains (4111-secret)."}
    failed = BatchFailed(asyncpg.PostgresError.new(fields), None)
    assert str(failed) == "CheckViolationError: it violates a constraint"


def test_an_error_without_a_text_is_told_as_well():
    outage = Outage(log, "x")
    outage.failed(asyncpg.SerializationError())  # as a handler may raise it
    assert outage.error == "without a text"


def test_an_outage_is_told_of_when_it_begins_ever_more_seldom_and_when_it_ends(clock, caplog):
    outage = Outage(log, "the outbox could not be read")
    outage.over()
    told: list[float] = []
    for second in range(3_600):
        clock[0] = 1_000.0 + second
        caplog.clear()
        outage.failed("it is away")
        told += [second] * len(caplog.records)
    assert told == [0, 10, 30, 70, 150, 310, 630, 1230, 1830, 2430, 3030]
    assert caplog.records == []
    assert (outage.seconds(), outage.error) == (3_599.0, "it is away")
    outage.over()
    assert (outage.seconds(), outage.error) == (0.0, None)
    outage.over()
    outage.failed("again")
    assert [record.getMessage() for record in caplog.records] == [
        "the outbox could not be read for 3599.0 s, and works again",
        "the outbox could not be read, trying again: again",
    ]


@pytest.mark.long
async def test_what_is_tried_again_and_again_while_postgres_is_away_is_not_told_each_time(
    own_postgres, topic, sidings_kafka, caplog
):
    """Every part that has a loop says at the beginning that it fails, and at the end that it works."""
    postgres = await asyncio.to_thread(own_postgres)
    await migrate(postgres.dsn, service="test")
    await effects_table(postgres.dsn)
    name, out = await topic(), await topic("out")
    service = a_service(postgres.dsn, sidings_kafka)

    @service.consumer(name, max_waiting=1_000)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)
        await service.outbox.publish(tx, out, value=b"x")

    parts = ("slots of the outbox", "outbox could not be read", "placed", "waiting jobs", "renewed")

    def lines(part: str) -> list[str]:
        return [one.getMessage() for one in caplog.records if part in one.getMessage() and one.levelno > logging.DEBUG]

    def tries(part: str) -> int:
        return len([one for one in caplog.records if part in one.getMessage()])

    async def all_slots() -> bool:
        held = "SELECT count(*) FROM sidings.origin WHERE origin LIKE 'outbox/%' AND owner IS NOT NULL"
        return await value(postgres.dsn, held) == 16

    caplog.set_level(logging.DEBUG, "sidings")
    async with service:
        await produce(sidings_kafka, name, [1])
        await eventually(offset_reaches(postgres.dsn, name, 1))
        await eventually(all_slots)
        caplog.clear()
        await asyncio.to_thread(postgres.kill)
        await produce(sidings_kafka, name, [2])
        await eventually(lambda: all(tries(part) > 4 for part in parts), lambda: {part: tries(part) for part in parts})
        while_away = {part: lines(part) for part in parts}
        await asyncio.to_thread(postgres.start)
        await eventually(
            lambda: all(any("works again" in line for line in lines(part)) for part in parts),
            lambda: {part: lines(part) for part in parts},
        )
        await eventually(offset_reaches(postgres.dsn, name, 2))
    assert all(1 <= len(told) <= 6 for told in while_away.values()), (
        while_away
    )  # two threads renew, a try may take long
    assert len(lines(" (epoch ")) <= 3, "slots are lost together"
