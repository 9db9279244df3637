"""The relay beside a cluster that it has to itself: without rights, over TLS with a password, and while it is down."""

import asyncio
import base64
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.admin import CreateAclsRequest
from sidings.devstack.fixtures import ServerDirectory
from sidings.devstack.kafka import Kafka
from sidings.devstack.tls import make_certificates
from sidings.devstack.topics import create_topic
from sidings.errors import KafkaUnavailable
from sidings.kafka import Directory
from sidings.kafka.outbox import NotPublished
from sidings.kafka.settings import KafkaSettings

from .consumer_support import administering
from .outbox_support import (
    Writer,
    assert_complete,
    emptied,
    never_retrieved,
    publish,
    publishing,
    records,
    relay_process,
    relaying,
    sending,
)
from .support import eventually

AUTHORIZED = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",  # the plain listener: the brokers themselves, and this test
    "sasl.enabled.mechanisms": "PLAIN,OAUTHBEARER",
    "listener.name.sasl_ssl.oauthbearer.sasl.jaas.config": (
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
        'unsecuredLoginStringClaim_sub="anybody";'
    ),
}
TOPIC, LITERAL, ALLOW = 2, 3, 3
READ, WRITE = 3, 4


@pytest.fixture(scope="module")
def guarded(sidings_server_directory: ServerDirectory) -> Iterator[Kafka]:
    """A cluster with a secured listener, whose user may do nothing but what is allowed."""
    cluster = Kafka(sidings_server_directory("own-kafka-guarded"), secure=True, settings=AUTHORIZED)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


def secured(kafka: Kafka, **options: Any) -> KafkaSettings:
    """The cluster as the user `sidings` reaches it."""
    return KafkaSettings(
        **{
            "bootstrap": kafka.secure_bootstrap,
            "security_protocol": "SASL_SSL",
            "cafile": kafka.ca_file,
            "sasl_username": kafka.username,
            "sasl_password": kafka.password,
            **options,
        }
    )


async def allow(kafka: Kafka, topic: str, operation: int) -> None:
    """Let the user do this with the topic."""
    async with administering(kafka.bootstrap) as admin:
        user = f"User:{kafka.username}"
        answer = await admin._send_request(CreateAclsRequest(TOPIC, topic, LITERAL, user, "*", operation, ALLOW))
    assert [error for error, *_ in answer.creation_responses] == [0]


