"""One topic with messages of several types: each has its model and its handler; unknown ones follow the policy."""

import asyncio
import base64
import json
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from sidings import (
    ConfigurationError,
    Message,
    OutboxSettings,
    Retry,
    Snooze,
    Transaction,
    UndecodableMessage,
    current_headers,
)
from sidings.kafka import typed_subscription
from sidings.kafka.subscription import Subscription
from sidings.kafka.typed_subscription import TypedSubscription
from tenacity import stop_after_attempt, wait_fixed, wait_none

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    as_json,
    numbers,
    offset_reaches,
    produce_raw,
    producing,
    record,
    sample,
)
from .support import SECONDS, drained, eventually, fetch, outcomes, value


class Name(BaseModel):
    """The value of the other type."""

    name: str


def typed(kind: str | None) -> list[tuple[str, bytes]]:
    return [] if kind is None else [("type", kind.encode())]


async def produce_typed(
    bootstrap: str, topic: str, *messages: tuple[str | None, bytes | None], key: bytes = b"k"
) -> None:
    """Send (type, value) pairs, in order, to partition 0."""
    async with producing(bootstrap) as producer:
        for kind, raw in messages:
            sent = producer.send_and_wait(topic, raw, key=key, headers=typed(kind), partition=0)
            await asyncio.wait_for(sent, SECONDS)


async def test_each_type_has_its_model_and_its_handler_and_order_is_kept(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    seen: list[tuple[str | None, object]] = []
    events = service.topic(name, type_header="type")

    @events.on("number")
    async def on_number(message: Message[Number], tx: Transaction) -> None:
        seen.append((message.type, message.value))
        await record(message, tx)

    @events.on("name")
    async def on_name(message: Message[Name], tx: Transaction) -> None:
        seen.append((message.type, message.value))

    @events.on(None)
    async def on_nothing(message: Message[Number | None], tx: Transaction) -> None:
        seen.append((message.type, message.value))

    ada = Name(name="Ada")
    await produce_typed(
        sidings_kafka,
        name,
        *(("number", as_json(1)), ("name", ada.model_dump_json().encode()), (None, None), ("number", as_json(2))),
    )
    async with service:
        await eventually(offset_reaches(effects, name, 4))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="handled") == 4)
    assert seen == [("number", Number(n=1)), ("name", ada), (None, None), ("number", Number(n=2))]
    assert await numbers(effects) == [1, 2]


@pytest.mark.parametrize("route", ["outbox", "direct"])
async def test_many_messages_of_several_types_are_published_at_once(effects, topic, sidings_kafka, route):
    """And each hands on the correlation id of the message that it comes of."""
    name = await topic()
    service = a_service(effects, sidings_kafka, outbox=OutboxSettings(routes={name: route}))
    events = service.topic(name, type_header="type")
    seen: list[tuple[str | None, object, object]] = []

    async def note(message: Message[Any], tx: Transaction) -> None:
        seen.append((message.type, message.value, current_headers().get("correlation_id")))

    events.on("number", model=Number)(note)
    events.on("name", model=Name)(note)
    ada, one = Name(name="Ada"), Number(n=1)
    messages = [
        ("k", one, {"type": "number", "correlation_id": "c-1"}),
        ("k", ada, {"type": "name", "correlation_id": "c-2"}),
        ("k", one, {"type": "number"}),
    ]
    async with service:
        async with service.transaction() as tx:
            await service.outbox.publish_many(tx, name, messages, headers={"correlation_id": "c-0"})
        await eventually(lambda: len(seen) == 3)
    assert seen == [("number", one, "c-1"), ("name", ada, "c-2"), ("number", one, "c-0")]


