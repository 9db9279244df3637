"""Records and settings that say what cannot be, and what is told of them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from sidings.spark_analytics.transactions.__main__ import main

from .cdc_support import Row, header_row
from .test_cdc_combining import CUSTOMER, DEBEZIUM, ROW, TOML, decoded

DECIMAL = "org.apache.kafka.connect.data.Decimal"


@pytest.mark.parametrize("operation", ["DELETE", "delete"])
def test_a_delete_of_no_transaction_is_no_row_of_a_snapshot(operation: str):
    (item,) = decoded([header_row(Row("Customers", operation, {"customer_id": 7}))])
    assert (item.kind, item.part) == ("alert", "bad-record")
    assert "DELETE, but it has no 'transactionId'" in (item.row or "")


def test_a_truncate_without_its_transaction_is_told_as_what_it_is():
    truncate = ROW | {"op": "t", "after": None, "transaction": None}
    (item,) = decoded([json.dumps(truncate).encode()], by=DEBEZIUM)
    assert (item.kind, item.part) == ("alert", "bad-record")
    assert "set provide.transaction.metadata=true" in (item.row or "")


def with_schema(change: Mapping[str, object], **names: str) -> bytes:
    """As Connect's converter writes it. names: of the columns' logical types."""
    columns = [{"type": "bytes", "name": name, "parameters": {"scale": "2"}, "field": c} for c, name in names.items()]
    sides = [{"type": "struct", "fields": columns, "optional": True, "field": side} for side in ("before", "after")]
    return json.dumps({"schema": {"type": "struct", "fields": sides}, "payload": ROW | change}).encode()


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"after": CUSTOMER | {"amount": "AMk="}}, "amount"),
        ({"after": CUSTOMER | {"amount": None}, "before": CUSTOMER | {"amount": "AMk="}, "op": "u"}, "amount"),
        ({"after": None, "before": CUSTOMER | {"amount": "AMk="}, "op": "d"}, "amount"),
        ({"after": CUSTOMER | {"amount": "AMk="}, "op": "r", "transaction": None}, "amount"),
        ({"after": {"customer_id": "Bw=="}}, "customer_id"),
    ],
)
def test_a_number_whose_scale_only_the_schema_has_is_told(change: Mapping[str, object], column: str):
    """Debezium's default. Nobody could read it in the event; as a key it was a root that there is not."""
    (item,) = decoded([with_schema(change, **{column: DECIMAL})], by=DEBEZIUM)
    assert (item.kind, item.part) == ("alert", "bad-record")
    assert f"'{column}' is a decimal number in base64" in (item.row or "")
    assert "set decimal.handling.mode=string" in (item.row or "")


@pytest.mark.parametrize(
    ("amount", "name"),
    [(2.01, DECIMAL), (None, DECIMAL), ("AMk=", "io.debezium.data.Other"), ({"scale": 2, "value": "AMk="}, DECIMAL)],
)
def test_a_number_that_can_be_read_passes_with_its_schema(amount: object, name: str):
    change = {"after": CUSTOMER | {"amount": amount}}
    assert [item.kind for item in decoded([with_schema(change, amount=name)], by=DEBEZIUM)] == ["transaction"]


def test_numbers_of_a_table_in_no_group_need_not_be_read():
    change = {"after": {"amount": "AMk="}, "source": ROW["source"] | {"table": "Audit"}}
    (item,) = decoded([with_schema(change, amount=DECIMAL)], by=DEBEZIUM)
    assert (item.kind, item.row) == ("transaction", None)


@pytest.mark.parametrize(
    "schema",
    [
        None,
        [],
        *(
            {"fields": fields}
            for fields in (
                None,
                [1],
                [{"field": "after"}],
                [{"field": "after", "fields": 1}],
                [{"field": "after", "fields": [1, {"name": DECIMAL, "field": []}]}],
            )
        ),
    ],
)
def test_a_schema_that_makes_no_sense_stops_nothing(schema: object):
    value = json.dumps({"schema": schema, "payload": ROW | {"after": CUSTOMER | {"amount": "AMk="}}}).encode()
    assert [item.kind for item in decoded([value], by=DEBEZIUM)] == ["transaction"]


@pytest.mark.parametrize("field", ["expire_seconds", "forget_seconds", "snapshot_keep_seconds", "trigger_seconds"])
@pytest.mark.parametrize("value", ["inf", "1e300"])
def test_times_that_spark_does_not_know_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: str
):
    file = tmp_path / "config.toml"
    file.write_text(f"{field} = {value}\n{TOML}")
    assert main([str(file), "--check"]) == 2
    told = capsys.readouterr().err
    assert (
        f"{field}: Input should be {'a finite number' if value == 'inf' else 'less than or equal to 10000000000'}"
        in told
    )
