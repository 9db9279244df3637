"""Brokers that throttle their clients, for a quota."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.client import ConnectionGroup
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Float64, Int16, Int32, Schema, String
from sidings import KafkaSettings, KafkaUnavailable
from sidings.devstack.topics import create_topic
from sidings.kafka import membership

from .consumer_support import administering
from .outbox_support import emptied, publish, records, relaying, sending
from .support import eventually

_TEXT = String("utf-8")
_ENTITY = Array(("type", _TEXT), ("name", _TEXT))


class _Answer(Response):
    API_KEY = 49  # type: ignore[assignment]
    API_VERSION = 0  # type: ignore[assignment]
    SCHEMA = Schema(
        ("throttle_time_ms", Int32), ("entries", Array(("error_code", Int16), ("error", _TEXT), ("entity", _ENTITY)))
    )


class _AlterClientQuotasV0(RequestStruct):
    API_KEY = 49
    API_VERSION = 0
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        (
            "entries",
            Array(("entity", _ENTITY), ("ops", Array(("key", _TEXT), ("value", Float64), ("remove", Boolean)))),
        ),
        ("validate_only", Boolean),
    )


class _AlterClientQuotas(Request[_AlterClientQuotasV0]):
    API_KEY = 49

    def __init__(self, **quotas: float) -> None:
        self._ops = [(key, value, False) for key, value in quotas.items()]

    def build(self, request_struct_class: type[_AlterClientQuotasV0]) -> _AlterClientQuotasV0:
        return request_struct_class([([("client-id", None)], self._ops)], False)


async def allow(bootstrap: str, **quotas: float) -> None:
    """Each client no more than this."""
    async with administering(bootstrap) as admin:
        answer: Any = await admin._send_request(_AlterClientQuotas(**quotas))
    assert [code for code, *_ in answer.entries] == [0]


@pytest.mark.long
async def test_what_a_throttled_relay_has_not_sent_does_not_come_behind_its_repeat(
    database: str, own_kafka: Any
) -> None:
    """It stood in the broker's buffer, after the end of the connection, too: an old row came behind newer ones."""
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "etas", partitions=1)
    await allow(kafka.bootstrap, producer_byte_rate=10_000.0)
    async with relaying(database, kafka.bootstrap, shutdown_seconds=1.0):
        await publish(database, "etas", [("k", b"1".ljust(200_000))])  # the broker reads nothing for 10 s then
        await emptied(database)
        await publish(database, "etas", [("k", b"2")])
        await asyncio.sleep(1)
    await publish(database, "etas", [("k", b"3")])
    async with relaying(database, kafka.bootstrap):
        await emptied(database)
        await asyncio.sleep(15)
    assert [record.value[:1] for record in await records(kafka.bootstrap, "etas")] == [b"1", b"2", b"3"]


async def test_a_topic_that_fails_for_a_quota_says_so(
    database: str, own_kafka: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "etas", partitions=1)
    await allow(kafka.bootstrap, producer_byte_rate=10_000.0)
    async with relaying(database, kafka.bootstrap, delivery_seconds=2.0):
        await publish(database, "etas", [("k", b"1".ljust(200_000))])
        await emptied(database)
        assert "throttles this client (a quota): it is sent nothing for" in caplog.text
        await publish(database, "etas", [("k", b"2")])
        await eventually(lambda: "did not acknowledge in time: it throttles this client (a quota)" in caplog.text)
        await emptied(database)
    assert [record.value[:1] for record in await records(kafka.bootstrap, "etas")] == [b"1", b"2"]
    async with sending(kafka.bootstrap, delivery_seconds=2.0) as producer:
        await producer.send("etas", key="k", value=b"3".ljust(200_000))
        with pytest.raises(KafkaUnavailable, match="it throttles this client"):
            await producer.send("etas", key="k", value=b"4")


async def test_a_client_that_is_throttled_for_long_is_not_made_anew(
    sidings_kafka: str, topic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on its way when the broker says so has no answer before that is over. That passed for brokers that are
    all away, and cost the group a rebalance, again and again."""
    monkeypatch.setattr(membership, "_LOST_SECONDS", 0.0)
    client: Any = membership.make_client(KafkaSettings(bootstrap=sidings_kafka, metadata_seconds=60), "test")
    client.subscribe([await topic()])
    await client.start()
    inner, contact = client._client, membership.Contact(client)
    try:
        monkeypatch.setattr(inner, "_get_conn", lambda *_, **__: asyncio.sleep(0))
        assert await inner.force_metadata_update() is False
        inner._heed(1, ConnectionGroup.DEFAULT, SimpleNamespace(throttle_time_ms=140_000))
        contact.check()
        assert contact.lost_since is None
        assert contact.throttling == ": it throttles this client (a quota)"
        inner.throttled_until.clear()
        contact.check()
        assert contact.lost_since is not None
    finally:
        monkeypatch.undo()
        await client.stop()
