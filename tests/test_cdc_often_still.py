"""A query that runs at some hours only, and stands still whenever transactions are looked at."""

import pytest
from sidings.spark_analytics.transactions.bundles import BUCKETS

from .cdc_support import config, header_rows
from .test_cdc_combining import UPDATE, Operator, bodies, decoded


def test_a_transaction_that_never_completes_is_given_up_though_the_query_stands_still_each_time():
    """It was kept, with its rows, for as long as that goes on."""
    operator = Operator(config(expire_seconds=60, forget_seconds=600))
    first, _ = decoded(header_rows("t", [UPDATE] * 2))
    operator.wait_until(1)
    operator.take([first])
    assert [body["alert"] for body in bodies(operator.wait_until(62))] == ["incomplete"]
    for day in range(1, 30):
        now = day * 5_000
        operator.wait_until(now)  # the first micro-batch of the day
        for minute in range(1, 9):  # it runs for eight minutes, all that was missing would have been read
            operator.wait_until(now + 60 * minute)
    assert not operator.open


def test_an_id_that_is_used_again_after_a_long_outage_has_all_of_its_time(monkeypatch: pytest.MonkeyPatch):
    """The timer of the former transaction was left, for that was complete sooner."""
    operator = Operator(config(expire_seconds=60, forget_seconds=600))
    first, second = decoded(header_rows("t", [UPDATE] * 2))
    operator.take([first])
    operator.wait_until(1)
    assert [body["type"] for body in bodies(operator.take([second]))] == ["CustomerModified"]
    with monkeypatch.context() as patch:  # in a micro-batch rows come before timers, which the stand-in does not know
        patch.setattr(operator.spark, "_handleExpiredTimers", list)
        operator.wait_until(5_000)
    for bucket in range(BUCKETS):  # nor does it know of time-to-live
        operator.spark.updateMapState("done", f"transaction/{bucket}", {})
    operator.take([first])
    assert not operator.wait_until(5_000.001)
    (told,) = bodies(operator.wait_until(5_061))
    assert (told["alert"], told["reason"]) == ("incomplete", "no last event yet after 61 s")
    assert not operator.wait_until(5_600)
    sent = bodies(operator.take([second]))
    assert [body.get("alert", body.get("type")) for body in sent] == ["completed-late", "CustomerModified"]
