"""A query that runs at some hours only, and stands still whenever transactions are looked at."""

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
