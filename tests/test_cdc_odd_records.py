"""Records and settings that say what cannot be, and what is told of them."""

import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sidings.spark_analytics.transactions.__main__ import main

from .cdc_support import Row, header_row
from .test_cdc_combining import CUSTOMER, DEBEZIUM, ROW, TOML, decoded

DECIMAL = "org.apache.kafka.connect.data.Decimal"
VARIABLE = "io.debezium.data.VariableScaleDecimal"


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


def with_schema(change: Mapping[str, object], scale: str = "2", **names: str) -> bytes:
    """As Connect's converter writes it. names: of the columns' logical types."""
    columns = [{"type": "bytes", "name": name, "parameters": {"scale": scale}, "field": c} for c, name in names.items()]
    sides = [{"type": "struct", "fields": columns, "optional": True, "field": side} for side in ("before", "after")]
    return json.dumps({"schema": {"type": "struct", "fields": sides}, "payload": ROW | change}).encode()


def packed(value: bytes) -> tuple[Any, Any]:
    """The roots of a record's row, and the row's columns."""
    (item,) = decoded([value], by=DEBEZIUM)
    _, ids, row = json.loads(item.row or "")
    return ids, row["data"]


def base64_of(number: int) -> str:
    return b64encode(number.to_bytes(20, signed=True)).decode()


@pytest.mark.parametrize(
    ("unscaled", "scale", "text"),
    [
        (201, "2", "2.01"),
        (-1, "2", "-0.01"),
        (0, "2", "0.00"),
        (7, "0", "7"),
        (5, "-2", "500"),
        (10**40 + 1, "10", f"{10**30}.0000000001"),
    ],
)
@pytest.mark.parametrize("variable", [False, True])
def test_a_number_in_base64_is_read_with_its_scale(unscaled: int, scale: str, text: str, variable: bool):
    """Debezium's default. Only the schema has the scale, which no event has: nobody could read it there."""
    written = base64_of(unscaled)
    amount, name = ({"scale": int(scale), "value": written}, VARIABLE) if variable else (written, DECIMAL)
    value = with_schema({"after": CUSTOMER | {"amount": amount}}, scale, amount=name)
    assert packed(value)[1] == CUSTOMER | {"amount": text}


@pytest.mark.parametrize(
    "change",
    [
        {"after": CUSTOMER, "before": CUSTOMER | {"amount": "AMk="}, "op": "u"},
        {"after": None, "before": CUSTOMER | {"amount": "AMk="}, "op": "d"},
        {"after": CUSTOMER | {"amount": "AMk="}, "op": "r", "transaction": None},
    ],
)
def test_also_of_former_rows_and_of_snapshots(change: Mapping[str, object]):
    (item,) = decoded([with_schema(change, amount=DECIMAL)], by=DEBEZIUM)
    assert '"amount":"2.01"' in (item.row or "").replace(" ", "")


def test_a_key_in_base64_is_the_root_that_it_is_as_a_number():
    for key in ("Bw==", 7):
        assert packed(with_schema({"after": {"customer_id": key}}, "0", customer_id=DECIMAL))[0] == ["7"]


@pytest.mark.parametrize(
    ("amount", "name"),
    [
        (2.01, DECIMAL),
        (None, DECIMAL),
        ("no base64", DECIMAL),
        ("AMk=", "io.debezium.data.Other"),
        ("AMk=", VARIABLE),
        ({"scale": 10**9, "value": "AMk="}, VARIABLE),
        ({"scale": None, "value": "AMk="}, VARIABLE),
        ({"value": "AMk="}, VARIABLE),
    ],
)
def test_what_is_no_number_in_base64_passes_as_it_is(amount: object, name: str):
    value = with_schema({"after": CUSTOMER | {"amount": amount}}, amount=name)
    assert packed(value)[1] == CUSTOMER | {"amount": amount}


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
