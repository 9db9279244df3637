"""Transactions that are larger than a worker has memory for, alone or together."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sidings.devstack.fixtures import TopicFactory
from sidings.spark_analytics.transactions import assembling, bundles
from sidings.spark_analytics.transactions.assembling import COUNTED

from .cdc_support import Json, Row, config, header_rows, produce, read, rows_of
from .test_cdc_combining import AUDIT, UPDATE, Operator, bodies, decoded, outgoing
from .test_cdc_streaming import configured, ended

MANY = [Row("Customers", "INSERT", {"customer_id": number, "name": "ä" * number}) for number in range(1, 21)]


@pytest.fixture(autouse=True)
def _in_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "BUCKETS", 1)


def size_of(rows: Sequence[Row]) -> int:
    """As the setting counts it."""
    packed = [item.row for item in decoded(header_rows("t", rows)) if item.row is not None]
    return sum(200 + len(row.encode()) for row in packed)


@pytest.mark.parametrize("chunk", [1, 300, 10**6])
@pytest.mark.parametrize("batch", [1, 3, 7, 100])
def test_a_transaction_is_as_large_as_its_rows_however_they_come(
    monkeypatch: pytest.MonkeyPatch, batch: int, chunk: int
):
    monkeypatch.setattr(assembling, "CHUNK", chunk)
    items = decoded(header_rows("t", [*MANY, *AUDIT]))
    random.Random(batch).shuffle(items)
    items = [item for item in items for _ in range(2)]  # duplicates count once
    size = size_of([*MANY, *AUDIT])
    for most in (size, size - 1):
        operator = Operator(config(max_transaction_bytes=most))
        sent: list[Json] = []
        for begin in range(0, len(items), batch):
            sent += bodies(operator.take(items[begin : begin + batch]))
            assert operator.open.keys() <= {"t"}
        assert not operator.open
        if most == size:
            assert [body["type"] for body in sent] == ["CustomerCreated"] * 20
            continue
        told = [body["alert"] for body in sent]
        assert told[0] == "too-large"
        assert set(told[1:]) <= {"given-up"}
        assert sent[0]["bytes"] == size
        assert sent[0]["transaction"] == "t"
        assert sent[0]["changes"] == {"Customers": {"INSERT": 20}}
        assert f"of {size:,} bytes so far; max_transaction_bytes is {most:,}: the transaction" in sent[0]["reason"]


def test_a_transaction_that_is_too_large_is_told_and_the_others_go_on():
    """It stopped the query, and each that was started again: Spark makes one table of all its events."""
    operator = Operator(config(max_transaction_bytes=2_000, expire_seconds=10, forget_seconds=100))
    large, small = decoded(header_rows("large", MANY)), decoded(header_rows("small", MANY[:3]))
    assert not operator.take([*large[:2], small[0]])
    told, *events = bodies(operator.take([*large[2:9], *small[1:]]))
    assert (told["alert"], told["transaction"], told["rows"], told["last"]) == ("too-large", "large", 9, None)
    assert [event["type"] for event in events] == ["CustomerCreated"] * 3
    assert not operator.open
    assert [body["alert"] for body in bodies(operator.take(large[9:]))] == ["given-up"]
    assert not operator.wait_until(1_000)
    assert not operator.open


def test_what_was_too_large_is_told_by_table_and_operation():
    """Nobody knew what to load as a snapshot, nor that it was of no use: it tells nothing of rows that are deleted."""
    rows = [*MANY, Row("Addresses", "UPDATE", {"address_id": 1}), *AUDIT]
    rows += [Row("Customers", "DELETE", row.data) for row in MANY[:7]]
    operator = Operator(config(max_transaction_bytes=size_of(rows) - 1))
    items = decoded(header_rows("large", rows))
    operator.take(items[:9])
    (told,) = bodies(operator.take([*items[9:], items[3]]))  # the one that comes again is compared with what is kept
    assert told["changes"] == {"Customers": {"INSERT": 20, "DELETE": 7}, "Addresses": {"UPDATE": 1}}
    assert "while the topics still have its rows; or load the tables of its groups as a snapshot" in told["reason"]
    assert told["reason"].endswith(", which tells of no deletion")


def test_rows_that_a_version_before_has_kept_count_too():
    """It noted nothing of their size."""
    operator = Operator(config(max_transaction_bytes=2_000))
    large = decoded(header_rows("large", MANY))
    for item in large[:3]:
        operator.take([item])
    operator.spark.handle.setGroupingKey("transaction/0")
    noted = operator.spark.handle.getMapState("rows", "id STRING, chunk INT", "rows STRING")
    before = noted.getValue(("large", COUNTED))
    noted.removeKey(("large", COUNTED))
    operator.take([large[3]])
    assert noted.getValue(("large", COUNTED)) != before
    assert noted.getValue(("large", COUNTED)) == (str(size_of(MANY[:4])),)
    assert [body["alert"] for body in bodies(operator.take(large[4:]))] == ["too-large"]


def test_transactions_that_together_are_too_large_are_sent_one_after_another(monkeypatch: pytest.MonkeyPatch):
    """Spark makes one table of what is sent of a bucket, and one of what timers send."""
    operator = Operator(config(expire_seconds=10, forget_seconds=100))
    monkeypatch.setattr(assembling, "ROOM", 300)
    made = {f"t{number}": header_rows(f"t{number}", [UPDATE] * 5) for number in range(6)}
    operator.take(decoded([value for values in made.values() for value in values[:3]]))
    takes = [bodies(operator.take(decoded([value for values in made.values() for value in values[3:]])))]
    assert operator.open
    takes.append(bodies(operator.take(decoded(made["t5"]))))  # duplicates, which find it complete
    for second in range(1, 6):
        operator.spark.processor.init(operator.spark.handle)  # as Spark does for each micro-batch
        takes.append(bodies(operator.wait_until(second)))
    assert not operator.open
    assert max(map(len, takes)) == 1
    sent = [body for of_it in takes for body in of_it]
    assert sorted(body["transaction"] for body in sent) == sorted(made)
    assert [[row["ordinal"] for row in body["rows"]] for body in sent] == [[1, 2, 3, 4, 5]] * 6
    assert not operator.wait_until(10_000), "none of them is incomplete"


class Waiting:
    """Of three transactions of a bucket that become complete in one micro-batch only the first is sent at once.

    In a micro-batch rows come before timers: the stand-in is told the time, and to look at them, apart."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, small: Sequence[Row] = (UPDATE, UPDATE), begun: float = 0
    ) -> None:
        monkeypatch.setattr(assembling, "ROOM", 300)
        self.config = config(expire_seconds=10, forget_seconds=100)
        self.operator = Operator(self.config)
        rows = {"first": [UPDATE] * 5, "second": [UPDATE] * 5, "small": small}
        self.made = {id: decoded(header_rows(id, of_it)) for id, of_it in rows.items()}
        self.operator.spark._currentProcessingTimeMs = round(begun * 1000)
        self.operator.take([items[0] for items in self.made.values()])

    def complete(self, seconds: float) -> None:
        """The rest has come in a micro-batch at that time, whose timers have not gone off."""
        self.operator.spark._currentProcessingTimeMs = round(seconds * 1000)
        sent = bodies(self.operator.take([item for items in self.made.values() for item in items[1:]]))
        assert [body["transaction"] for body in sent] == ["first"]
        assert self.operator.open.keys() == {"second", "small"}

    def look(self, seconds: float) -> list[Json]:
        """What the timers of a micro-batch at that time send."""
        self.operator.spark._currentProcessingTimeMs = round(seconds * 1000)
        return bodies([outgoing(row) for row in self.operator.spark._handleExpiredTimers()])


