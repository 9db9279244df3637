"""The snippets of docs/consumer.md run, on topics of the test's own."""

from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel
from sidings import Job, Message, Transaction
from sidings.kafka.outbox import MESSAGE_ID
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from .consumer_support import a_service, offset_reaches, produce_raw, sample
from .guide import run
from .support import connected, drained, eventually, fetch


class Renamed:
    """A service whose topics have other names than the page gives them."""

    def __init__(self, service: Any, topics: dict[str, str]) -> None:
        self._service = service
        self._topics = topics

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._service, name)
        if name not in ("consumer", "topic", "reset_offsets"):
            return found
        return lambda topic, *args, **options: partial(found, self._topics[topic])(*args, **options)


class TransportPlanned(BaseModel):
    id: str


class TransportDelayed(BaseModel):
    id: str
    minutes: int


class Position(BaseModel):
    transport_id: str


class SendEta(BaseModel):
    transport_id: str


@pytest.fixture
async def transports(database):
    async with connected(database) as connection:
        await connection.execute(
            "CREATE TABLE transport (id text PRIMARY KEY, delay int NOT NULL DEFAULT 0, moves int NOT NULL DEFAULT 0)"
        )
        await connection.execute("INSERT INTO transport (id) VALUES ('t1')")
    return database


NAMES = {"Message": Message, "Transaction": Transaction, "UTC": UTC, "datetime": datetime, "Position": Position}


class Base(DeclarativeBase): ...


class Transport(Base):
    __tablename__ = "transport"
    id: Mapped[str] = mapped_column(primary_key=True)
    latitude: Mapped[float | None]


class Place(Position):
    latitude: float


async def test_a_session_of_sqlalchemy_in_a_job(transports, topic, sidings_kafka):
    name, service = await topic(), a_service(transports, sidings_kafka)
    await fetch(transports, "ALTER TABLE transport ADD latitude float")
    engine = create_async_engine(transports.replace("postgresql://", "postgresql+psycopg://"))
    names = NAMES | {"Position": Place, "Transport": Transport, "Session": async_sessionmaker(engine), "Job": Job}
    run("consumer.md", "With SQLAlchemy", service=Renamed(service, {"positions": name}), **names)
    for latitude in (1.5, 2.5):
        await produce_raw(sidings_kafka, name, Place(transport_id="t1", latitude=latitude).model_dump_json().encode())
    async with service:
        await eventually(offset_reaches(transports, name, 2))
        await drained(transports)
    await engine.dispose()
    assert (await fetch(transports, "SELECT latitude FROM transport"))[0]["latitude"] == 2.5


async def test_several_types_in_one_topic(transports, topic, sidings_kafka):
    name = await topic()
    service = a_service(transports, sidings_kafka)
    models = {"TransportPlanned": TransportPlanned, "TransportDelayed": TransportDelayed}
    run("consumer.md", "Several types in one topic", service=Renamed(service, {"transports": name}), **NAMES, **models)
    for kind, value in [
        ("TransportPlanned", TransportPlanned(id="t2")),
        ("TransportDelayed", TransportDelayed(id="t2", minutes=5)),
    ]:
        await produce_raw(sidings_kafka, name, value.model_dump_json().encode(), headers=[("ce_type", kind.encode())])
    async with service:
        await eventually(offset_reaches(transports, name, 2))
    rows = await fetch(transports, "SELECT id, delay FROM transport ORDER BY id")
    assert [tuple(row) for row in rows] == [("t1", 0), ("t2", 5)]


async def test_duplicates_and_going_on_from_another_place(transports, topic, sidings_kafka):
    name = await topic()
    service = a_service(transports, sidings_kafka)
    renamed = Renamed(service, {"positions": name})
    page = run("consumer.md", "Duplicates", "Going on from another place", service=renamed, **NAMES)
    value = Position(transport_id="t1").model_dump_json().encode()
    for id in (b"a", b"a", b"b"):
        await produce_raw(sidings_kafka, name, value, headers=[(MESSAGE_ID, id)])
    async with service:
        await eventually(offset_reaches(transports, name, 3))
        await page["handle_may_again"]()
        await eventually(offset_reaches(transports, name, 3))
    assert (await fetch(transports, "SELECT moves FROM transport"))[0]["moves"] == 4


@pytest.mark.parametrize("heading", ["Back-pressure", "A job for each message", "Lists"])
async def test_a_consumer_that_enqueues(transports, topic, sidings_kafka, heading):
    name = await topic()
    service = a_service(transports, sidings_kafka)

    @service.job(group="transport_id")
    async def send_eta(job: Job[SendEta]) -> None: ...

    given = {**NAMES, "SendEta": SendEta, "send_eta": send_eta}
    run("consumer.md", heading, service=Renamed(service, {"positions": name}), **given)
    await produce_raw(sidings_kafka, name, Position(transport_id="t1").model_dump_json().encode())
    async with service:
        await eventually(offset_reaches(transports, name, 1))
        await drained(transports)
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="handled") == 1)
