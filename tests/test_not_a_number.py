"""Floats that JSON has no form for: a handler gets them as they are, or nobody stores them."""

import math
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, TypeAdapter, create_model
from sidings import InvalidMessage, InvalidPayload
from sidings.executor import PostgresSettings
from sidings.jobs import Job, Registry
from sidings.jobs.doubts import may_hold_floats
from sidings.kafka import Outbox
from sidings.testing import drain

from .support import ORIGIN, connected, fetch


class Price(BaseModel):
    cents: float | None = None
    of: dict[str, Any] = {}
    before: float = 0.0
    remark: str | None = None


class AsText(Price):
    model_config = ConfigDict(ser_json_inf_nan="strings")


class AsConstant(Price):
    model_config = ConfigDict(ser_json_inf_nan="constants")


@pytest.mark.parametrize(
    ("price", "arrives"),
    [
        (Price(cents=math.nan), False),
        (Price(cents=-math.inf, remark="null"), False),
        (Price(of={"a": [1.0, math.inf]}), False),
        (Price(before=math.nan), False),  # was held as one that does not validate, when it came to run
        (Price(cents=1.5, of={"a": None}, remark="NaN"), True),
        (AsText(cents=math.inf, before=-math.inf), True),
        (AsConstant(cents=math.nan), False),  # Postgres refused it, and with it all that the transaction had done
        (AsConstant(of={"a": [1.0, -math.inf]}), False),
        (AsConstant(cents=1.5, remark='"NaN", Infinity'), True),
    ],
    ids=str,
)
async def test_a_number_does_not_become_none_on_its_way(database: str, price: Price, arrives: bool) -> None:
    """pydantic writes null for NaN and infinity; where the field may be None, that is what the handler got."""
    registry, got = Registry(), list[Price]()

    @registry.job(payload=type(price))
    async def bill(job: Job[Any]) -> None:
        got.append(job.payload)

    async with connected(database) as connection, connection.transaction():
        if arrives:
            await bill.enqueue(connection, price, origin=ORIGIN)
        else:
            with pytest.raises(InvalidPayload, match=r"NaN or infinite|valid number"):
                await bill.enqueue_many(connection, [price], origin=ORIGIN)
            await connection.execute("SELECT 1")  # the transaction is still usable
    await drain(database, registry)
    assert got == ([price] if arrives else [])


class Shipment(BaseModel):
    metadata: dict[str, Any]


class Login(BaseModel):
    token: SecretStr
    text: str = "**********"


@pytest.mark.parametrize(
    ("value", "leaves"),
    [
        (Price(cents=math.nan), False),
        (Price(of={"a": [math.inf]}, before=1.0), False),
        (Shipment(metadata={"weight": math.nan}), False),
        (Price(remark="NaN"), True),
        (AsText(cents=math.inf), True),
        (Login(token=SecretStr("4711")), False),
        (Login(token=SecretStr("")), True),
    ],
    ids=str,
)
async def test_nor_on_its_way_into_a_topic(database: str, value: BaseModel, leaves: bool) -> None:
    """Other services got null for a price, and asterisks for a token."""
    outbox = Outbox(PostgresSettings(dsn=database))
    async with connected(database) as connection, connection.transaction():
        if leaves:
            await outbox.publish(connection, "prices", key="k", value=value)
        else:
            with pytest.raises(InvalidMessage, match=r"NaN or infinite|asterisks"):
                await outbox.publish(connection, "prices", key="k", value=value)
    assert len(await fetch(database, "SELECT id FROM sidings.outbox")) == leaves
    await outbox.close()


class Colour(Enum):
    RED = "red"


class Half(Enum):
    HALF = 0.5


class Node(BaseModel):
    next: "Node | None" = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Column(BaseModel):
    type: str
    default: float | None


class ByKilogram(BaseModel):
    kind: Literal["default"]
    cents: float | None


class ByPiece(BaseModel):
    kind: Literal["piece"]
    cents: int


class Tariff(BaseModel):
    of: Annotated[ByKilogram | ByPiece, Field(discriminator="kind")]


@pytest.mark.parametrize(
    ("kind", "may"),
    [
        *((kind, False) for kind in (str, int | None, Decimal, datetime, UUID, Colour, Node, dict[str, list[int]])),
        *(
            (kind, True)
            for kind in (float, float | None, Any, list, dict, object, Half, Open, dict[str, Any], list[Price])
        ),
        # Names that mean something else in a schema of pydantic's.
        *((kind, True) for kind in (Shipment, Column, Tariff)),
    ],
    ids=str,
)
def test_only_payloads_that_may_hold_floats_are_looked_through(kind: Any, may: bool) -> None:
    """To look at each value takes more time than all else that is done to a payload, and most have a None somewhere."""
    assert may_hold_floats(TypeAdapter(create_model("Payload", held=(kind, ...))).core_schema) is may
