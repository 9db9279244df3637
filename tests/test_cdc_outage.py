"""A query that stands still for longer than transactions are remembered."""

import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sidings.devstack.fixtures import TopicFactory

from .cdc_support import Row, config, header_rows, produce, rows_of
from .support import eventually
from .test_cdc_combining import UPDATE, Operator, bodies, decoded
from .test_cdc_streaming import alerts, configured, running


def test_what_was_told_before_a_long_outage_is_not_given_up_before_the_rest_is_read():
    operator = Operator(config(expire_seconds=60, forget_seconds=600))
    first, second = decoded(header_rows("t", [UPDATE] * 2))
    operator.wait_until(1)
    operator.take([first])
    assert [body["alert"] for body in bodies(operator.wait_until(62))] == ["incomplete"]
    assert not operator.wait_until(5_000)  # the first micro-batch after the outage
    sent = bodies(operator.take([second]))
    assert [body.get("alert", body.get("type")) for body in sent] == ["completed-late", "CustomerModified"]
    # What does not come then is given up in its time.
    operator.take([decoded(header_rows("u", [UPDATE] * 2))[0]])
    assert [body["transaction"] for body in bodies(operator.wait_until(5_061))] == ["u"]
    assert [(body["alert"], body["transaction"]) for body in bodies(operator.wait_until(5_662))] == [("given-up", "u")]
    assert not operator.open


@pytest.mark.chaos  # 45 s; the operator alone is tried above
@pytest.mark.timeout(900)
async def test_rows_that_kafka_keeps_during_a_long_outage_complete_what_was_told_before(
    spark: SparkSession, sidings_kafka: str, topic: TopicFactory, tmp_path: Path
):
    topics = {name: await topic(name, partitions=1) for name in ("cdc", "customers", "addresses", "alerts")}
    by = configured(topics, sidings_kafka, tmp_path, expire_seconds=2, forget_seconds=20, max_rows_per_trigger=10)
    first, second = header_rows("lost", [UPDATE] * 2)
    await produce(sidings_kafka, topics["cdc"], [first])
    async with running(spark, by) as (_, until):
        await until(lambda found: "incomplete" in alerts(found), "what is missing is told")
        told = time.time()
    rows = {f"t{number}": [Row("Customers", "UPDATE", {"customer_id": number})] for number in range(10)}
    others = [value for id, of_it in rows.items() for value in header_rows(id, of_it)]
    await produce(sidings_kafka, topics["cdc"], [*others, second])
    await eventually(lambda: time.time() > told + by.forget_seconds + 2 * by.expire_seconds, "an outage", 60)
    async with running(spark, by) as (_, until):
        found = await until(lambda found: ("lost", 2) in rows_of(found), "what was missing")
        assert rows_of(found) == {("lost", 1), ("lost", 2), *((id, 1) for id in rows)}
        told_of = {m.headers["sidings-id"]: m.value["alert"] for m in found if "alert" in m.value}
        assert sorted(told_of.values()) == ["completed-late", "incomplete"]
