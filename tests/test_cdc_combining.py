"""Combining change-data rows, without Spark: what is complete, what becomes of the rows, what is told."""

import hashlib
import json
import locale
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row as SparkRow
from pyspark.sql import streaming
from sidings import ConfigurationError
from sidings.spark_analytics.transactions import Config, Group, load
from sidings.spark_analytics.transactions.__main__ import main
from sidings.spark_analytics.transactions.assembling import COUNTED
from sidings.spark_analytics.transactions.bundles import BUCKETS, bundles, items_of
from sidings.spark_analytics.transactions.combining import combine_rows, combine_snapshot
from sidings.spark_analytics.transactions.decoding import Item, Kind, Record, decode
from sidings.spark_analytics.transactions.messages import HEADERS, Outgoing
from sidings.spark_analytics.transactions.ordinals import Ordinals
from sidings.spark_analytics.transactions.pending import Pending
from sidings.spark_analytics.transactions.processor import Combiner
from sidings.spark_analytics.transactions.progress import Progress, Reports, not_read

from .cdc_support import Json, Row, config, debezium_rows, header_row, header_rows, some_rows

CONFIG = config()
DEBEZIUM = config(form="debezium", connector="postgresql", boundaries="shop.transaction")
CUSTOMER = {"customer_id": 7}
UPDATE = Row("Customers", "UPDATE", CUSTOMER)


def decoded(values: Sequence[bytes | None], *, by: Config = CONFIG, topic: str = "cdc") -> list[Item]:
    return [
        item
        for offset, value in enumerate(values)
        for item in decode(by, Record(topic, 0, offset, 1_000 + offset, value))
    ]


class Operator:
    """The operator on Spark's own stand-in for the state, which has timers, and no time-to-live."""

    def __init__(self, by: Config = CONFIG) -> None:
        if not hasattr(streaming, "TwsTester"):
            pytest.skip("Spark 4.1 has no stand-in for the state: test_cdc_streaming.py tests the operator there")
        self.spark = streaming.TwsTester(Combiner(by), timeMode="ProcessingTime")

    def take(self, items: Sequence[Item]) -> list[Outgoing]:
        """A micro-batch."""
        rows: list[Any] = []
        for bundle in bundles(items):
            rows += self.spark.test(bundle.key, [SparkRow(items=bundle.items)])
        return [outgoing(row) for row in rows]

    def wait_until(self, seconds: float) -> list[Outgoing]:
        """The time is that many seconds."""
        return [outgoing(row) for row in cast(list[Any], self.spark.setProcessingTime(round(seconds * 1000)))]

    def restart(self, by: Config) -> None:
        """The query has another configuration from now on, and the state that it had."""
        self.spark.processor = Combiner(by)
        self.spark.processor.init(self.spark.handle)

    def timers(self, key: str) -> list[int]:
        """When those of a key go off."""
        self.spark.handle.setGroupingKey(key)
        return [*self.spark.handle.listTimers()]

    def state(self, name: str) -> dict[tuple[Any, ...], Any]:
        """Of all buckets."""
        buckets = [f"transaction/{bucket}" for bucket in range(BUCKETS)]
        return {key: value for bucket in buckets for key, value in self.spark.peekMapState(name, bucket).items()}

    @property
    def open(self) -> dict[str, Pending]:
        """What is open. The state says the same everywhere, and keeps nothing else."""
        found = self.state("open")
        chunks = {(id, chunk) for (id,), state in found.items() for chunk in range(state.chunks)}
        counted = {(id, COUNTED) for (id,), state in found.items() if state.chunks > 1}
        assert self.state("rows").keys() == chunks | counted
        assert not found.keys() & self.state("done").keys()
        assert self.counted == len(found)
        due = [json.loads(ids) for (ids,) in self.state("due").values()]
        assert all(len({*ids}) == len(ids) for ids in due), "nothing is looked at twice"
        assert {id for (id,) in found} <= {id for ids in due for id in ids}
        return {id: state.pending() for (id,), state in found.items()}

    @property
    def counted(self) -> int:
        buckets = [self.spark.peekValueState("count", f"transaction/{bucket}") for bucket in range(BUCKETS)]
        return sum(count for (count,) in filter(None, buckets))


def outgoing(row: Any) -> Outgoing:
    return Outgoing(row.topic, row.key, row.value, {name: row[name] for name in HEADERS if row[name] is not None})


def run(items: Sequence[Item], *, by: Config = CONFIG, batch: int = 3) -> tuple[list[Outgoing], dict[str, Pending]]:
    """What the operator makes of these, some at a time; and what is still open."""
    operator = Operator(by)
    sent: list[Outgoing] = []
    for begin in range(0, len(items), batch):
        sent += operator.take([item for item in items[begin : begin + batch] if item.kind == "transaction"])
    return sent, operator.open


def bodies(sent: Sequence[Outgoing]) -> list[Json]:
    return [json.loads(message.value) for message in sent]


def events(rows: Sequence[Row]) -> list[Json]:
    sent, opened = run(decoded(header_rows("t", rows)))
    assert not opened
    return bodies(sent)


@settings(deadline=None, max_examples=50)
@given(st.sets(st.integers(1, 60)), st.randoms())
def test_ordinals_are_a_set(numbers: set[int], chance: random.Random):
    given = [*numbers, *numbers]
    chance.shuffle(given)
    seen = Ordinals()
    added = [number for number in given if seen.add(number)]
    assert sorted(added) == sorted(numbers)
    seen = Ordinals(str(seen))
    assert len(seen) == len(numbers)
    assert seen.highest == max(numbers, default=0)
    assert list(seen.missing(70)) == [number for number in range(1, 71) if number not in numbers]
    assert not any(seen.add(number) for number in numbers)


@settings(deadline=None, max_examples=50)
@given(st.randoms(), st.integers(1, 12), st.integers(1, 7))
def test_any_order_and_any_duplicates_give_the_same_events(chance: random.Random, count: int, batch: int):
    made = {f"t{number}": some_rows(chance, roots=4) for number in range(count)}
    items = decoded([value for id, rows in made.items() for value in header_rows(id, rows)])
    straight, _ = run(items)
    shuffled = [*items, *chance.sample(items, chance.randint(0, len(items)))]
    chance.shuffle(shuffled)
    sent, opened = run(shuffled, batch=batch)
    assert not opened
    assert sorted(map(repr, sent)) == sorted(map(repr, straight))
    # Nothing is lost, and each root has one event in a transaction.
    assert len({(body["transaction"], body["group"], body["id"]) for body in bodies(sent)}) == len(sent)
    rows = [(b["transaction"], row["ordinal"], row["table"], row["data"]) for b in bodies(sent) for row in b["rows"]]
    expected = [(id, n, row.table, row.data) for id, rows in made.items() for n, row in enumerate(rows, 1)]
    assert sorted(map(repr, rows)) == sorted(map(repr, expected))


@settings(deadline=None, max_examples=50)
@given(st.randoms(), st.integers(1, 60), st.integers(0, 60))
def test_transactions_of_a_bucket_are_kept_apart(chance: random.Random, batch: int, stuck: int):
    made = {f"t{number}": some_rows(chance, roots=4) for number in range(20)}
    items = decoded([value for id, rows in made.items() for value in header_rows(id, rows)])
    straight, _ = run(items)
    others = decoded([header_rows(f"stuck{number}", [UPDATE] * 2)[0] for number in range(stuck)])
    # Of duplicates many come after the end.
    shuffled = [*items, *items]
    chance.shuffle(shuffled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sidings.spark_analytics.transactions.bundles.BUCKETS", 1)
        patch.setattr("sidings.spark_analytics.transactions.assembling.SPARSE", chance.choice([0.01, 1, 20]))
        patch.setattr("sidings.spark_analytics.transactions.assembling.CHUNK", chance.choice([1, 200, 10**6]))
        sent, opened = run([*others, *shuffled], batch=batch)
    assert opened.keys() == {f"stuck{number}" for number in range(stuck)}
    assert sorted(map(repr, sent)) == sorted(map(repr, straight))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["transaction", "snapshot", "alert"]), st.integers(0, 400))))
