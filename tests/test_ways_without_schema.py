"""Storing jobs and messages where the schema is missing or old: every kind of connection tells what to do."""

from importlib import import_module
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel
from sidings import Job, PostgresSettings, Registry, SchemaMissing, SchemaTooOld
from sidings.kafka import Outbox
from sidings.schema import migrate, migrations

from .support import ORIGIN, connected
from .ways import WAYS, opened


class Ride(BaseModel):
    transport: str


def declare(**options: Any) -> Any:
    async def ride(job: Job[Ride]) -> None: ...

    return Registry().job(group="transport", **options)(ride)


async def migrated_to(dsn: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema as a release would leave it that had so many migrations."""
    with monkeypatch.context() as patched:
        patched.setattr(import_module("sidings.schema.migrate"), "migrations", lambda: migrations()[:count])
        await migrate(dsn, service="test")


@pytest.mark.parametrize("name", WAYS)
async def test_a_database_without_the_schema_is_told_of_with_the_remedy(empty_database: str, name: str):
    ride = declare()
    outbox = Outbox(PostgresSettings(dsn=empty_database))
    async with opened(name, empty_database) as way:
        for attempt in (
            lambda: way.enqueue(ride, Ride(transport="a"), origin=ORIGIN),
            lambda: way.enqueue_many(ride, [Ride(transport="a")], origin=ORIGIN),
            lambda: way.withdraw(ride, 1),
            lambda: way.publish(outbox, "etas", key="a", value=b"x"),
            lambda: way.publish_many(outbox, "etas", [("a", b"x")]),
        ):
            await way.begin()
            with pytest.raises(
                SchemaMissing, match=r"no schema 'sidings'.*service.migrate\(\).*python -m sidings.schema"
            ):
                await attempt()
            await way.end("ROLLBACK")


@pytest.mark.parametrize("name", WAYS)
async def test_a_schema_of_an_earlier_release_is_told_of(
    empty_database: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    await migrated_to(empty_database, 2, monkeypatch)  # without homes, unique keys, and the outbox
    outbox = Outbox(PostgresSettings(dsn=empty_database))
    at_home, ride = declare(home="positions"), declare()
    async with opened(name, empty_database) as way:
        for error, attempt in (
            (SchemaTooOld, lambda: way.enqueue(at_home, Ride(transport="a"))),
            (SchemaTooOld, lambda: way.enqueue(ride, Ride(transport="a"), origin=ORIGIN, unique_key="a")),
            (SchemaTooOld, lambda: way.withdraw(ride, unique_key="a")),
            (SchemaMissing, lambda: way.publish(outbox, "etas", key="a", value=b"x")),
        ):
            await way.begin()
            with pytest.raises(
                error, match=r"'sidings'.* (older than this|of an earlier) release.*service.migrate\(\)"
            ):
                await attempt()
            await way.end("ROLLBACK")


async def test_a_column_that_is_not_there_yet_is_told_of(database: str):
    async with connected(database) as connection:
        await connection.execute("ALTER TABLE sidings.job RENAME policy TO of_another_release")
        with pytest.raises(SchemaTooOld, match=r"'sidings' is older .*\(column \"policy\".*service.migrate\(\)"):
            async with connection.transaction():
                await declare().enqueue(connection, Ride(transport="a"), origin=ORIGIN)


async def test_what_a_trigger_of_the_users_lacks_is_not_taken_for_the_schema(database: str):
    ride = declare()
    async with connected(database) as connection:
        await connection.execute(
            "CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN INSERT INTO notes VALUES (NEW.id); RETURN NEW; END $$;"
            "CREATE TRIGGER noted AFTER INSERT ON sidings.job FOR EACH ROW EXECUTE FUNCTION noted()"
        )
        with pytest.raises(asyncpg.UndefinedTableError, match="notes"):
            async with connection.transaction():
                await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