@pytest.mark.parametrize("small", [[UPDATE] * 2, AUDIT[:1] * 2], ids=["of a group", "of none"])
def test_a_transaction_may_be_told_to_wait_twice_in_a_micro_batch(monkeypatch: pytest.MonkeyPatch, small: list[Row]):
    """It was looked at twice then, and its rows were gone at the second time: each start ended with a TypeError."""
    waiting = Waiting(monkeypatch, small)
    waiting.complete(20)
    assert [body["transaction"] for body in waiting.look(20)] == ["second"]  # their expiry was due, too
    assert waiting.operator.open.keys() == {"small"}
    waiting.operator.restart(waiting.config)
    assert len(waiting.look(21)) == (small[0].table != "Audit")
    assert not waiting.operator.open


@pytest.mark.parametrize("small", [[UPDATE] * 2, AUDIT[:1] * 2], ids=["of a group", "of none"])
def test_a_checkpoint_in_which_one_waits_twice_is_mended(monkeypatch: pytest.MonkeyPatch, small: list[Row]):
    waiting = Waiting(monkeypatch, small)
    waiting.complete(5)
    assert waiting.operator.state("due")[5_001,] == ('["second","small"]',)
    due = waiting.operator.state("due") | {(5_001,): ('["small","small","second"]',)}
    waiting.operator.spark.updateMapState("due", "transaction/0", due)
    sent = waiting.look(6)
    assert [body["transaction"] for body in sent] == ["small"] * (small[0].table != "Audit") + ["second"]
    assert not waiting.operator.open


