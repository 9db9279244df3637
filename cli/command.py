"""What all commands share: how they are declared, connect, fail and end."""

import functools
import inspect
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from ..errors import ConfigurationError, KafkaUnavailable, PostgresUnavailable, SidingsError
from .output import note, plain
from .session import open_session, postgres_settings

__all__ = [
    "LAST_ID",
    "Because",
    "By",
    "Code",
    "Json",
    "Limit",
    "Reason",
    "Yes",
    "command",
    "fail",
    "group",
    "once",
    "run_guarded",
]

P = ParamSpec("P")

LAST_ID = 2**63 - 1  # that Postgres has


class Code(IntEnum):
    """Exit codes, see docs/cli.md."""

    DONE = 0
    FAILED = 1  # refused or failed; the message says whether something has changed
    USAGE = 2  # typer's own
    UNAVAILABLE = 3  # Postgres or Kafka did not answer
    ATTENTION = 4  # `status`, `migrate status`: something needs a person


Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Needed where there is no terminal.")]
By = Annotated[
    str | None,
    typer.Option("--by", envvar="SIDINGS_BY", help="Who does it, for the audit. Default: user@host.", metavar="NAME"),
]
Because = Annotated[str | None, typer.Option("--because", help="Why, for the audit.", metavar="TEXT")]
Reason = Annotated[str, typer.Option("--because", help="Why: whoever wonders reads it.", metavar="TEXT")]

_PANEL = "Connection"
_Postgres = Annotated[
    str | None,
    typer.Option(
        "--postgres", envvar="SIDINGS_POSTGRES", help="The service's database.", metavar="DSN", rich_help_panel=_PANEL
    ),
]
_Schema = Annotated[
    str | None,
    typer.Option(
        "--schema",
        envvar="SIDINGS_SCHEMA",
        help="Where Sidings' tables live. Default: sidings.",
        metavar="NAME",
        rich_help_panel=_PANEL,
    ),
]


def once(ids: list[int] | None) -> list[int] | None:
    """Each of the numbers once, in their order: what is done to many is asked about, with their count."""
    return ids and list(dict.fromkeys(ids))


def group(help: str) -> typer.Typer:
    """A group of commands."""
    return typer.Typer(help=help, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")


def command(
    app: typer.Typer, name: str, *, connects: bool = True, checked: bool = True
) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, Coroutine[Any, Any, None]]]:
    """Declare a coroutine function as a command. Its docstring is the help; its first parameter is the `Session`.

    It gets the options --postgres and --schema. What it raises becomes one line on stderr and an exit code.
    connects: False: its first parameter is the `PostgresSettings`, and nothing is opened. checked: see `open_session`.
    """

    def declare(function: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, Coroutine[Any, Any, None]]:
        @functools.wraps(function)
        def run(*, postgres: str | None, schema: str | None, **values: Any) -> None:
            async def work() -> None:
                settings = postgres_settings(postgres, schema)
                if not connects:
                    await function(settings, **values)  # pyright: ignore[reportCallIssue] - its first parameter
                    return
                async with open_session(settings, checked=checked) as session:
                    if session.standby:
                        note(session.standby)
                    await function(session, **values)  # pyright: ignore[reportCallIssue]

            run_guarded(work())

        run.__annotations__ = {}  # they came with `wraps`; those of the signature count, without the first parameter's
        own = list(inspect.signature(function).parameters.values())[1:]
        shared = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for option, annotation in (("postgres", _Postgres), ("schema", _Schema))
        ]
        keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        run.__signature__ = inspect.Signature([*keyword, *shared])  # pyright: ignore[reportAttributeAccessIssue]
        app.command(name, help=" ".join((function.__doc__ or "").split()))(run)
        return function

    return declare


def run_guarded(work: Coroutine[Any, Any, None]) -> None:
    """Run it; expected errors end the process with one line and a code, without a traceback."""
    import asyncio
    import logging

    import asyncpg

    logging.basicConfig(handlers=[logging.NullHandler()])  # what libraries log beside an error is none of the output
    try:
        asyncio.run(work)
    except ConfigurationError as error:
        fail(error, Code.USAGE)
    except (PostgresUnavailable, KafkaUnavailable) as error:
        fail(error, Code.UNAVAILABLE)
    except SidingsError as error:
        fail(error)
    except asyncpg.InsufficientPrivilegeError as error:
        fail(f"{error}: use the role that owns the schema, or give this one the rights that docs/operations.md names")
    except asyncpg.PostgresError as error:
        fail(f"Postgres: {error}")


def fail(error: object, code: Code = Code.FAILED) -> NoReturn:
    """Say what is wrong, in one line, and exit."""
    typer.echo(f"error: {plain(' '.join(str(error).split()))}", err=True)
    raise typer.Exit(code)
