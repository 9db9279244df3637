"""Messages that leave the main line: parked, held, isolated."""

import asyncio
import base64
import json
import logging
from dataclasses import replace

import pytest
from pydantic import BaseModel
from sidings import Message, Retry, Transaction
from tenacity import stop_after_attempt, wait_fixed

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    Unshowable,
    a_service,
    as_json,
    numbers,
    offset_reaches,
    produce,
    produce_raw,
    producing,
    record,
    sample,
)
from .support import SECONDS, connected, drained, eventually, fetch, outcomes, value, without_place


def quick_jobs(service, topic: str) -> None:
    """Retry parked messages fast, instead of after the seconds that jobs wait by default."""
    service.registry.get(f"message:{topic}").retry = Retry(wait=wait_fixed(0.05))


async def test_later_messages_of_a_parked_key_wait_behind_it_in_order_and_other_keys_go_on(
    effects, topic, sidings_kafka
):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    healed = asyncio.Event()

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 2 and not healed.is_set():
            raise ValueError("the carrier is closed")
        await record(message, tx)

    quick_jobs(service, name)
    async with producing(sidings_kafka) as producer:
        for n in range(20):
            await producer.send_and_wait(name, as_json(n), key=b"even" if n % 2 == 0 else b"odd", partition=0)
    async with service:
        await eventually(offset_reaches(effects, name, 20))
        assert await numbers(effects) == [0, 1, *range(3, 20, 2)]
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") == 9)
        parked = await fetch(effects, 'SELECT type, origin, "group", held, payload FROM sidings.job ORDER BY position')
        assert {(row["type"], row["origin"], row["group"], row["held"]) for row in parked} == {
            (f"message:{name}", f"{name}/0", "even", None)
        }
        first = json.loads(parked[0]["payload"])
        assert (first["offset"], base64.b64decode(first["value"])) == (2, as_json(2))
        assert without_place(first["error"]) == "ValueError: the carrier is closed"
        # More of the key, after the batch in which it was parked, waits too; once the head succeeds, all run in order.
        await produce(sidings_kafka, name, [100, 102], key="even")
        await eventually(offset_reaches(effects, name, 22))
        healed.set()
        await drained(effects)
        # Nothing is parked any more, so that the key is back in the main line.
        await produce(sidings_kafka, name, [104], key="even")
        await eventually(offset_reaches(effects, name, 23))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="parked") == 11)
    assert await numbers(effects, "key = 'even'") == [0, *range(2, 20, 2), 100, 102, 104]


async def test_a_parked_key_stays_parked_over_a_restart(effects, topic, sidings_kafka):
    name = await topic()
    await produce(sidings_kafka, name, range(3))

    def another(broken: bool):
        service = a_service(effects, sidings_kafka)

        @service.consumer(name, retry=TWICE_AND_PARK)
        async def handle(message: Message[Number], tx: Transaction) -> None:
            if broken and message.value.n == 1:
                raise ValueError("not yet")
            await record(message, tx)

        return service

    async with another(broken=True):
        await eventually(offset_reaches(effects, name, 3))
        assert await numbers(effects) == [0]
    async with another(broken=False):
        await drained(effects)
        await produce(sidings_kafka, name, [3])
        await eventually(offset_reaches(effects, name, 4))
    assert await numbers(effects) == [0, 1, 2, 3]