def test_bundles_hold_every_item_once_and_in_order(given: list[tuple[Kind, int]]):
    items = [
        Item(kind, f"id/{number % 3}", number, None, None, "ä" * number, "cdc/0/0", at)
        for at, (kind, number) in enumerate(given)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sidings.spark_analytics.transactions.bundles.CHARACTERS", 500)
        made = list(bundles(items))
    assert sorted((item for bundle in made for item in items_of(bundle.items)), key=lambda item: item.at) == items
    for bundle in made:
        inside = list(items_of(bundle.items))
        assert len({item.kind for item in inside}) == 1
        assert sum(len(item.row or "") for item in inside[:-1]) <= 500
        if inside[0].kind == "snapshot":
            assert {f"snapshot/{item.id}" for item in inside} == {bundle.key}
    last = {bundle.key: bundle for bundle in made}
    for bundle in made:
        assert bundle is last[bundle.key] or sum(len(item.row or "") for item in items_of(bundle.items)) > 500
    for item in items:
        keys = {bundle.key for bundle in made if any(i.id == item.id and i.kind == item.kind
                                                     for i in items_of(bundle.items))}  # fmt: skip
        assert len(keys) == 1


def test_an_incomplete_transaction_is_told_then_given_up_and_late_rows_open_nothing():
    operator = Operator(config(expire_seconds=10, forget_seconds=100))
    first, second, third = decoded(header_rows("lost", [UPDATE] * 3))
    assert not operator.take([first])
    assert not operator.wait_until(5)
    assert not operator.take([third])
    assert not operator.wait_until(9.999)
    (told,) = operator.wait_until(10)
    body = json.loads(told.value)
    assert (body["alert"], body["missing"], body["last"], body["rows"]) == ("incomplete", [2], 3, 2)
    assert body["reason"] == "1 of 3 rows have not come within 10 s"
    assert operator.open["lost"].alerted
    assert not operator.wait_until(109.999)
    assert operator.open
    (lost,) = bodies(operator.wait_until(110))
    assert (lost["alert"], lost["missing"], lost["last"], lost["rows"]) == ("given-up", [2], 3, 2)
    assert lost["reason"] == "1 of 3 rows have not come within 110 s: the transaction is given up"
    assert not operator.open
    (after,) = bodies(operator.take([second]))
    assert (after["alert"], after["transaction"], after["place"]) == ("given-up", "lost", second.place)
    assert not operator.open
    assert not operator.wait_until(10_000)
    assert not operator.state("due")


def test_what_comes_after_the_alert_completes_the_transaction():
    operator = Operator(config(expire_seconds=10, forget_seconds=100))
    first, second = decoded(header_rows("late", [UPDATE] * 2))
    operator.take([first])
    operator.wait_until(10)
    operator.wait_until(60)
    told, event = operator.take([second])
    assert json.loads(told.value)["reason"] == "all 2 rows have come, 60 s after the first"
    assert told.headers["type"] == "completed-late"
    assert [row["ordinal"] for row in json.loads(event.value)["rows"]] == [1, 2]
    assert not operator.open
    assert not operator.wait_until(10_000)


def test_a_row_that_comes_between_the_alert_and_the_end_begins_nothing_anew():
    operator = Operator(config(expire_seconds=10, forget_seconds=100))
    operator.wait_until(1_000)
    first, second, _ = decoded(header_rows("lost", [UPDATE] * 3))
    operator.take([first])
    (told,) = operator.wait_until(1_010)
    assert json.loads(told.value)["reason"] == "no last event yet after 10 s"
    assert not operator.take([second])
    assert operator.open["lost"].alerted
    assert [body["alert"] for body in bodies(operator.wait_until(1_110))] == ["given-up"]
    assert not operator.open


def test_after_a_long_outage_there_is_still_a_second_time():
    operator = Operator(config(expire_seconds=10, forget_seconds=100))
    first, second = decoded(header_rows("late", [UPDATE] * 2))
    operator.take([first])
    assert [message.headers["type"] for message in operator.wait_until(5_000)] == ["incomplete"]
    assert not operator.wait_until(5_099)
    assert [message.headers["type"] for message in operator.take([second])] == ["completed-late", "CustomerModified"]


def test_times_of_several_transactions_fall_together_without_harm():
    operator = Operator(config(expire_seconds=10, forget_seconds=10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sidings.spark_analytics.transactions.bundles.BUCKETS", 1)
        operator.take(decoded([header_rows("a", [UPDATE] * 2)[0]]))
        assert not operator.wait_until(1)
        operator.take(decoded([header_rows("b", [UPDATE] * 2)[0], header_rows("c", [UPDATE] * 2)[0]]))
        assert not operator.wait_until(5)
        operator.take(decoded([header_rows("c", [UPDATE] * 2)[1]]))
        assert [m.headers["transaction_id"] for m in operator.wait_until(10)] == ["a"]
        operator.take(decoded([header_rows("d", [UPDATE] * 2)[0]]))  # is due at the same time as a's second look
        assert operator.open.keys() == {"a", "b", "d"}
        assert [m.headers["transaction_id"] for m in operator.wait_until(11)] == ["b"]
        told = bodies(operator.wait_until(20))
        assert [(body["alert"], body["transaction"]) for body in told] == [("given-up", "a"), ("incomplete", "d")]
        assert operator.open.keys() == {"b", "d"}


def test_a_snapshot_is_sent_when_it_is_quiet_with_all_rows_so_far():
    operator = Operator(config(snapshot_quiet_seconds=10, snapshot_keep_seconds=100))

    def row(name: str, type: str = "full", table: str = "CustomerNames") -> bytes:
        return header_row(Row(table, "REFRESH", CUSTOMER | {"name_type": type, "name": name}))

    def names(sent: Sequence[Outgoing]) -> list[list[str]]:
        assert all(message.headers["type"] == "CustomerSnapshot" for message in sent)
        assert all(message.headers.keys() == {"sidings-id", "type"} for message in sent)
        return [sorted(row["data"]["name"] for row in body["rows"]) for body in bodies(sent)]

    one, two, newer, nick = decoded([row("one"), row("two"), row("newer"), row("nick", "nick")])
    assert not operator.take([two, one])  # the later one counts
    assert not operator.wait_until(6)
    assert not operator.take([nick])
    assert not operator.wait_until(10)  # it became quiet later
    assert names(operator.wait_until(16)) == [["nick", "two"]]
    assert not operator.take([two, one, nick])  # duplicates
    assert not operator.wait_until(60)
    assert not operator.take([newer])
    assert names(operator.wait_until(70)) == [["newer", "nick"]]
    assert not operator.wait_until(159)
    assert operator.spark.peekMapState("parts", nick_key := f"snapshot/{nick.id}")
    assert not operator.wait_until(170)
    assert not operator.spark.peekMapState("parts", nick_key)
    operator.take([one])
    assert names(operator.wait_until(200)) == [["one"]]


def test_a_snapshot_that_was_sent_when_rows_were_kept_for_less_is_dropped_too():
    """Its timer had gone off before that, for good: what the source had deleted since came again with a later load."""
    operator = Operator(config(snapshot_quiet_seconds=10, snapshot_keep_seconds=100))
    rows = [header_row(Row("CustomerNames", "REFRESH", CUSTOMER | {"name_type": name})) for name in ("gone", "kept")]
    gone, kept = decoded(rows)
    operator.take([gone, kept])
    assert len(operator.wait_until(10)) == 1
    operator.restart(config(snapshot_quiet_seconds=10, snapshot_keep_seconds=300))
    operator.wait_until(110)
    assert operator.spark.peekMapState("parts", key := f"snapshot/{kept.id}")
    operator.wait_until(410)
    assert not operator.spark.peekMapState("parts", key)
    operator.take([kept])
    (event,) = bodies(operator.wait_until(420))
    assert [row["data"]["name_type"] for row in event["rows"]] == ["kept"]


def test_each_further_event_of_a_snapshot_leaves_no_timer_behind():
    """A root may be loaded again and again, and sooner than its rows are dropped."""
    operator = Operator(config(snapshot_quiet_seconds=10, snapshot_keep_seconds=100))
    for second in range(0, 1_000, 50):
        (item,) = decoded([header_row(Row("Customers", "REFRESH", CUSTOMER | {"name": str(second)}))])
        operator.take([item])
        assert len(operator.wait_until(second + 10)) == 1
        operator.wait_until(second + 50)
        assert len(operator.timers(f"snapshot/{item.id}")) <= 2
    operator.wait_until(1_060)
    assert not operator.timers(f"snapshot/{item.id}")


@pytest.mark.parametrize("ahead", [0, 1_000_000])
def test_rows_that_the_source_has_deleted_do_not_stay_though_a_root_is_loaded_again_and_again(ahead: int):
    """And sooner than its rows are dropped. A row whose time is ahead makes no other one old."""
    operator = Operator(config(snapshot_quiet_seconds=10, snapshot_keep_seconds=100))
    told: list[set[str]] = []
    for second in (10, 70, 130):
        operator.wait_until(second)
        rows = {"ahead": "", "same": "", "edited": str(second)} | ({"gone": ""} if second == 10 else {})
        for type, name in rows.items():
            (item,) = decoded([header_row(Row("CustomerNames", "REFRESH", CUSTOMER | {"name_type": type, "n": name}))])
            operator.take([item._replace(at=second * 1_000 + (ahead if type == "ahead" else 0))])
        (event,) = bodies(operator.wait_until(second + 10))
        told.append({row["data"]["name_type"] for row in event["rows"]})
    kept = {"ahead", "same", "edited"}
    assert told == [kept | {"gone"}, kept | {"gone"}, kept]
    assert len(operator.spark.peekMapState("parts", f"snapshot/{item.id}")) == len(kept)


def test_a_snapshot_that_becomes_again_what_it_was_is_no_repeat():
    """Of a consumer that looks at ids it would be passed over, and what came between would stay."""
    operator = Operator(config(snapshot_quiet_seconds=10, snapshot_keep_seconds=100))
    rows = [header_row(Row("Customers", "REFRESH", CUSTOMER | {"name": name})) for name in ("a", "b", "a", "a", "a")]
    sent: list[Outgoing] = []
    for item, until in zip(decoded(rows), (10, 20, 30, 40, 200), strict=True):  # the last one when all is forgotten
        if until == 200:
            operator.wait_until(150)
        operator.take([item])
        sent += operator.wait_until(until)
    assert [body["rows"][0]["data"]["name"] for body in bodies(sent)] == ["a", "b", "a", "a"]
    assert len({message.headers["sidings-id"] for message in sent}) == len(sent)


@pytest.mark.parametrize(("older", "newer"), [((5, 9), (5, 10)), ((5, 10), (6, 9))])
def test_of_a_rows_versions_the_one_that_was_sent_last_counts(older: tuple[int, int], newer: tuple[int, int]):
    operator = Operator(config(snapshot_quiet_seconds=10))
    items = decoded([header_row(Row("Customers", "REFRESH", CUSTOMER | {"name": name})) for name in ("old", "new")])
    old, new = (item._replace(at=at, place=f"cdc/0/{offset}")
                for item, (at, offset) in zip(items, (older, newer), strict=True))  # fmt: skip
    operator.take([new, old])
    (sent,) = operator.wait_until(10)
    assert [row["data"]["name"] for row in json.loads(sent.value)["rows"]] == ["new"]


def test_a_version_that_was_sent_before_the_row_came_again_as_it_was_does_not_count():
    """Another partition has brought it, which lags behind."""
    operator = Operator(config(snapshot_quiet_seconds=10))
    for name, at in (("a", 1), ("a", 3), ("b", 2)):
        (item,) = decoded([header_row(Row("Customers", "REFRESH", CUSTOMER | {"name": name}))])
        operator.take([item._replace(at=at)])
    (sent,) = operator.wait_until(10)
    assert [row["data"]["name"] for row in json.loads(sent.value)["rows"]] == ["a"]


def test_alerts_pass_through_as_they_are():
    items = decoded([b"nonsense", b"[]"])
    sent = Operator().take(items)
    assert sorted((m.topic, m.key, m.headers["type"]) for m in sent) == [
        ("alerts", "cdc/0/0", "bad-record"),
        ("alerts", "cdc/0/1", "bad-record"),
    ]
    assert all(len(m.headers["sidings-id"]) == 32 for m in sent)
    assert Operator().take(decoded([b"nonsense", b"[]"])) == sent  # a micro-batch that is done again has the same ids


@settings(deadline=None, max_examples=50)
@given(st.randoms(), st.booleans(), st.booleans())
def test_debezium_rows_and_boundaries_may_come_in_any_order(chance: random.Random, texts: bool, wrapped: bool):
    items: list[Item] = []
    made = {str(500 + number): some_rows(chance, roots=4) for number in range(3)}
    for id, of_it in made.items():
        values, boundaries = debezium_rows(id, of_it, texts=texts, wrapped=wrapped)
        found = [*decoded(values, by=DEBEZIUM), *decoded(boundaries, by=DEBEZIUM, topic="shop.transaction")]
        assert len(found) == len(of_it) + 1
        items += [*found, chance.choice(found)]
    chance.shuffle(items)
    sent, opened = run(items, by=DEBEZIUM)
    assert not opened
    assert sum(len(body["rows"]) for body in bodies(sent)) == sum(map(len, made.values()))
    assert {body["transaction"] for body in bodies(sent)} == set(made)


def test_a_count_of_rows_is_not_enough():
    first, second, third = header_rows("t", [Row("Customers", "UPDATE", CUSTOMER)] * 3)
    sent, opened = run(decoded([first, first, third]))
    assert not sent
    assert list(opened["t"].seen.missing(3)) == [2]
    sent, opened = run(decoded([first, first, third, second]))
    assert [body["type"] for body in bodies(sent)] == ["CustomerModified"]
    assert not opened


@pytest.mark.parametrize(
    ("operations", "type"),
    [
        ([("Customers", "INSERT"), ("CustomerNames", "INSERT"), ("CustomerAddresses", "INSERT")], "CustomerCreated"),
        ([("CustomerNames", "INSERT"), ("Customers", "INSERT")], "CustomerCreated"),
        ([("Customers", "INSERT"), ("Customers", "UPDATE")], "CustomerCreated"),
        ([("Customers", "UPDATE")], "CustomerModified"),
        ([("CustomerNames", "INSERT")], "CustomerModified"),
        ([("CustomerNames", "DELETE")], "CustomerModified"),
        ([("Customers", "DELETE"), ("CustomerNames", "DELETE")], "CustomerDeleted"),
        ([("Customers", "DELETE"), ("Customers", "INSERT")], "CustomerCreated"),
        ([("Customers", "INSERT"), ("Customers", "DELETE")], "CustomerDeleted"),
    ],
)
def test_what_an_event_is_called(operations: list[tuple[str, str]], type: str):
    (event,) = events([Row(table, operation, CUSTOMER) for table, operation in operations])
    assert event["type"] == type
    assert [(row["table"], row["operation"]) for row in event["rows"]] == operations


def test_one_transaction_yields_an_event_for_each_root_in_its_groups_topic():
    sent, _ = run(
        decoded(
            header_rows(
                "00000000014EB5EE9907000000000000",
                [
                    Row("Addresses", "INSERT", {"address_id": 581439110}),
                    Row("CustomerAddresses", "INSERT", CUSTOMER | {"address_id": 581439110}),
                    Row("Addresses", "INSERT", {"address_id": 581439111}),
                ],
            )
        )
    )
    told = [(message.topic, message.key, message.headers["type"]) for message in sent]
    assert told == [
        ("addresses", "581439110", "AddressCreated"),
        ("customers", "7", "CustomerModified"),
        ("addresses", "581439111", "AddressCreated"),
    ]
    assert len({message.headers["sidings-id"] for message in sent}) == 3
    of_it = hashlib.sha256(b"00000000014EB5EE9907000000000000").hexdigest()[:32]
    assert {message.headers["correlation_id"] for message in sent} == {of_it}
    assert {message.headers["transaction_id"] for message in sent} == {"00000000014EB5EE9907000000000000"}


def test_roots_of_two_groups_with_one_id_have_events_of_their_own():
    sent, _ = run(decoded(header_rows("t", [Row("Addresses", "INSERT", {"address_id": 7}), UPDATE])))
    assert [(message.topic, message.key) for message in sent] == [("addresses", "7"), ("customers", "7")]
    assert len({message.headers["sidings-id"] for message in sent}) == 2


def test_two_groups_may_share_a_topic_where_their_events_differ_by_all_but_the_key():
    """So `dedup` takes neither for a repeat of the other, and compaction would take the one for the other's former
    version."""
    shared = config(customers="domain", addresses="domain")
    rows = [Row("Customers", "INSERT", CUSTOMER), Row("Addresses", "INSERT", {"address_id": 7})]
    snapshots = decoded([header_row(row) for row in rows], by=shared)
    (customer, address), _ = run(decoded(header_rows("t", rows), by=shared), by=shared)
    operator = Operator(shared)
    assert not operator.take(snapshots)
    both = [customer, address, *operator.wait_until(30)]
    assert {(event.topic, event.key) for event in both} == {("domain", "7")}
    types = ["AddressCreated", "AddressSnapshot", "CustomerCreated", "CustomerSnapshot"]
    assert sorted(event.headers["type"] for event in both) == types
    assert len({event.headers["sidings-id"] for event in both}) == 4


def test_an_update_that_moves_a_row_is_told_to_both_roots():
    body = json.loads(
        header_row(Row("CustomerAddresses", "UPDATE", {"customer_id": 2}), transaction="t", ordinal=1, last=True)
    )
    sent, _ = run(decoded([json.dumps(body | {"before": {"customer_id": 1}}).encode()]))
    assert sorted((m.key, m.headers["type"]) for m in sent) == [("1", "CustomerModified"), ("2", "CustomerModified")]


def test_an_update_of_a_roots_own_key_deletes_one_root_and_creates_another():
    """Both were told as modified: readers that go by what was created and deleted kept the former one for ever."""

    def types(*changes: tuple[str, int, int | None]) -> list[tuple[str, str]]:
        """Of a transaction with these operations, keys and former keys."""
        values: list[bytes] = []
        for ordinal, (operation, key, former) in enumerate(changes, 1):
            row = Row("Customers", operation, {"customer_id": key})
            last = ordinal == len(changes)
            body = json.loads(header_row(row, transaction="t", ordinal=ordinal, last=last))
            before = {} if former is None else {"before": {"customer_id": former}}
            values.append(json.dumps(body | before).encode())
        sent, opened = run(decoded(values))
        assert not opened
        rows = [row["operation"] for body in bodies(sent) for row in body["rows"]]
        assert {*rows} <= {operation for operation, _, _ in changes}, "rows are as the source has told them"
        return sorted((message.key, message.headers["type"]) for message in sent)

    assert types(("UPDATE", 2, 1)) == [("1", "CustomerDeleted"), ("2", "CustomerCreated")]
    there, back = ("UPDATE", 2, 1), ("UPDATE", 1, 2)
    assert types(there, back) == [("1", "CustomerModified"), ("2", "CustomerDeleted")]
    assert types(there, ("UPDATE", 2, 2)) == [("1", "CustomerDeleted"), ("2", "CustomerCreated")]
    assert types(there, ("DELETE", 2, None)) == [("1", "CustomerDeleted"), ("2", "CustomerDeleted")]
    assert types(there, ("INSERT", 1, None)) == [("1", "CustomerCreated"), ("2", "CustomerCreated")]
    assert types(("DELETE", 2, 1)) == [("1", "CustomerDeleted"), ("2", "CustomerDeleted")]
    assert types(("UPDATE", 2, None)) == [("2", "CustomerModified")], "who it was before, nobody has told"


NOT_TOLD: Json = {}  # what was before


def ends(*changes: tuple[str, Json, Json]) -> str:
    """How the roots end in a transaction with these changes of the root table, each with the row, and as it was before:
    their keys, and what begins the word."""
    values: list[bytes] = []
    for ordinal, (operation, row, before) in enumerate(changes, 1):
        last = ordinal == len(changes)
        body = json.loads(header_row(Row("Customers", operation, row), transaction="t", ordinal=ordinal, last=last))
        values.append(json.dumps(body | ({"before": before} if before else {})).encode())
    sent, opened = run(decoded(values))
    assert not opened
    endings = {message.key: message.headers["type"].removeprefix("Customer")[0] for message in sent}
    return " ".join(f"{key}{endings[key]}" for key in sorted(endings))


def test_keys_that_move_along_delete_no_root_that_there_still_is():
    """A root that had been given another row before its own was moved away was told as deleted."""

    def at(key: int, name: str, **columns: object) -> Json:
        return {"customer_id": key, "name": name, **columns}

    def moved(name: str, former: int, key: int) -> tuple[str, Json, Json]:
        return "UPDATE", at(key, name), at(former, name)

    a12, b23, c34 = moved("a", 1, 2), moved("b", 2, 3), moved("c", 3, 4)
    assert ends(a12, b23, c34) == "1D 2M 3M 4C"  # where keys are looked at when the statement, or all, has ended
    assert ends(c34, b23, a12) == "1D 2M 3M 4C"
    assert ends(b23, a12, c34) == "1D 2M 3M 4C"
    assert ends(a12, moved("b", 2, 1)) == "1M 2M"
    assert ends(moved("a", 1, 9), moved("b", 2, 1), moved("a", 9, 2)) == "1M 2M 9D"
    assert ends(a12, moved("a", 2, 1)) == "1M 2D"
    assert ends(a12, moved("a", 2, 3)) == "1D 2D 3C"
    # What has come is known also after it was changed, and what had been there as well.
    changed = "UPDATE", at(2, "A"), at(2, "a")
    assert ends(a12, changed, moved("A", 2, 3)) == "1D 2D 3C"
    assert ends(a12, changed, b23) == "1D 2M 3C"
    assert ends(a12, ("UPDATE", at(2, "B"), at(2, "b")), moved("B", 2, 3)) == "1D 2M 3C"
    # It is in the place of one that was deleted, or was inserted.
    assert ends(("DELETE", at(2, "b"), NOT_TOLD), a12) == "1D 2M"
    assert ends(("DELETE", at(2, "b"), NOT_TOLD), a12, moved("a", 2, 3)) == "1D 2D 3C"
    assert ends(("INSERT", at(1, "a"), NOT_TOLD), a12) == "1D 2C"
    assert ends(("INSERT", at(2, "x"), NOT_TOLD), b23) == "2C 3C"
    assert ends(moved("a", 1, 9), ("INSERT", at(1, "x"), NOT_TOLD)) == "1C 9C"
    # Where only the key was told, it goes by the last change.
    assert ends(("UPDATE", at(2, "a"), {"customer_id": 1}), ("UPDATE", at(3, "a"), {"customer_id": 2})) == "1D 2D 3C"
    assert ends(a12, ("UPDATE", at(2, "A"), NOT_TOLD), moved("A", 2, 3)) == "1D 2D 3C"
    assert ends(("UPDATE", at(1, "A"), NOT_TOLD), ("UPDATE", at(2, "A"), {"customer_id": 1})) == "1D 2C"


def test_an_update_that_moves_no_row_is_told_once():
    body = json.loads(header_row(UPDATE, transaction="t", ordinal=1, last=True))
    (event,), _ = run(decoded([json.dumps(body | {"before": CUSTOMER}).encode()]))
    assert [row["before"] for row in json.loads(event.value)["rows"]] == [CUSTOMER]


def test_rows_of_tables_in_no_group_count_but_tell_nothing_unless_asked():
    values = header_rows("t", [Row("Audit", "INSERT", {}), Row("Customers", "UPDATE", CUSTOMER)])
    sent, opened = run(decoded(values))
    assert ([message.key for message in sent], opened) == (["7"], {})
    alerts = [item for item in decoded(values, by=config(unknown_tables="alert")) if item.kind == "alert"]
    assert [item.part for item in alerts] == ["unknown-table"]


@pytest.mark.parametrize("id", [None, True, 1.5, {"a": 1}, ""])
def test_a_row_without_its_key_is_told_and_the_others_go_on(id: object):
    items = decoded(
        header_rows("t", [Row("Customers", "UPDATE", {"customer_id": id}), Row("Customers", "UPDATE", CUSTOMER)])
    )
    sent, opened = run(items)
    assert ([message.key for message in sent], opened) == (["7"], {})
    (told,) = [item for item in items if item.kind == "alert"]
    assert (told.part, told.place) == ("missing-key", "cdc/0/0")
    _, key, body, headers = json.loads(told.row or "")
    assert (key, json.loads(body)["transaction"], headers["transaction_id"]) == ("t", "t", "t")


def test_an_update_that_loses_its_key_is_told_and_is_an_event_of_the_root_that_has_lost_it():
    body = json.loads(header_row(Row("Customers", "UPDATE", {}), transaction="t", ordinal=1, last=True))
    items = decoded([json.dumps(body | {"before": CUSTOMER}).encode()])
    assert [item.part for item in items if item.kind == "alert"] == ["missing-key"]
    assert [(message.key, message.headers["type"]) for message in run(items)[0]] == [("7", "CustomerModified")]


GOOD = json.loads(header_row(Row("Customers", "INSERT", CUSTOMER), transaction="t", ordinal=1, last=True))
WRAPPED, _ = debezium_rows("1", [Row("Customers", "INSERT", CUSTOMER)])
ROW = json.loads(WRAPPED[0])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (json.dumps(GOOD | {"data": json.loads("[" * 300 + "]" * 300)}).encode(), "nested too deeply"),
        (json.dumps(GOOD).replace('"INSERT"', r'"\ud800"').encode(), "lone surrogate"),
        # A character beyond U+FFFF in two halves, as Java and Oracle write it into what they call UTF-8.
        (json.dumps(GOOD).encode().replace(b'"t"', b'"\xed\xa0\xbd\xed\xb8\x80"'), "not JSON"),
        (json.dumps(GOOD).replace('"t"', r'"\ud800"').encode("utf-16"), "not JSON"),
        (json.dumps(GOOD | {"data": CUSTOMER | {"x": float("inf")}}).encode(), "JSON compliant"),
        (json.dumps(GOOD).replace("7}", '7, "x": 1e999}').encode(), "JSON compliant"),
        (b"[1]", "not an object"),
        (b"{}", "no 'header'"),
        (json.dumps(GOOD | {"data": 3}).encode(), "'data' of the value is 3"),
        *[
            (json.dumps(GOOD | {"header": {k: v for k, v in GOOD["header"].items() if k != name}}).encode(), name)
            for name in ("table", "operation", "transactionId", "transactionEventCounter", "transactionLastEvent")
        ],
        *[
            (json.dumps(GOOD | {"header": GOOD["header"] | {"transactionEventCounter": bad}}).encode(), "not a number")
            for bad in (0, -1, 1.5, "x", True, 2**31)
        ],
    ],
)
def test_a_bad_record_of_the_header_form_is_told_with_its_place(value: bytes, reason: str):
    (item,) = decoded([value])
    assert (item.kind, item.part, item.place) == ("alert", "bad-record", "cdc/0/0")
    _, _, body, headers = json.loads(item.row or "")
    assert reason in json.loads(body)["reason"]
    assert headers["type"] == "bad-record"
    assert len(body) < 10_000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"op": "x"}, "not c, u, d, t, r or m"),
        ({"transaction": None}, "provide.transaction.metadata"),
        ({"transaction": {"id": "1:2"}}, "total_order"),
        ({"after": None}, "'after'"),
        ({"source": {"connector": "mysql", "table": "Customers"}}, "the configuration says 'postgresql'"),
    ],
)
def test_a_bad_record_of_debezium_is_told(change: Json, reason: str):
    (item,) = decoded([json.dumps(ROW | change).encode()], by=DEBEZIUM)
    assert (item.kind, item.part) == ("alert", "bad-record")
    assert reason in json.loads(json.loads(item.row or "")[2])["reason"]