@pytest.mark.parametrize(
    ("field", "envelope"), [("type", {"type": "number"}), ("meta.type", {"meta": {"type": "number"}})]
)
async def test_the_type_may_stand_in_the_value(effects, topic, sidings_kafka, field, envelope):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    events = service.topic(name, type_field=field)
    events.on("number", model=Number)(record)
    strange = [b'"a text"', b'{"type": 3, "meta": {"type": 3}}', b"no json", None]
    values = [json.dumps(envelope | {"n": 1}).encode(), *strange, json.dumps(envelope | {"n": 2}).encode()]
    await produce_raw(sidings_kafka, name, *values, key=b"k")
    async with service:
        await eventually(offset_reaches(effects, name, 6))
    assert await numbers(effects) == [1, 2]
    reasons = [row["held"] for row in await fetch(effects, "SELECT held FROM sidings.job ORDER BY id")]
    expected = [
        "there is no handler",
        f"the field {field!r}, its type, is 3",
        "its type cannot be",
        "there is no handler",
    ]
    for reason, text in zip(reasons, expected, strict=True):
        assert reason.startswith(f"the message cannot be decoded: {text}")


async def test_unknown_types_are_parked_with_their_bytes_and_run_when_a_release_knows_them(
    effects, topic, sidings_kafka, caplog
):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    service.topic(name, type_header="type").on("number", model=Number)(record)
    await produce_typed(sidings_kafka, name, ("number", as_json(1)), ("later", as_json(2)), ("number", as_json(3)))
    caplog.set_level(logging.ERROR)
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="held") == 1)
    assert await numbers(effects) == [1, 3]  # the key's later message goes on
    assert "there is no handler for the type 'later'; known: 'number'" in caplog.text
    (job,) = await fetch(effects, "SELECT id, held, payload FROM sidings.job")
    assert base64.b64decode(json.loads(job["payload"])["value"]) == as_json(2)
    newer = a_service(effects, sidings_kafka)
    events = newer.topic(name, type_header="type")
    events.on("number", model=Number)(record)
    events.on("later", model=Number)(record)
    async with newer:
        await fetch(effects, "SELECT sidings.release_job($1, 'test', 'the type is known now')", job["id"])
        await drained(effects)
    assert await numbers(effects) == [1, 3, 2]


async def test_unknown_types_can_be_skipped_and_are_counted(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    events = service.topic(name, type_header="type", unknown="skip")

    @events.on("number")
    async def on_number(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)

    await produce_typed(
        sidings_kafka, name, *((kind, as_json(n)) for n, kind in enumerate(["number", "x", None, "number"]))
    )
    async with service:
        await eventually(offset_reaches(effects, name, 4))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="skipped") == 2)
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="handled") == 2)
    assert await numbers(effects) == [0, 3]
    assert await value(effects, "SELECT count(*) FROM sidings.job") == 0


async def test_where_unknown_types_fail_their_keys_wait_in_order_for_a_release_that_knows_them(
    effects, topic, sidings_kafka, monkeypatch
):
    name = await topic()
    monkeypatch.setattr(typed_subscription, "_LOOK_AGAIN_SECONDS", 0.05)
    retry = Retry(wait=wait_none(), stop=stop_after_attempt(3))

    def a_release(*known: str):
        service = a_service(effects, sidings_kafka)
        events = service.topic(name, type_header="type", unknown="fail", retry=retry)
        for kind in known:
            events.on(kind, model=Number)(record)
        return service

    await produce_typed(sidings_kafka, name, ("number", as_json(1)), ("later", as_json(2)), ("number", as_json(3)))
    await produce_typed(sidings_kafka, name, ("number", as_json(4)), key=b"other")
    older = a_release("number")
    async with older:
        await eventually(offset_reaches(effects, name, 4))
        await eventually(lambda: sample(older, "sidings_consumer_failures_total") == 3)
        await eventually(lambda: sample(older, "sidings_jobs_total", outcome="snoozed") >= 1)
    assert await numbers(effects) == [1, 4]
    async with a_release("number", "later"):
        await drained(effects)
    assert await numbers(effects) == [1, 4, 2, 3]


