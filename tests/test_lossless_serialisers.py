"""Models of which JSON has all, though there is a None in it, and a set or a float that may look as if it were lost."""

import math
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, SecretStr
from pydantic.alias_generators import to_camel
from sidings import InvalidMessage, InvalidPayload
from sidings.executor import PostgresSettings
from sidings.jobs import Job, Registry
from sidings.kafka import Outbox
from sidings.testing import drain

from .support import ORIGIN, connected, value


class Tag(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str


class Tagged(BaseModel):
    tags: set[Tag]
    remark: str | None = None


class Constants(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")

    cents: float
    remark: str | None = None


class Named(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)

    unit_price: int


class ByAlias(Named):
    model_config = ConfigDict(serialize_by_alias=True)


class Price(BaseModel):
    cents: float | None
    remark: str


@pytest.mark.parametrize("payload", [Tagged(tags={Tag(name="a")})], ids=str)
async def test_a_payload_of_which_json_has_all_is_stored(database: str, payload: Any) -> None:
    """pydantic makes no dict for a set of models; it was "unhashable type: 'dict'" as soon as something was None."""
    registry, got = Registry(), list[Any]()

    @registry.job(payload=type(payload))
    async def bill(job: Job[Any]) -> None:
        got.append(job.payload)

    async with connected(database) as connection, connection.transaction():
        await bill.enqueue(connection, payload, origin=ORIGIN)
    await drain(database, registry)
    assert [one.model_dump_json() for one in got] == [payload.model_dump_json()]


@pytest.mark.parametrize("message", [Tagged(tags={Tag(name="a")}), Constants(cents=math.nan)], ids=str)
async def test_so_is_a_message(database: str, message: BaseModel) -> None:
    outbox = Outbox(PostgresSettings(dsn=database))
    async with connected(database) as connection, connection.transaction():
        await outbox.publish(connection, "prices", key="k", value=message)
    assert await value(database, "SELECT value FROM sidings.outbox") == message.model_dump_json().encode()


async def test_a_message_names_its_fields_as_its_model_says(database: str) -> None:
    outbox = Outbox(PostgresSettings(dsn=database))
    async with connected(database) as connection, connection.transaction():
        for model in (Named, ByAlias):
            await outbox.publish(connection, "prices", key="k", value=model.model_validate({"unitPrice": 1}))
        rows = await connection.fetch("SELECT value FROM sidings.outbox ORDER BY id")
    assert [row["value"] for row in rows] == [b'{"unit_price":1}', b'{"unitPrice":1}']
    await outbox.close()


async def test_a_text_that_reads_nan_hides_no_number_that_is_lost(database: str) -> None:
    outbox = Outbox(PostgresSettings(dsn=database))
    async with connected(database) as connection, connection.transaction():
        with pytest.raises(InvalidMessage, match="NaN or infinite"):
            await outbox.publish(connection, "prices", key="k", value=Price(cents=math.nan, remark="NaN"))
    await outbox.close()


class Login(BaseModel):
    tags: set[Tag]
    token: SecretStr


async def test_a_secret_beside_a_set_of_models_is_refused(database: str) -> None:
    """The handler, and whoever read the message, got asterisks."""
    registry, login = Registry(), Login(tags={Tag(name="a")}, token=SecretStr("4711"))

    @registry.job(payload=Login)
    async def greet(job: Job[Any]) -> None:
        pass

    outbox = Outbox(PostgresSettings(dsn=database))
    async with connected(database) as connection, connection.transaction():
        with pytest.raises(InvalidPayload, match="secret"):
            await greet.enqueue(connection, login, origin=ORIGIN)
        with pytest.raises(InvalidMessage, match="secret"):
            await outbox.publish(connection, "logins", key="k", value=login)
    await outbox.close()