def test_debeziums_particulars():
    values, boundaries = debezium_rows("571", [Row("Customers", "UPDATE", CUSTOMER)])
    mysql = config(form="debezium", connector="mysql", boundaries="shop.transaction")
    uuid = json.dumps({"status": "END", "id": "24DACE37:14", "event_count": 2}).encode()
    assert [item.id for item in decoded([uuid], by=mysql, topic="shop.transaction")] == ["24DACE37:14"]
    assert {item.id for item in decoded([values[0]], by=DEBEZIUM)} == {"571"}
    assert not decoded([boundaries[0]], by=DEBEZIUM, topic="shop.transaction")  # a BEGIN
    empty = json.dumps({"status": "END", "id": "1:2", "event_count": 0}).encode()
    assert not decoded([empty, None], by=DEBEZIUM, topic="shop.transaction")
    assert not decoded([None], by=DEBEZIUM)  # a tombstone
    truncate = ROW | {"op": "t", "after": None}
    items = decoded([json.dumps(truncate).encode()], by=DEBEZIUM)
    assert [(item.kind, item.ordinal, item.row is None) for item in items if item.kind == "transaction"] == [
        ("transaction", 1, True)
    ]
    full = config(form="debezium", connector="postgresql", boundaries="b", groups=[
        Group(name="C", key="customer_id", root="public.Customers", tables=("public.Customers",), topic="c")
    ])  # fmt: skip
    assert [json.loads(item.row or "")[0] for item in decoded([values[0]], by=full)] == ["C"]


