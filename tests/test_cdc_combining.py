"""Combining change-data rows, without Spark: what is complete, what becomes of the rows, what is told."""

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sidings import ConfigurationError
from sidings.spark_analytics.transactions import Config, Group, load
from sidings.spark_analytics.transactions.combining import combine_rows, combine_snapshot
from sidings.spark_analytics.transactions.decoding import Item, Record, decode
from sidings.spark_analytics.transactions.messages import Outgoing
from sidings.spark_analytics.transactions.ordinals import Ordinals
from sidings.spark_analytics.transactions.pending import Pending

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


def run(items: Sequence[Item], *, by: Config = CONFIG, batch: int = 3) -> tuple[list[Outgoing], dict[str, Pending]]:
    """What the operator makes of these, some at a time; and what is still open."""
    opened: dict[str, Pending] = {}
    kept: dict[str, list[tuple[int, str]]] = {}
    done: set[str] = set()
    sent: list[Outgoing] = []
    for begin in range(0, len(items), batch):
        for item in items[begin : begin + batch]:
            if item.kind != "transaction" or item.id in done:
                continue
            pending = opened.pop(item.id, None) or Pending(0)
            pending = Pending(pending.since, pending.last, Ordinals(str(pending.seen)), pending.alerted)  # as stored
            rows, told = pending.absorb(by.alerts, [item])
            sent += told
            kept.setdefault(item.id, []).extend(rows)
            if pending.complete:
                done.add(item.id)
                sent += combine_rows(by, item.id, kept.pop(item.id))
            else:
                opened[item.id] = pending
    return sent, opened


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


def test_an_update_that_moves_a_row_is_told_to_both_roots():
    body = json.loads(
        header_row(Row("CustomerAddresses", "UPDATE", {"customer_id": 2}), transaction="t", ordinal=1, last=True)
    )
    sent, _ = run(decoded([json.dumps(body | {"before": {"customer_id": 1}}).encode()]))
    assert sorted(message.key for message in sent) == ["1", "2"]


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
        ({"op": "x"}, "not c, u, d, t or r"),
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
    by = config(unknown_tables="alert")
    items = decoded(values, by=by)
    sent = run(items, by=by)[0] + [Outgoing(*json.loads(item.row or "")) for item in items if item.kind == "alert"]
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
    assert sent.headers["type"] == "CustomerSnapshot"
    body = json.loads(sent.value)
    assert [row["table"] for row in body["rows"]] == ["Customers", "CustomerNames", "CustomerNames"]
    assert {row["data"].get("name") for row in body["rows"]} == {None, "new", "x"}
    (again,) = combine_snapshot(CONFIG, "Customer", "7", reversed(parts.values()))
    assert again == sent


def test_debeziums_snapshot_rows_are_of_no_transaction():
    values, _ = debezium_rows("1", [Row("Customers", "SNAPSHOT", CUSTOMER)])
    assert [(item.kind, item.id) for item in decoded(values, by=DEBEZIUM)] == [("snapshot", '["Customer","7"]')]


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
        (('checkpoint = "/tmp/x"', ""), "checkpoint: Field required"),
        (("alerts =", "alert ="), "alert: Extra inputs"),
        (('root = "Customers"', 'root = "C"'), "add it to `tables`"),
        (('topic = "customers"', 'topic = "cdc"'), "both read and written"),
        (('alerts = "alerts"', 'alerts = "alerts"\nform = "debezium"'), "needs `boundaries`"),
        (('alerts = "alerts"', 'alerts = "alerts"\nboundaries = "x"'), "are for form 'debezium'"),
        (("[[groups]]", "expire_seconds = 0\n[[groups]]"), "expire_seconds: Input should be greater than 0"),
        (("[[groups]]", "[[groups"), "not valid TOML"),
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
