"""`sidings migrate`: the state of the schema, and bringing it up to this release."""

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigurationError, SchemaError, SchemaMissing, SchemaTooOld
from .command import Code, Json, command, group
from .output import age, note, print_json, table
from .session import Session, open_session

if TYPE_CHECKING:
    from ..executor import PostgresSettings

__all__ = ["app"]

app = group("The schema: what is applied, and bringing it up to this release.")


@command(app, "status", checked=False)
async def status(session: Session, as_json: Json = False) -> None:
    """The migrations that are applied and that are missing; exit code 4 if the schema is not that of this release."""
    from ..schema import check, migrations

    applied = {row["version"]: row for row in await session.rows("applied_migrations")}
    missing = [f"{m.version:04}_{m.name}" for m in migrations() if m.version not in applied]
    problem: str | None = None
    try:
        await check(session.connection, service=session.service, schema=session.settings.schema_name)
    except SchemaTooOld:
        problem = "migrations are missing: run `sidings migrate apply`, then roll the instances"
    except SchemaError as error:
        problem = str(error)
    if as_json:
        names = {"service": session.service, "schema": session.settings.schema_name}
        print_json(session, **names, applied=[dict(row) for row in applied.values()], missing=missing, problem=problem)
    else:
        typer.echo(f"service {session.service}, schema {session.settings.schema_name} at {session.where}")
        rows = [(f"{row['version']:04}", row["name"], age(row["applied_at"], session.now)) for row in applied.values()]
        table(["version", "name", "applied ago"], [*rows, *((name[:4], name[5:], "missing") for name in missing)])
        note(problem or "the schema is up to date")
    raise typer.Exit(Code.ATTENTION if problem else Code.DONE)


@command(app, "apply", connects=False)
async def apply(
    settings: "PostgresSettings",
    service: Annotated[
        str | None, typer.Option("--service", help="Whose schema it is. Needed the first time.", metavar="NAME")
    ] = None,
) -> None:
    """Apply the migrations that are missing. Safe when many do it at once; run it before the instances are rolled."""
    import logging

    from ..schema import migrate

    try:
        async with open_session(settings, checked=False) as session:
            owner = session.service if service is None else service
    except SchemaMissing:
        if service is None:
            raise ConfigurationError(
                f"the schema {settings.schema_name!r} does not exist yet: give --service NAME, to which it will belong"
            ) from None
        owner = service
    log, handler = logging.getLogger("sidings.schema"), logging.StreamHandler()
    log.addHandler(handler)  # it says whose locks it waits for
    try:
        applied = await migrate(settings.dsn, service=owner, schema=settings.schema_name, password=settings.secret())
    finally:
        log.removeHandler(handler)
    for migration in applied:
        typer.echo(f"applied {migration.version:04}_{migration.name}")
    typer.echo(f"the schema {settings.schema_name!r} of the service {owner!r} is up to date")