@pytest.mark.parametrize("unknown_tables", ["ignore", "alert"])
def test_debeziums_messages_count_in_their_transaction(unknown_tables: str):
    """Those of `pg_logical_emit_message`. END counts them, so that each transaction with one was incomplete."""
    by = config(form="debezium", connector="postgresql", boundaries="shop.transaction", unknown_tables=unknown_tables)
    values, boundaries = debezium_rows("1", [Row("Customers", "INSERT", CUSTOMER), Row("", "INSERT", {})])
    message = json.loads(values[1]) | {"op": "m", "message": {"prefix": "outbox", "content": "aGk="}}
    del message["before"], message["after"]
    beats = [json.dumps(message | {"transaction": None}).encode()]  # not transactional, as a heartbeat's
    rows = decoded([values[0], json.dumps(message).encode(), *beats], by=by)
    assert {item.kind for item in rows} == {"transaction"}
    sent, opened = run([*rows, *decoded(boundaries, by=by, topic="shop.transaction")], by=by)
    assert not opened
    assert [len(body["rows"]) for body in bodies(sent)] == [1]


def test_debeziums_deletes_and_updates_tell_the_row_before():
    (delete,), _ = debezium_rows("1", [Row("Customers", "DELETE", CUSTOMER)])
    (update,), _ = debezium_rows("1", [Row("CustomerAddresses", "UPDATE", {"customer_id": 2})])
    update = json.dumps(json.loads(update) | {"before": {"customer_id": 1}}).encode()
    end = Item("transaction", "1", None, 1, None, None, "shop.transaction/0/0", 0)
    (deleted,), _ = run([*decoded([delete], by=DEBEZIUM), end], by=DEBEZIUM)
    assert (deleted.key, deleted.headers["type"]) == ("7", "CustomerDeleted")
    assert json.loads(deleted.value)["rows"][0]["data"] == CUSTOMER
    moved, _ = run([*decoded([update], by=DEBEZIUM), end], by=DEBEZIUM)
    assert [message.key for message in moved] == ["2", "1"]
    assert [body["rows"][0]["before"] for body in bodies(moved)] == [{"customer_id": 1}] * 2