async def test_messages_without_a_key_are_parked_alone(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n in (1, 3):
            raise ValueError("bad")
        await record(message, tx)

    await produce(sidings_kafka, name, range(5), key=None)
    async with service:
        await eventually(offset_reaches(effects, name, 5))
        groups = await fetch(effects, 'SELECT "group" FROM sidings.job')
    assert [row["group"] for row in groups] == [None, None]
    assert await numbers(effects) == [0, 2, 4]


async def test_parking_commits_with_the_offset_or_not_at_all(effects, topic, sidings_kafka):
    """The stored offset moves under the siding's feet: nothing is parked by the one who has lost the partition."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    aside, moved, calls = asyncio.Event(), asyncio.Event(), 0

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal calls
        if message.value.n == 0:
            calls += 1
            if calls > 1:  # the first was in the main line
                aside.set()
                await moved.wait()
            raise ValueError("bad")
        await record(message, tx)

    await produce(sidings_kafka, name, range(2))
    async with connected(effects) as other, service:
        await asyncio.wait_for(aside.wait(), SECONDS)
        await other.execute("UPDATE sidings.consumer_offset SET next_offset = 1")
        moved.set()
        await eventually(offset_reaches(effects, name, 2))
        await eventually(lambda: sample(service, "sidings_consumer_conflicts_total") == 1)
        assert await value(effects, "SELECT count(*) FROM sidings.job") == 0
    assert await numbers(effects) == [1]


async def test_a_message_is_told_of_as_parked_when_it_is(effects, topic, sidings_kafka, monkeypatch, caplog):
    """A table that takes no jobs: each try said that it had been parked, with two lines more."""
    monkeypatch.setattr("sidings.kafka.siding._PARK_AGAIN_SECONDS", 0.02)
    name, tries = await topic(), 0
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal tries
        tries += 1
        raise ValueError("bad")

    def told(text: str) -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and text in r.getMessage()]

    await produce(sidings_kafka, name, [0])
    async with connected(effects) as other:
        await other.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'no room'; END$$;"
            "CREATE TRIGGER refuse BEFORE INSERT ON sidings.job FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
        async with service:
            await eventually(lambda: tries >= 8)
            assert told("parked") == []
            (line,) = told("could not be settled")
            assert "no room" in line
            await other.execute("DROP TRIGGER refuse ON sidings.job")
            await eventually(offset_reaches(effects, name, 1))
            await eventually(lambda: len(told("parked after")) == 1)
    assert len(told("could not be settled")) == 2, "and that it works again"


async def test_effects_of_a_parked_message_happen_once(effects, topic, sidings_kafka):
    """Its job is transactional: where its end cannot be recorded, its effects are undone."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    tries = 0

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        nonlocal tries
        tries += 1
        await record(message, tx)
        if tries < 5:
            raise ValueError("after the effect")

    quick_jobs(service, name)
    await produce(sidings_kafka, name, [7])
    async with service:
        await drained(effects) if await eventually(offset_reaches(effects, name, 1)) else None
    assert await numbers(effects) == [7]
    assert (await outcomes(effects))[-1] == "succeeded"


# -- what cannot be decoded -------------------------------------------------------------------------------------------


async def test_an_undecodable_message_is_held_with_its_bytes_and_error_and_blocks_nothing(
    effects, topic, sidings_kafka, caplog
):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    bad = [b"\x00\xff not json", b'{"n": "many"}', None]
    await produce_raw(sidings_kafka, name, as_json(0), *bad, as_json(1), key=b"k", headers=[("h", b"\xfe")])
    caplog.set_level(logging.ERROR)
    async with service:
        await eventually(offset_reaches(effects, name, 5))
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="held") == 3)
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="handled") == 2)
    assert await numbers(effects) == [0, 1]  # the key's later message goes on: order with garbage means nothing
    rows = await fetch(effects, 'SELECT position, held, "group", payload FROM sidings.job ORDER BY id')
    payloads = [json.loads(row["payload"]) for row in rows]
    values = [None if p["value"] is None else base64.b64decode(p["value"]) for p in payloads]
    assert values == bad
    assert all(row["position"] is None and row["group"] == "k" for row in rows)
    assert all(row["held"].startswith("the message cannot be decoded: ") for row in rows)
    assert "valid integer" in rows[1]["held"]
    assert "valid integer" in payloads[1]["error"]
    assert [base64.b64decode(raw) for _, raw in payloads[0]["headers"]] == [b"\xfe"]
    assert "offset 1 cannot be decoded, and is kept as a held job: " in caplog.text


async def test_errors_that_cannot_be_shown_hold_and_park_their_messages(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)

    def decode(message: Message[bytes | None]) -> Number:
        number = Number.model_validate_json(message.value or b"")
        if number.n == 1:
            raise Unshowable
        return number

    @service.consumer(name, decoder=decode, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)
        if message.value.n == 2:
            raise Unshowable

    await produce(sidings_kafka, name, range(4), key=None)
    async with service:
        await eventually(offset_reaches(effects, name, 4))
    assert await numbers(effects) == [0, 3]
    rows = await fetch(effects, "SELECT held, payload FROM sidings.job ORDER BY id")
    told = "Unshowable: its text cannot be shown: AttributeError"
    assert rows[0]["held"] == f"the message cannot be decoded: {told}"
    assert without_place(json.loads(rows[1]["payload"])["error"]) == told