def test_a_transaction_waits_no_longer_where_the_clock_has_gone_back(monkeypatch: pytest.MonkeyPatch):
    """It waited until its expiry."""
    waiting = Waiting(monkeypatch, begun=60)
    waiting.complete(5)
    assert [body["transaction"] for body in waiting.look(6)] == ["second"]
    assert waiting.operator.open.keys() == {"small"}


def test_one_that_waits_is_given_up_when_the_limit_is_lowered(monkeypatch: pytest.MonkeyPatch):
    """It stayed, and so did the worker that had no memory for it."""
    waiting = Waiting(monkeypatch)
    waiting.complete(5)
    size = size_of([UPDATE] * 2)
    waiting.operator.restart(config(expire_seconds=10, forget_seconds=100, max_transaction_bytes=size))
    told, event = waiting.look(6)
    assert (told["alert"], told["transaction"], told["rows"], told["last"]) == ("too-large", "second", 5, 5)
    assert (told["bytes"], told["changes"]) == (size_of([UPDATE] * 5), {"Customers": {"UPDATE": 5}})
    assert event["transaction"] == "small"
    assert not waiting.operator.open
    assert [body["alert"] for body in bodies(waiting.operator.take(waiting.made["second"]))] == ["given-up"]


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_on_spark_a_transaction_that_is_too_large_does_not_stop_the_query(
    spark: SparkSession, sidings_kafka: str, topic: TopicFactory, tmp_path: Path
):
    topics = {name: await topic(name) for name in ("cdc", "customers", "addresses", "alerts")}
    by = configured(topics, sidings_kafka, tmp_path, max_transaction_bytes=5_000, max_rows_per_trigger=7)
    await produce(sidings_kafka, topics["cdc"], [*header_rows("small", MANY[:7]), *header_rows("large", MANY * 2)])
    await produce(sidings_kafka, topics["cdc"], header_rows("after", MANY[:7]))
    assert await ended(spark, by) == 0
    sent = await read(by)
    assert rows_of(sent) == {(id, ordinal) for id in ("small", "after") for ordinal in range(1, 8)}
    told = [message.value for message in sent if "alert" in message.value]
    assert {(body["alert"], body["transaction"]) for body in told} == {("too-large", "large"), ("given-up", "large")}
    assert len([body for body in told if body["alert"] == "too-large"]) == 1