def test_mysqls_tables_are_named_by_their_database():
    group = Group(name="C", key="customer_id", root="shop.Customers", tables=("shop.Customers",), topic="c")
    by = config(form="debezium", connector="mysql", boundaries="b", groups=[group])
    source = {"connector": "mysql", "db": "shop", "table": "Customers"}
    items = decoded([json.dumps(ROW | {"source": source}).encode()], by=by)
    assert [json.loads(item.row or "")[0] for item in items] == ["C"]


def test_a_transaction_is_sought_where_an_earlier_version_has_put_it():
    (bundle,) = bundles(decoded(header_rows("00000000014EB5EE9907000000000000", [UPDATE])))
    assert (BUCKETS, bundle.key) == (128, "transaction/83")  # with others, what is open in a checkpoint would be lost


def test_contradictions_are_told_and_change_nothing():
    row = Row("Customers", "UPDATE", CUSTOMER)

    def one(ordinal: int, last: bool = False) -> bytes:
        return header_row(row, transaction="t", ordinal=ordinal, last=last)

    sent, opened = run(decoded([one(1), one(3, last=True), one(2, last=True), one(4)]))
    assert [body["alert"] for body in bodies(sent)] == ["contradiction", "contradiction"]
    assert [body["place"] for body in bodies(sent)] == ["cdc/0/2", "cdc/0/3"]
    assert (opened["t"].last, str(opened["t"].seen)) == (3, "1,3")
    sent, opened = run(decoded([one(5), one(3, last=True)]))
    assert (bodies(sent)[0]["place"], opened["t"].last) == ("cdc/0/1", None)