async def test_a_held_message_runs_when_it_is_released_and_can_be_decoded_now(effects, topic, sidings_kafka):
    name = await topic()
    release = """
        UPDATE sidings.job SET held = NULL, txid = pg_current_xact_id(), position = nextval('sidings.job_position')
    """

    def another(model):
        service = a_service(effects, sidings_kafka)
        service.consumer(name, model=model)(record)
        return service

    await produce_raw(sidings_kafka, name, b'{"n": 5, "unit": "km"}', key=b"k")

    class Strict(BaseModel):
        model_config = {"extra": "forbid"}
        n: int

    async with another(Strict) as service:
        await eventually(offset_reaches(effects, name, 1))
        async with connected(effects) as connection:
            await connection.execute(release)
        # Still not: it goes back to waiting for a person, and is not tried again and again.
        await eventually(lambda: sample(service, "sidings_jobs_total", outcome="held") == 1)
        assert await value(effects, "SELECT held FROM sidings.job") == "the payload does not validate"
        assert "UndecodableMessage" in await value(effects, "SELECT error_class FROM sidings.job_history")
    async with another(Number):
        async with connected(effects) as connection:
            await connection.execute(release)
        await drained(effects)
    assert await numbers(effects) == [5]


async def test_an_isolated_message_that_still_cannot_be_decoded_is_held_whatever_its_policy_says(
    effects, topic, sidings_kafka, admin
):
    """So with one that a newer release has stored, as while a deployment rolls."""
    name = await topic()
    service = a_service(effects, sidings_kafka)
    once = Retry(wait=wait_fixed(0), stop=stop_after_attempt(1))
    service.consumer(name, model=Number, isolate=True, retry=once)(record)
    await produce_raw(sidings_kafka, name, b"no number", key=b"k")
    async with service:
        await eventually(offset_reaches(effects, name, 1))
        [held] = await admin.jobs(state="held")
        await admin.release(held.id)
        await eventually(lambda: outcomes(effects))
        assert await outcomes(effects) == ["held"]
        assert [job.id for job in await admin.jobs(state="held")] == [held.id]


async def test_a_decoder_replaces_json_and_may_look_at_headers(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)

    def decode(message: Message[bytes | None]) -> Number:
        if message.value == b"odd":
            raise KeyError("no schema for this")
        base = int(message.header("base") or b"10")
        return Number(n=int(message.value or b"0", base))

    service.consumer(name, decoder=decode)(record)
    await produce_raw(sidings_kafka, name, b"ff", headers=[("base", b"16")])
    await produce_raw(sidings_kafka, name, b"12", b"odd", b"13")
    async with service:
        await eventually(offset_reaches(effects, name, 4))
    assert await numbers(effects) == [255, 12, 13]
    assert "KeyError: 'no schema for this'" in await value(effects, "SELECT held FROM sidings.job")


async def test_bytes_stay_as_they_are_and_a_tombstone_fits_an_optional_model(effects, topic, sidings_kafka):
    raw, optional = await topic("raw"), await topic("optional")
    service = a_service(effects, sidings_kafka)
    seen: list[object] = []

    @service.consumer(raw)
    async def on_raw(message: Message[bytes], tx: Transaction) -> None:
        seen.append(message.value)

    @service.consumer(optional)
    async def on_optional(message: Message[Number | None], tx: Transaction) -> None:
        seen.append(message.value)

    await produce_raw(sidings_kafka, raw, b"\xff\x00")
    await produce_raw(sidings_kafka, optional, None, as_json(1), key=b"k")
    async with service:
        await eventually(lambda: len(seen) == 3)
    assert b"\xff\x00" in seen
    assert [value for value in seen if not isinstance(value, bytes)] == [None, Number(n=1)]


@pytest.mark.parametrize(
    "key", [b"", b"\xff\xfe", b"a\x00b", b"a\x1fb", "ä".encode() * 2_000, "\ud800".encode("utf-8", "surrogatepass")]
)
async def test_any_key_can_be_parked(effects, topic, sidings_kafka, key):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    broken = True

    @service.consumer(name, retry=TWICE_AND_PARK)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if broken:
            raise ValueError("bad \0 \ud800")
        await tx.execute("INSERT INTO effect (number) VALUES ($1)", message.value.n)

    quick_jobs(service, name)
    await produce_raw(sidings_kafka, name, as_json(0), as_json(1), key=key)
    async with service:
        await eventually(offset_reaches(effects, name, 2))
        broken = False
        await drained(effects)
    assert await numbers(effects) == [0, 1]


