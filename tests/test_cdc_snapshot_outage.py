"""A query that stands still while a snapshot is loaded, for longer than the rows of a root are kept."""

from collections.abc import Sequence

import pytest
from sidings.spark_analytics.transactions.messages import Outgoing

from .cdc_support import Row, config, header_row
from .test_cdc_combining import Operator, bodies, decoded

ROWS = [Row("Customers", "REFRESH", {"customer_id": 7})] + [
    Row("CustomerNames", "REFRESH", {"customer_id": 7, "name_type": type}) for type in ("full", "nick")
]


def tables(sent: Sequence[Outgoing]) -> list[list[str]]:
    return [[row["table"] for row in body["rows"]] for body in bodies(sent)]


@pytest.mark.parametrize("sent_before", [True, False])
def test_rows_of_a_snapshot_are_kept_until_the_rest_is_read_after_a_long_outage(sent_before: bool):
    """Without them, the event of the rest replaced the whole at who reads it."""
    operator = Operator(config(snapshot_quiet_seconds=10, snapshot_keep_seconds=100))
    one, two, three = decoded(map(header_row, ROWS))
    operator.wait_until(1)
    operator.take([one])
    sent = operator.wait_until(12) if sent_before else []
    sent += operator.wait_until(5_000)  # the first micro-batch after the outage
    assert tables(sent) == [["Customers"]]
    operator.wait_until(5_001)
    operator.take([two])
    assert tables(operator.wait_until(5_020)) == [["Customers", "CustomerNames"]]
    operator.wait_until(9_000)  # another outage
    operator.take([three])
    assert tables(operator.wait_until(9_020)) == [["Customers", "CustomerNames", "CustomerNames"]]


def test_rows_of_a_snapshot_are_forgotten_though_the_query_stands_still_each_time():
    operator = Operator(config(snapshot_quiet_seconds=10, snapshot_keep_seconds=100))
    (item,) = decoded([header_row(ROWS[0])])
    operator.wait_until(1)
    operator.take([item])
    for day in range(1, 4):
        operator.wait_until(day * 5_000)
    assert not operator.spark.peekMapState("parts", f"snapshot/{item.id}")
