"""Records and settings that say what cannot be, and what is told of them."""

import json
from pathlib import Path

import pytest
from sidings.spark_analytics.transactions.__main__ import main

from .cdc_support import Row, header_row
from .test_cdc_combining import DEBEZIUM, ROW, TOML, decoded


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