# -- isolate ----------------------------------------------------------------------------------------------------------


async def test_isolated_messages_become_jobs_of_their_key_and_run_in_order(effects, topic, sidings_kafka):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    hold = asyncio.Event()

    @service.consumer(name, isolate=True)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.key == b"slow":
            await hold.wait()
        await record(message, tx, via="job")

    async with producing(sidings_kafka) as producer:
        for n in range(12):
            await producer.send_and_wait(name, as_json(n), key=[b"slow", b"a", b"b"][n % 3], partition=0)
    await produce_raw(sidings_kafka, name, b"garbage", key=b"a")
    async with service:
        await eventually(offset_reaches(effects, name, 13))
        await eventually(lambda: sample(service, "sidings_jobs_total", outcome="succeeded") == 8)
        assert await numbers(effects, "key = 'slow'") == []  # a hanging message stalls neither its partition nor others
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="isolated") == 12)
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="held") == 1)
        hold.set()
        await eventually(lambda: sample(service, "sidings_jobs_total", outcome="succeeded") == 12)
    for start, key in enumerate(("slow", "a", "b")):
        assert await numbers(effects, f"key = '{key}'") == list(range(start, 12, 3))


@pytest.mark.parametrize("isolate", [False, True])
async def test_a_parked_or_isolated_message_has_the_limits_of_a_transactional_job(
    effects, topic, sidings_kafka, isolate
):
    name = await topic()
    service = a_service(effects, sidings_kafka)
    told = []

    @service.consumer(name, isolate=isolate, retry=TWICE_AND_PARK, timeout=None)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        limits = "lock_timeout", "idle_in_transaction_session_timeout"
        told.append([await tx.fetchval(f"SHOW {limit}") for limit in limits])
        if told[-1] != ["0", "5min"]:
            raise ValueError("the main line")

    quick_jobs(service, name)
    await produce(sidings_kafka, name, [1])
    async with service:
        await eventually(lambda: sample(service, "sidings_jobs_total", outcome="succeeded") == 1)
    main = told[:-1]
    assert bool(main) != isolate
    assert main == [["30s", "0"]] * len(main)


@pytest.mark.parametrize(("on_exhausted", "end"), [("skip", "discarded"), ("hold", "held")])
async def test_an_isolated_message_follows_the_retry_policy_of_its_consumer(
    effects, topic, sidings_kafka, on_exhausted, end
):
    name = await topic()
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, isolate=True, retry=replace(TWICE_AND_PARK, on_exhausted=on_exhausted))
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 0:
            raise ValueError("bad")
        await record(message, tx)

    async def ended() -> bool:
        return await outcomes(effects) == ["retried", end, "succeeded"]

    await produce(sidings_kafka, name, [0, 1], key="k")
    async with service:
        await eventually(ended)
    assert await numbers(effects) == [1]


# -- the question that every batch asks -------------------------------------------------------------------------------


async def test_the_question_for_parked_keys_does_not_depend_on_the_backlog_of_other_jobs(database):
    """One key has 20,000 jobs of another type and nothing parked, and the plan was made while the table was empty."""
    ask = "SELECT * FROM sidings.parked($1, $2)"
    origins, groups = ["p/0"] * 3, ["k", "parked", "nobody"]
    async with connected(database) as connection:
        for _ in range(8):  # the plan is cached after five
            assert await connection.fetch(ask, origins, groups) == []
        await connection.execute(
            """
            INSERT INTO sidings.job (type, origin, "group") SELECT 'other', 'p/0', 'k' FROM generate_series(1, 20000);
            INSERT INTO sidings.job (type, origin, "group") VALUES ('message:p', 'p/0', 'parked');
            """
        )
        assert [tuple(row) for row in await connection.fetch(ask, origins, groups)] == [("p/0", "parked")]
        explained = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {ask}", origins, groups)
    plan = json.loads(explained)[0]["Plan"]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 20