def test_a_second_end_that_says_otherwise_is_told_and_changes_nothing():
    values, _ = debezium_rows("5", [UPDATE] * 3)

    def end(count: int) -> list[Item]:
        body = {"status": "END", "id": "5:1", "event_count": count}
        return decoded([json.dumps(body).encode()], by=DEBEZIUM, topic="shop.transaction")

    sent, opened = run([*end(3), *end(4), *end(3), *decoded(values, by=DEBEZIUM)], by=DEBEZIUM)
    assert [body.get("alert", body.get("type")) for body in bodies(sent)] == ["contradiction", "CustomerModified"]
    assert not opened


TEN = [Row("Customers", "INSERT", {"customer_id": number}) for number in range(1, 11)]
AUDIT = [Row("Audit", "INSERT", {"id": number}) for number in range(1, 6)]


def again(first: Sequence[Row], then: Sequence[Row]) -> tuple[list[Item], list[Item], list[Item]]:
    """What Debezium before dbz#633 sends if it is started again inside a transaction: rows; rows whose ordinals begin
    at 1 once more, at another time; END, which counts these alone."""
    (before, _), (after, boundaries) = debezium_rows("5", first), debezium_rows("5", then)
    rows = [json.loads(value) for value in after]
    after = [json.dumps(row | {"ts_ms": 5, "source": row["source"] | {"lsn": 7}}).encode() for row in rows]
    parts = (before, "a"), (after, "b"), (boundaries, "shop.transaction")
    old, new, end = (decoded(values, by=DEBEZIUM, topic=topic) for values, topic in parts)
    return old, new, end


