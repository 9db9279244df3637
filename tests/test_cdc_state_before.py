"""A checkpoint of before rows of a snapshot were told apart by the names of their columns."""

from sidings.spark_analytics.transactions.messages import digest, text_of

from .cdc_support import Row, header_row
from .test_cdc_combining import CONFIG, Operator, bodies, decoded


def test_rows_that_stand_in_the_state_already_are_not_counted_twice():
    """The connector sends its snapshot again, as it does when it has been started anew, after Sidings was."""
    row = Row("CustomerAddresses", "REFRESH", {"customer_id": 7, "home": 1})
    (item,) = decoded([header_row(row)], by=CONFIG)
    before = digest(row.table, text_of([7, 1]))  # the values alone
    operator = Operator(CONFIG)
    operator.take([item._replace(part=before)])
    operator.take([item])
    (event,) = bodies(operator.wait_until(1_000))
    assert [one["data"] for one in event["rows"]] == [row.data]
