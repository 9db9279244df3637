"""Snapshots of many roots that are due in one micro-batch, as after a stop of the query while they are loaded."""

import pytest
from sidings.spark_analytics.transactions import snapshots

from .cdc_support import Row, config, header_row
from .test_cdc_combining import Operator, bodies, decoded


def test_a_micro_batch_sends_no_more_of_them_than_a_worker_has_room_for(monkeypatch: pytest.MonkeyPatch):
    """Spark has all that timers send in memory, and makes one table of it, of 2 GB at most: with more the query ended,
    and each that was started again."""
    operator = Operator(config(snapshot_quiet_seconds=10))
    operator.wait_until(1)
    operator.take(decoded(header_row(Row("Customers", "REFRESH", {"customer_id": id})) for id in range(7)))
    monkeypatch.setattr(snapshots, "CHARACTERS", 200, raising=False)
    sent: list[str] = []
    for second in range(100, 110):
        operator.spark.processor.init(operator.spark.handle)  # as Spark does for each micro-batch
        events = operator.wait_until(second)
        assert sum(len(event.value) for event in events[:-1]) <= 200
        sent += [body["id"] for body in bodies(events)]
    assert sorted(sent) == [str(id) for id in range(7)]