@pytest.mark.parametrize("batches", [(0, 0, 0), (0, 1, 2), (1, 0, 2), (0, 2, 2)])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (TEN[:5], TEN[5:]),  # it was stopped
        (TEN[:5], TEN[3:]),  # it died, and had noted only the first three as sent
        (AUDIT, TEN[5:]),  # of no group
        (TEN[:5], AUDIT),
    ],
)
def test_rows_that_are_numbered_anew_inside_a_transaction_are_no_duplicates(
    batches: tuple[int, ...], first: list[Row], then: list[Row]
):
    """They were dropped: END fitted the first rows, and the event of these went out as the whole transaction's."""
    operator = Operator(DEBEZIUM)
    parts = list(zip(again(first, then), batches, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sidings.spark_analytics.transactions.assembling.CHUNK", 100)
        takes = [[item for part, of_it in parts if of_it == batch for item in part] for batch in range(3)]
        told = [bodies(operator.take(items)) for items in takes if items]
    assert not [body["type"] for of_it in told for body in of_it if "type" in body]
    (contradiction,) = [body for of_it in told for body in of_it if body["alert"] == "contradiction"]
    assert "has come again, with other content" in contradiction["reason"]
    assert contradiction["transaction"] == "5"
    after = [body["alert"] for of_it in told for body in of_it]
    assert set(after[after.index("contradiction") + 1 :]) == ({"given-up"} if len(set(batches)) == 3 else set())
    assert not operator.open
    assert not operator.wait_until(10**6)


@pytest.mark.parametrize("batches", [1, 3])
def test_rows_that_come_again_as_they_were_are_duplicates(batches: int):
    """Whenever, and wherever in the log, the connector has read them; and however their fields are ordered."""
    rows = [Row("Customers", "INSERT", {"customer_id": number, "name": "ä"}) for number in range(1, 5)] + AUDIT[:1]
    turned = [Row(row.table, row.operation, dict(reversed(row.data.items()))) for row in rows]
    old, new, end = again(rows, turned)
    operator = Operator(DEBEZIUM)
    takes = [[*old, *new, *end]] if batches == 1 else [old, new, end]
    sent = [message for items in takes for message in operator.take(items)]
    assert [body["type"] for body in bodies(sent)] == ["CustomerCreated"] * 4
    assert not operator.open
    assert not operator.take([*new, *end])


def test_what_does_not_fit_a_finished_transaction_is_told():
    operator = Operator(config(expire_seconds=10, forget_seconds=100))

    def one(ordinal: int, last: bool = False) -> bytes:
        return header_row(UPDATE, transaction="t", ordinal=ordinal, last=last)

    given = decoded([one(1), one(2, last=True), one(2, last=True), one(3), one(1, last=True)])
    (event,) = operator.take(given[:2])
    assert len(json.loads(event.value)["rows"]) == 2
    told = bodies([*operator.take(given[2:4]), *operator.take(given[4:])])
    assert [(body["alert"], body["transaction"], body["place"]) for body in told] == [
        ("contradiction", "t", "cdc/0/3"),
        ("contradiction", "t", "cdc/0/4"),
    ]
    assert told[0]["reason"] == "row 3 has come, but row 2 is the last one"
    assert not operator.open


def test_an_end_that_comes_after_its_transaction_was_given_up_is_told():
    """As with SQL Server, where the first row of another transaction brings it. That the row was lost, nobody knew."""
    operator = Operator(config(expire_seconds=10, forget_seconds=100))
    values, boundaries = debezium_rows("5", [UPDATE])
    operator.take(decoded(values, by=DEBEZIUM))
    assert [body["alert"] for body in bodies(operator.wait_until(10))] == ["incomplete"]
    (lost,) = bodies(operator.wait_until(110))
    assert (lost["alert"], lost["transaction"], lost["rows"]) == ("given-up", "5", 1)
    assert lost["reason"] == "no last event within 110 s: the transaction is given up"
    end = decoded(boundaries, by=DEBEZIUM, topic="shop.transaction")
    (after,) = bodies(operator.take([*end, *decoded(values, by=DEBEZIUM)]))
    assert (after["alert"], after["transaction"], after["place"]) == ("given-up", "5", end[0].place)
    assert after["reason"] == "records that have come after the transaction was given up: 2"
    assert not operator.open


def test_what_is_overdue_names_what_is_missing():
    first, _, third, _ = header_rows("t", [Row("Customers", "UPDATE", CUSTOMER)] * 4)
    _, opened = run(decoded([first, third]))
    body = json.loads(opened["t"].overdue("alerts", "t", 5_000).value)
    assert body["reason"] == "no last event yet after 5 s"
    assert (body["missing"], body["missing_count"], body["transaction"]) == ([2], 1, "t")
    far = header_row(Row("Customers", "UPDATE", CUSTOMER), transaction="t", ordinal=2**31 - 1, last=True)
    _, opened = run(decoded([far]))
    body = json.loads(opened["t"].overdue("alerts", "t", 5_000).value)
    assert (len(body["missing"]), body["missing_count"]) == (1_000, 2**31 - 2)


def test_an_end_without_its_last_rows_names_them():
    values, boundaries = debezium_rows("5", [UPDATE] * 4)
    ends = decoded(boundaries, by=DEBEZIUM, topic="shop.transaction")
    _, opened = run([*decoded(values[:2], by=DEBEZIUM), *ends], by=DEBEZIUM)
    body = json.loads(opened["5"].overdue("alerts", "5", 5_000).value)
    assert (body["missing"], body["missing_count"], body["last"], body["rows"]) == ([3, 4], 2, 4, 2)


def test_an_event_that_is_too_large_becomes_an_alert():
    small = config(max_event_bytes=300)
    big = Row("Customers", "UPDATE", CUSTOMER | {"text": "ä" * 200})
    sent, _ = run(decoded(header_rows("t", [big, Row("Customers", "UPDATE", {"customer_id": 8})])), by=small)
    assert [message.topic for message in sent] == ["alerts", "customers"]
    assert bodies(sent)[0]["alert"] == "too-large"


@pytest.mark.parametrize("length", [1_000, 1_001, 400_000])
def test_a_long_id_is_no_message_that_a_topic_refuses(length: int):
    long = "ä" * length
    values = [
        header_row(UPDATE, transaction=long, ordinal=1, last=True),
        header_row(Row("Customers", "INSERT", {"customer_id": long}), transaction="t", ordinal=1, last=True),
        header_row(Row(long, "INSERT", {}), transaction="u", ordinal=1, last=True),
        header_row(Row("Customers", long, CUSTOMER), transaction="v", ordinal=1, last=True),
    ]
    sent = Operator(config(unknown_tables="alert")).take(decoded(values, by=config(unknown_tables="alert")))
    types = {message.headers["type"] for message in sent}
    assert types >= {"unknown-table", "bad-record"}
    assert ("missing-key" in types) == (length > 1_000)
    assert ("CustomerModified" in types) == (length <= 1_000)
    assert all(message.size < 100_000 for message in sent)


def test_an_events_size_is_that_of_all_its_parts():
    (event,), _ = run(decoded(header_rows("t" * 500, [UPDATE])))
    assert event.size > len(event.value) + 500
    values = decoded(header_rows("t" * 500, [UPDATE]))
    assert [m.topic for m in run(values, by=config(max_event_bytes=event.size))[0]] == ["customers"]
    assert [m.topic for m in run(values, by=config(max_event_bytes=event.size - 1))[0]] == ["alerts"]


def test_rows_of_a_group_that_the_configuration_has_no_more_are_told():
    by = config(groups=[group for group in CONFIG.groups if group.name == "Address"])
    items = decoded(header_rows("t", [UPDATE, Row("Addresses", "INSERT", {"address_id": 3})]))
    told, event = combine_rows(by, "t", [(item.ordinal or 0, item.row or "") for item in items])
    assert (told.topic, told.key, told.headers["type"], json.loads(told.value)["id"]) == (
        "alerts",
        "t",
        "unknown-group",
        "7",
    )
    assert "'Customer'" in json.loads(told.value)["reason"]
    assert event.key == "3"
    (item,) = decoded([header_row(Row("Customers", "REFRESH", CUSTOMER))])
    (told,) = combine_snapshot(by, "Customer", "7", [item.row or ""])
    assert (told.headers["type"], json.loads(told.value)["id"]) == ("unknown-group", "7")


def test_a_snapshot_has_each_row_once_and_the_root_first():
    rows = [
        Row("CustomerNames", "REFRESH", CUSTOMER | {"name_type": "nick", "name": "old"}),
        Row("Customers", "REFRESH", CUSTOMER),
        Row("CustomerNames", "REFRESH", CUSTOMER | {"name_type": "nick", "name": "new"}),
        Row("CustomerNames", "REFRESH", CUSTOMER | {"name_type": "full", "name": "x"}),
    ]
    items = decoded([header_row(row) for row in rows])
    assert {(item.kind, item.id) for item in items} == {("snapshot", '["Customer","7"]')}
    parts = {item.part: item.row or "" for item in items}
    assert len(parts) == 3
    (sent,) = combine_snapshot(CONFIG, "Customer", "7", parts.values())
    assert (sent.topic, sent.key, sent.headers["type"]) == ("customers", "7", "CustomerSnapshot")
    body = json.loads(sent.value)
    assert [row["table"] for row in body["rows"]] == ["Customers", "CustomerNames", "CustomerNames"]
    assert {row["data"].get("name") for row in body["rows"]} == {None, "new", "x"}
    (again,) = combine_snapshot(CONFIG, "Customer", "7", reversed(parts.values()))
    assert again == sent
    (sooner,) = combine_snapshot(CONFIG, "Customer", "7", [*parts.values()][:2])
    assert sooner.headers["sidings-id"] != sent.headers["sidings-id"], "else who looks at ids would pass over the whole"


def test_rows_of_a_snapshot_that_differ_in_anything_are_all_kept():
    """In the table, or, where no primary key is known, in any column."""
    home, work = ({"customer_id": 7, "address_id": 1, "type": type} for type in ("home", "work"))
    rows = [("Customers", CUSTOMER), *(("CustomerAddresses", data) for data in (CUSTOMER, home, work))]
    items = decoded([header_row(Row(table, "REFRESH", data)) for table, data in [*rows, *rows]])
    assert len({item.part for item in items}) == len(rows)


def test_debeziums_snapshot_rows_are_of_no_transaction():
    values, _ = debezium_rows("1", [Row("Customers", "SNAPSHOT", CUSTOMER)])
    assert [(item.kind, item.id) for item in decoded(values, by=DEBEZIUM)] == [("snapshot", '["Customer","7"]')]


def test_what_is_not_read_yet_counts_in_all_partitions():
    # As Spark has told it.
    told = """{"description": "KafkaV2[Subscribe[cdc]]", "startOffset": {"cdc": {"0": 1678, "1": 1677}},
        "endOffset": {"cdc": {"0": 1753, "1": 1752}}, "latestOffset": {"cdc": {"0": 2220, "1": 2219, "2": 5}},
        "metrics": {"avgOffsetsBehindLatest": "467.0", "maxOffsetsBehindLatest": "467"}}"""
    source = json.loads(told)
    assert not_read(source) == 467 + 467 + 5


def test_how_far_behind_a_micro_batch_is_that_is_done_again_after_a_start_is_not_known():
    """Spark does not ask Kafka for it. The log said that nothing was behind, while 18,000 records were."""
    source = {"endOffset": {"cdc": {"0": 1753}}, "latestOffset": None}
    assert not_read(source) is None
    stands = Progress(batch=2, ago=8.0, rows=4_000, seconds=25.0, behind=not_read(source), open=1, oldest=118.0)
    assert str(stands) == (
        "batch 2, 8 s ago: 4,000 rows in 25.0 s, how far behind is not known yet; "
        "1 open transactions, the oldest since 118 s"
    )


class Stood:
    """A query whose state takes as long to read as it is told to, by a clock of its own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.takes, self.reads = 1_000.0, 3.0, 0
        self.state: tuple[int, int | None] | None = (4, 900_000)
        sources = [{"endOffset": {}, "latestOffset": {}}]
        said = {"batchId": 8, "timestamp": "1970-01-01T00:00:00Z", "numInputRows": 1, "sources": sources}
        self.lastProgress: object = SimpleNamespace(json=json.dumps(said | {"durationMs": {}}))
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        patch.setattr("sidings.spark_analytics.transactions.progress.time", clock)
        patch.setattr("sidings.spark_analytics.transactions.progress._open", self.read)
        self.reports = Reports(cast(Any, None), cast(Any, self), CONFIG)

    def read(self, *_: object) -> tuple[int, int | None] | None:
        self.reads += 1
        self.now += self.takes
        return self.state

    def told(self, seconds: float) -> str:
        """What is said of the state that much later."""
        self.now += seconds
        return str(self.reports.next()).partition("; ")[2]


def test_a_large_state_is_not_read_for_each_line_of_the_log(monkeypatch: pytest.MonkeyPatch):
    """All of it, a day of finished transactions too, was copied out of the checkpoint each minute."""
    stood = Stood(monkeypatch)
    assert stood.told(0) == "4 open transactions, the oldest since 103 s"
    stood.state = (0, None)
    assert stood.told(40) == "4 open transactions, the oldest since 103 s, as of 40 s ago"
    assert stood.told(19) == "4 open transactions, the oldest since 103 s, as of 59 s ago"
    assert stood.reads == 1
    stood.takes = 0.5
    assert stood.told(1) == "0 open transactions"
    assert stood.told(10) == "0 open transactions"
    assert stood.reads == 3


def test_a_state_that_cannot_be_read_is_not_tried_for_each_line_either(monkeypatch: pytest.MonkeyPatch):
    stood = Stood(monkeypatch)
    stood.state, stood.takes = None, 30.0
    assert stood.told(0) == "state not readable now"
    assert stood.told(599) == "state not readable, as of 599 s ago"
    stood.state = (1, None)
    assert stood.told(1) == "1 open transactions"


def test_before_the_first_micro_batch_no_state_is_read(monkeypatch: pytest.MonkeyPatch):
    stood = Stood(monkeypatch)
    stood.lastProgress = None
    assert stood.reports.next() is None
    assert stood.reads == 0


TOML = """
kafka = "localhost:9092"
topics = ["cdc"]
checkpoint = "/tmp/x"
alerts = "alerts"
[[groups]]
name = "Customer"
key = "customer_id"
root = "Customers"
tables = ["Customers"]
topic = "customers"
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("/tmp/x", ""), "checkpoint: String should have at least 1 character"),
        (('checkpoint = "/tmp/x"', ""), "checkpoint: is missing"),
        (("alerts =", "alert ="), "alert: there is no such field: is alerts meant?"),
        (('topics = ["cdc"]', 'topics = "cdc"'), "topics: give a list"),
        (('topic = "customers"', 'topic = "customers"\nstart = "latest"'), "start: is no field of a group: put it"),
        (("[[groups]]", "groups = ['Customer']\n[group]"), "give a table with the fields name, key, root"),
        (('root = "Customers"', 'root = "C"'), "add it to `tables`"),
        (('topic = "customers"', 'topic = "cdc"'), "both read and written"),
        (('alerts = "alerts"', 'alerts = "cdc"'), "both read and written"),
        (
            ('alerts = "alerts"', 'alerts = "b"\nform = "debezium"\nconnector = "mysql"\nboundaries = "b"'),
            "'b' is both read and written",
        ),
        (('alerts = "alerts"', 'alerts = "alerts"\nform = "debezium"\nboundaries = "x"'), "and `connector`"),
        (('alerts = "alerts"', 'alerts = "alerts"\nform = "debezium"'), "needs `boundaries`"),
        (('alerts = "alerts"', 'alerts = "alerts"\nboundaries = "x"'), "are for form 'debezium'"),
        (("[[groups]]", "expire_seconds = 0\n[[groups]]"), "expire_seconds: Input should be greater than 0"),
        (("[[groups]]", "max_rows_per_trigger = 0\n[[groups]]"), "max_rows_per_trigger: Input should be greater"),
        (("[[groups]]", "max_transaction_bytes = 2_000_000_000\n[[groups]]"), "should be less than or equal"),
        (("[[groups]]", "[[groups"), "not valid TOML"),
        (
            ("[[groups]]", "kafka_options = {maxOffsetsPerTrigger = '5'}\n[[groups]]"),
            "max_rows_per_trigger",
        ),
        (('topic = "customers"', 'topic = "customers"\nprimary_keys = {Names = ["id"]}'), "primary_keys names 'Names'"),
    ],
)
def test_a_wrong_configuration_is_told_by_its_field(change: tuple[str, str], message: str, tmp_path: Path):
    file = tmp_path / "config.toml"
    file.write_text(TOML)
    assert load(file).groups[0].name == "Customer"
    file.write_text(TOML.replace(*change))
    with pytest.raises(ConfigurationError, match=message):
        load(file)