async def test_a_relay_whose_user_may_write_to_no_topic_says_so(
    database: str, guarded: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers grant such a one no idempotent producer. `/health` said that none of them answered. The first test
    here: others give the user rights."""
    monkeypatch.setattr("sidings.kafka.outbox.relay._UNREACHABLE_SECONDS", 0.2)
    await create_topic(guarded.bootstrap, "rights", partitions=1)
    await publish(database, "rights", [("k", b"x")])
    told = "the relay cannot send to Kafka: its user may write to no topic"
    async with relaying(database, secured(guarded)) as relay:
        await eventually(lambda: any(told in problem for problem in relay.held_up()), relay.held_up)
        async with sending(secured(guarded)) as producer:
            with pytest.raises(KafkaUnavailable, match="may write to no topic"):
                await producer.send("rights", key="k", value=b"x")
        await allow(guarded, "rights", WRITE)
        await emptied(database)
        await eventually(lambda: relay.held_up() == [], relay.held_up)


async def test_topics_without_the_right_to_write_fail_alone_and_are_parked_with_the_reason(
    database: str, guarded: Kafka
) -> None:
    kafka = guarded
    for name in ("etas", "readable", "hidden"):
        await create_topic(kafka.bootstrap, name, partitions=2)
    await allow(kafka, "etas", WRITE)
    await allow(kafka, "readable", READ)
    for name in ("readable", "hidden", "etas"):
        await publish(database, name, [(f"k{n}", b"x") for n in range(20)])
    async with publishing(database) as (outbox, _):
        async with relaying(database, secured(kafka), max_backoff_seconds=0.3) as relay:
            await emptied(database, "etas")
            failing = {"readable", "hidden"}
            await eventually(lambda: relay.metrics.failing == failing)
            assert {t.topic: "TopicAuthorizationFailed" in t.error for t in await outbox.failing()} == dict.fromkeys(
                failing, True
            )
            await allow(kafka, "readable", WRITE)
            await emptied(database, "readable")
            assert await outbox.parked() == []
        async with relaying(database, secured(kafka), topic_patience_seconds=0.0):
            await emptied(database)
        parked = await outbox.parked()
        assert {(p.topic, "TopicAuthorizationFailed" in p.error) for p in parked} == {("hidden", True)}
        assert len(parked) == 20
    assert [len(await records(kafka.bootstrap, name)) for name in ("etas", "readable", "hidden")] == [20, 20, 0]

    async with sending(secured(kafka), metadata_seconds=5) as producer:
        await producer.send("etas", key="k", value=b"x")
        with pytest.raises(NotPublished, match="TopicAuthorizationFailed"):
            await producer.send("hidden", key="k", value=b"x")


async def test_a_relay_alone_is_set_up_by_the_environment(
    database: str, guarded: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knew the servers' addresses and nothing else: with a secured Kafka there could be none."""
    settings = {"security_protocol": "SASL_SSL", "cafile": guarded.ca_file, "sasl_username": guarded.username}
    for name, value in {**settings, "sasl_password": guarded.password}.items():
        monkeypatch.setenv(f"SIDINGS_KAFKA_{name.upper()}", str(value))
    account, _, server = database.removeprefix("postgresql://").partition("@")
    monkeypatch.setenv("SIDINGS_POSTGRES_PASSWORD", account.partition(":")[2])
    await create_topic(guarded.bootstrap, "charges", partitions=2)
    await allow(guarded, "charges", WRITE)
    await publish(database, "charges", [(f"k{n}", b"x") for n in range(20)])
    dsn = f"postgresql://{account.partition(':')[0]}:wrong@{server}"
    async with relay_process(dsn, guarded.secure_bootstrap) as relay:
        await emptied(database)
        assert await relay.terminate() == 0
    assert len(await records(guarded.bootstrap, "charges")) == 20


async def test_a_wrong_password_keeps_the_messages_and_says_why(
    database: str, guarded: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    kafka = guarded
    await create_topic(kafka.bootstrap, "positions", partitions=2)
    await allow(kafka, "positions", WRITE)
    await publish(database, "positions", [(f"k{n}", b"x") for n in range(20)])
    async with relaying(database, secured(kafka, sasl_password="wrong")) as relay:
        await eventually(lambda: "the relay's producer could not be connected" in caplog.text)
        assert relay.held == {}
    async with relaying(database, secured(kafka)):
        await emptied(database)
    assert len(await records(kafka.bootstrap, "positions")) == 20
    async with sending(secured(kafka, sasl_password="wrong")) as producer:
        with pytest.raises(KafkaUnavailable):
            await producer.send("positions", key="k", value=b"x")


class Tokens(AbstractTokenProvider):
    """Has none at first, then its server hangs, and then it raises when it is asked for more."""

    def __init__(self) -> None:
        self._calls = 0

    async def token(self) -> str:
        self._calls += 1
        if self._calls <= 4:
            raise LookupError("no token today")
        if self._calls <= 6:
            await asyncio.Event().wait()
        parts = {"alg": "none"}, {"sub": "ANONYMOUS", "iat": time.time(), "exp": time.time() + 600}
        header, claims = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
        return f"{header}.{claims}."

    def extensions(self) -> dict[str, str]:
        if self._calls <= 8:
            raise LookupError("no extensions today")
        return {}


async def test_a_token_that_cannot_be_had_is_waited_for_like_kafka(database: str, guarded: Kafka) -> None:
    """What its provider raised ended the relay, or the directory, and the service. One that hung kept its client from
    each broker, for ever."""
    await create_topic(guarded.bootstrap, "tokens", partitions=1, config={"cleanup.policy": "compact"})
    await publish(database, "tokens", [("k", b"{}")])
    reached = KafkaSettings(
        bootstrap=guarded.secure_bootstrap,
        security_protocol="SASL_SSL",
        cafile=guarded.ca_file,
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_provider=Tokens(),
        rebalance_seconds=1,
        request_seconds=2,
    )
    async with relaying(database, reached), Directory("tokens", kafka=reached, model=dict[str, Any]) as directory:
        await emptied(database)
        await eventually(lambda: directory.get("k") == {})


async def test_a_token_whose_provider_hangs_is_given_up() -> None:
    class Hanging(AbstractTokenProvider):
        async def token(self) -> None:
            await asyncio.Event().wait()

    settings = KafkaSettings(
        bootstrap="127.0.0.1:1",
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauth_token_provider=Hanging(),
        rebalance_seconds=1,
        request_seconds=1.1,
    )
    async with asyncio.timeout(10):
        with pytest.raises(KafkaConnectionError, match=r"sasl_oauth_token_provider gave no token within 1\.1 s"):
            await settings.client_options()["sasl_oauth_token_provider"].token()


@pytest.mark.long
async def test_files_for_tls_that_are_replaced_are_read_again_by_clients_that_live(
    database: str, guarded: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    """A client of before believed the former authority only, for as long as it met one of the brokers that it knew."""
    kafka = guarded
    await create_topic(kafka.bootstrap, "terminals", partitions=1, config={"cleanup.policy": "compact"})
    for operation in (READ, WRITE):
        await allow(kafka, "terminals", operation)
    caplog.set_level(logging.INFO, "sidings.kafka")
    async with Directory("terminals", kafka=secured(kafka), model=dict[str, Any]) as directory:
        for turn, told in enumerate(["", "cannot be used, going on with those of before", "and read again"]):
            if turn == 1:
                kafka.ca_file.write_text("half of it")
            elif turn == 2:
                await asyncio.to_thread(kafka.kill)
                password = await asyncio.to_thread(lambda: make_certificates(kafka.ca_file.parent).password)
                kafka._state.update(store_password=password)
                await asyncio.to_thread(kafka.start)
            await publish(database, "terminals", [("k", b'{"turn": %d}' % turn)])
            async with relaying(database, secured(kafka)):
                await emptied(database)
            await eventually(lambda: directory.get("k") == {"turn": turn}, directory.problems)  # noqa: B023
            assert told in caplog.text


@pytest.mark.long
async def test_kafka_is_down_for_a_while_under_load(
    database: str, guarded: Kafka, caplog: pytest.LogCaptureFixture
) -> None:
    kafka = guarded
    await create_topic(kafka.bootstrap, "trips", partitions=3)
    options = {"delivery_seconds": 1.0, "max_backoff_seconds": 0.3}
    async with relaying(database, kafka.bootstrap, **options) as relay, Writer(database, "trips", pause=0.05) as writer:
        await eventually(lambda: relay.metrics.count("sent", "trips") > 400)
        await asyncio.to_thread(kafka.kill)
        before = writer.count
        await eventually(lambda: relay.metrics.count("failed", "trips") >= 1, "the outage is seen")
        assert writer.count > before, "publishing goes on"
        await asyncio.to_thread(kafka.start)
        sent = relay.metrics.count("sent", "trips")
        await eventually(lambda: relay.metrics.count("sent", "trips") > sent + 400)
        await writer.__aexit__()
        await emptied(database)
        assert relay.metrics.failing == set()
    assert_complete(await records(kafka.bootstrap, "trips"), writer.count)
    assert never_retrieved(caplog) == []