@pytest.mark.parametrize("unknown", ["skip", "fail"])
@pytest.mark.parametrize("isolate", [True, False])
async def test_a_stored_message_waits_in_its_keys_order_where_a_release_before_has_no_handler_for_it(
    effects, topic, sidings_kafka, monkeypatch, caplog, unknown, isolate
):
    """As while a deployment rolls, or after it was rolled back: it ended as succeeded, or was given up."""
    name = await topic()
    monkeypatch.setattr(typed_subscription, "_LOOK_AGAIN_SECONDS", 0.05)
    once = Retry(wait=wait_none(), stop=stop_after_attempt(1))

    def a_release(later: Any = None):
        service = a_service(effects, sidings_kafka)
        options = {"type_header": "type", "unknown": unknown, "isolate": isolate}
        events = service.topic(name, retry=once, **options)
        events.on("number", model=Number)(record)
        if later is not None:
            events.on("later", model=Number)(later)
        return service

    async def away(message: Message[Number], tx: Transaction) -> None:
        raise Snooze(0.05, "not now") if isolate else ValueError("not yet")

    kinds = ["number", "later", "number", "later"]
    await produce_typed(sidings_kafka, name, *((kind, as_json(n)) for n, kind in enumerate(kinds)))
    newer = a_release(away)
    async with newer:
        await eventually(offset_reaches(effects, name, 4))
        await eventually(lambda: sample(newer, "sidings_jobs_total", outcome="snoozed" if isolate else "retried") >= 1)
    (failures,) = await fetch(effects, "SELECT failures FROM sidings.job ORDER BY id LIMIT 1")
    caplog.set_level(logging.WARNING)
    await fetch(effects, "UPDATE sidings.job SET run_at = now() WHERE position IS NOT NULL")
    older = a_release()
    async with older:
        await eventually(lambda: sample(older, "sidings_jobs_total", outcome="snoozed") >= 2)
    assert await numbers(effects) == [0]
    assert await value(effects, "SELECT count(*) FROM sidings.job") == 3  # in the order in which they stand
    assert (await fetch(effects, "SELECT failures FROM sidings.job ORDER BY id LIMIT 1")) == [failures]
    (told,) = [line for line in caplog.messages if "there is no handler for the type 'later'" in line]
    assert "`sidings groups skip`" in told
    (error,) = await fetch(
        effects, "SELECT error_message FROM sidings.job_history ORDER BY finished_at DESC, attempt DESC LIMIT 1"
    )
    assert error["error_message"] == "there is no handler for the type 'later'; known: 'number'"
    async with a_release(record):
        await drained(effects)
    assert await numbers(effects) == [0, 1, 2, 3]