def test_a_configuration_is_utf8_whatever_the_locale_says(tmp_path: Path):
    """In one of Latin-1 a table's name was another one, which nobody writes to: its rows were in no event."""
    file = tmp_path / "config.toml"
    file.write_text(TOML.replace("Customer", "Käufer"), encoding="utf-8")
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        assert load(file).groups[0].name == "Käufer"
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    file.write_text(TOML.replace("Customer", "Käufer"), encoding="latin-1")
    with pytest.raises(ConfigurationError, match="is not valid TOML"):
        load(file)


def test_the_command_says_whether_a_configuration_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "config.toml"
    file.write_text(TOML)
    assert main([str(file), "--check"]) == 0
    assert "config.toml is right" in capsys.readouterr().out
    file.write_text(TOML.replace("alerts =", "alert ="))
    assert main([str(file), "--check"]) == main([str(file)]) == 2
    assert "alert: there is no such field" in capsys.readouterr().err


def test_options_for_kafka_are_not_shown():
    secret = "org.apache.kafka.common.security.plain.PlainLoginModule required password=secret;"
    by = config(kafka_options={"kafka.sasl.jaas.config": secret})
    assert "secret" in by.kafka_options["kafka.sasl.jaas.config"]
    assert "secret" not in f"{by!r} {by}"
    with pytest.raises(ConfigurationError, match="kafka_options") as told:
        config(kafka_options={"kafka.sasl.jaas.config": [secret]})
    assert "secret" not in str(told.value)


def test_a_table_belongs_to_one_group(tmp_path: Path):
    file = tmp_path / "config.toml"
    second = TOML[TOML.index("[[groups]]") :].replace('name = "Customer"', 'name = "Client"')
    file.write_text(TOML + second)
    with pytest.raises(ConfigurationError, match="'Customers' is in the groups 'Customer' and 'Client'"):
        load(file)
    file.write_text(TOML + second.replace("Client", "Customer").replace("Customers", "Clients"))
    with pytest.raises(ConfigurationError, match="two groups have the same name"):
        load(file)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(tmp_path / "nothing.toml")
