"""The tree of commands."""

from typing import Annotated

import typer

from . import audit, consumers, dev, groups, job_actions, job_types, migrations, origins, outbox, status, web

__all__ = ["app"]

app = typer.Typer(
    name="sidings",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"sidings {version('sidings')}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction] - typer calls it
    _: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Look after a service's jobs, groups, origins and outbox.

    The database: --postgres or SIDINGS_POSTGRES, as for the service.
    """


status.add_to(app)
web.add_to(app)
app.add_typer(job_actions.app, name="jobs")
app.add_typer(groups.app, name="groups")
app.add_typer(job_types.app, name="types")
app.add_typer(origins.app, name="origins")
audit.add_to(app)
app.add_typer(outbox.app, name="outbox")
app.add_typer(consumers.app, name="consumers")
app.add_typer(migrations.app, name="migrate")
app.add_typer(dev.app, name="dev")