async def test_lists_are_of_one_type_and_in_the_order_of_the_partition(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    calls: list[tuple[str | None, list[int]]] = []
    events = service.topic(name, type_header="type")

    @events.on("many", batch=3)
    async def on_many(messages: list[Message[Number]], tx: Transaction) -> None:
        calls.append((messages[0].type, [message.value.n for message in messages]))

    @events.on("one")
    async def on_one(message: Message[Number], tx: Transaction) -> None:
        calls.append((message.type, [message.value.n]))

    kinds = ["many"] * 4 + ["one"] * 2 + ["many", "unknown", "many"]
    await produce_typed(sidings_kafka, name, *((kind, as_json(n)) for n, kind in enumerate(kinds)))
    async with service:
        await eventually(offset_reaches(effects, name, 9))
    in_order = [n for _, batch in calls for n in batch]
    assert in_order == [0, 1, 2, 3, 4, 5, 6, 8]
    assert all(len({kinds[n] for n in batch}) == 1 and kinds[batch[0]] == kind for kind, batch in calls)
    assert all(len(batch) <= (3 if kind == "many" else 1) for kind, batch in calls)


@pytest.mark.parametrize("isolate", [False, True])
async def test_messages_that_are_stored_as_jobs_run_by_their_types_handler(effects, topic, sidings_kafka, isolate):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    events = service.topic(name, type_header="type", isolate=isolate, retry=TWICE_AND_PARK)
    tries = 0

    @events.on("number")
    async def on_number(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx, "number")

    @events.on("other", batch=10)
    async def on_other(messages: list[Message[Number]], tx: Transaction) -> None:
        nonlocal tries
        tries += 1
        if tries < (2 if isolate else 4):
            raise ValueError("not yet")
        for message in messages:
            await record(message, tx, "other")

    service.registry.get(f"message:{name}").retry = Retry(wait=wait_fixed(0.05))
    await produce_typed(sidings_kafka, name, ("other", as_json(1)), ("number", as_json(2)), ("other", as_json(3)))
    async with service:
        await eventually(offset_reaches(effects, name, 3))
        await drained(effects)
    assert await numbers(effects) == [1, 2, 3]  # behind the one that failed, in its key's order
    assert [row["via"] for row in await fetch(effects, "SELECT via FROM effect ORDER BY id")] == [
        "other",
        "number",
        "other",
    ]
    assert (await outcomes(effects)).count("succeeded") == 3


async def test_wrong_declarations_are_refused_with_the_remedy(database):
    def service():
        return a_service(database, "127.0.0.1:1")

    for options, text in [
        ({}, "say where a message's type stands"),
        ({"type_header": "type", "type_field": "type"}, "say where a message's type stands"),
        ({"type_header": "type", "unknown": "ignore"}, "unknown='ignore'"),
        ({"type_header": "type", "timeout": 0}, "timeout=0"),
        ({"type_header": "type", "retry": Retry(on_exhausted="hold")}, "on_exhausted='hold' without isolate=True"),
        ({"type_header": b"type"}, "type_header=b'type': give a name"),
        ({"type_field": "meta..type"}, "type_field='meta..type': give a name"),
    ]:
        with pytest.raises(ConfigurationError, match=text):
            service().topic("topic", **options)
    with pytest.raises(ConfigurationError, match="give postgres="):
        a_service(None, "127.0.0.1:1").topic("topic", type_header="type")
    declared = service()
    events = declared.topic("topic", type_header="type")
    with pytest.raises(ConfigurationError, match="two consumers are declared"):
        declared.consumer("topic", model=Number)(record)
    with pytest.raises(ConfigurationError, match="the topic 'topic' has no handler"):
        await asyncio.wait_for(declared.run(), SECONDS)
    events.on("a", model=Number)(record)
    with pytest.raises(ConfigurationError, match="two handlers are declared for the type 'a'"):
        events.on("a", model=Number)(record)


class Book(BaseModel):
    kind: Literal["book"] = "book"


class Drop(BaseModel):
    kind: Literal["drop"] = "drop"


def test_what_an_annotation_says_of_a_model_holds_as_of_model():
    """`Annotated` was taken off: a message that did not say its kind passed for the first model that fits."""
    kinds = Annotated[Book | Drop, Field(discriminator="kind")]

    async def one(message: Annotated[Message[kinds], "a message"], tx: Transaction) -> None: ...

    async def several(messages: list[Message[kinds]], tx: Transaction) -> None: ...

    async def raw(message: Message[Annotated[bytes, "no JSON"]], tx: Transaction) -> None: ...

    def of(value: bytes) -> Any:
        return SimpleNamespace(topic="t", partition=0, offset=1, timestamp=0, key=None, value=value, headers=())

    for subscription in (Subscription[Any]("t", one), Subscription[Any]("t", several, batch=2)):
        assert subscription.decode(of(b'{"kind": "drop"}')).value == Drop()
        with pytest.raises(UndecodableMessage, match="discriminator"):
            subscription.decode(of(b"{}"))
    assert Subscription[Any]("t", raw).decode(of(b"\xff")).value == b"\xff"


def test_what_stands_in_a_message_is_told_of_briefly():
    """It goes into the log, and to whoever looks at the job: a message of a megabyte made lines of a megabyte."""
    huge = "x" * 1_000_000

    def told(subscription: Subscription[Any], value: object, headers: Sequence[tuple[str, bytes]] = ()) -> str:
        record: Any = SimpleNamespace(
            topic="t", partition=0, offset=1, timestamp=0, key=None, value=json.dumps(value).encode(), headers=headers
        )
        with pytest.raises(UndecodableMessage) as caught:
            subscription.id_of(record, subscription.decode(record))
        return str(caught.value)

    field = TypedSubscription("t", type_field="type")
    assert told(field, {"type": "unknown"}) == "there is no handler for the type 'unknown'; known: "
    assert told(field, {"type": ["one"]}) == "the field 'type', its type, is ['one']: it must be a text"
    repeats = Subscription("t", record, model=Number, dedup=lambda message: [huge] * 100)  # type: ignore[arg-type]
    for text in (
        told(field, {"type": huge}),
        told(field, {"type": [huge] * 3}),
        told(field, {"type": {huge: {huge: huge}}}),
        told(TypedSubscription("t", type_header="type"), None, [("type", huge.encode())]),
        told(repeats, {"n": 1}),
    ):
        assert len(text) < 2_000
