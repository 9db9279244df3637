"""`sidings dev`: a Postgres and a Kafka on this machine."""

from typing import Annotated

import typer

from .command import fail, group

__all__ = ["app"]

app = group("A real Postgres and a real Kafka on this machine, to develop and test against.")

Server = Annotated[str, typer.Argument(help="postgres, kafka, kafka-2 (one broker), or all.")]
Directory = Annotated[
    str | None,
    typer.Option("--directory", help="Default: $SIDINGS_DEVSTACK_HOME, else .sidings-devstack.", metavar="PATH"),
]


@app.command()
def up(
    brokers: Annotated[int, typer.Option("--brokers", help="Kafka brokers; fixed at the first start.", min=1)] = 1,
    secure: Annotated[
        bool, typer.Option("--secure", help="A SASL_SSL listener too; fixed at the first start.")
    ] = False,
    directory: Directory = None,
) -> None:
    """Start what does not run, and print two lines for a shell: eval "$(sidings dev up)"."""
    _devstack(directory, "up", "--brokers", str(brokers), *(["--secure"] if secure else []))


@app.command()
def topic(
    name: Annotated[str, typer.Argument(help="Its name.")],
    partitions: Annotated[int, typer.Option("--partitions", min=1)] = 3,
    compacted: Annotated[bool, typer.Option("--compacted", help="Keep the last message of each key.")] = False,
    directory: Directory = None,
) -> None:
    """Make a topic; Kafka makes none by itself here."""
    _devstack(directory, "topic", "--partitions", str(partitions), *(["--compacted"] if compacted else []), "--", name)


@app.command()
def down(
    delete: Annotated[bool, typer.Option("--delete", help="Kill them and delete their data.")] = False,
    directory: Directory = None,
) -> None:
    """Stop both; their data stays."""
    _devstack(directory, "down", *(["--delete"] if delete else []))


@app.command()
def status(directory: Directory = None) -> None:
    """What runs where; exit code 1 when not all run."""
    _devstack(directory, "status")


@app.command()
def logs(
    server: Server = "all",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1)] = 40,
    directory: Directory = None,
) -> None:
    """The last lines of the servers' logs."""
    _devstack(directory, "logs", "--lines", str(lines), server)


@app.command()
def restart(server: Server = "all", directory: Directory = None) -> None:
    """Stop cleanly and start again."""
    _devstack(directory, "restart", server)


@app.command()
def kill(server: Server = "all", directory: Directory = None) -> None:
    """SIGKILL, as when the power fails."""
    _devstack(directory, "kill", server)


@app.command()
def pause(server: Server = "all", directory: Directory = None) -> None:
    """SIGSTOP: connections stay open, nothing answers."""
    _devstack(directory, "pause", server)


@app.command()
def resume(server: Server = "all", directory: Directory = None) -> None:
    """SIGCONT."""
    _devstack(directory, "resume", server)


@app.command()
def fetch(
    spark: Annotated[bool, typer.Option("--spark", help="Spark's connectors to Kafka and Postgres too.")] = False,
    directory: Directory = None,
) -> None:
    """Fetch Kafka's jars into the cache, if they are not there yet."""
    _devstack(directory, "fetch", *(["--spark"] if spark else []))


def _devstack(directory: str | None, *arguments: str) -> None:
    """The devstack's own command line does it; it is imported only here, since production does not install it."""
    try:
        from ..devstack.__main__ import main
    except ModuleNotFoundError as error:
        fail(f"the devstack needs {error.name}: pip install 'sidings[devstack]'")
    raise typer.Exit(main([*(["--directory", directory] if directory is not None else []), *arguments]))
