"""`sidings consumers`: stored offsets, and moving them; pausing a topic."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ActionRefused, Busy, ConfigurationError, PostgresUnavailable
from .command import Because, By, Json, Reason, Yes, command, group
from .consent import ask
from .filters import a_time
from .output import Table, counted, note, print_json, table, words
from .session import Session, whoever_runs_this

if TYPE_CHECKING:
    import asyncpg

    from ..kafka import KafkaSettings, ResetTo

__all__ = ["app", "kafka_settings", "offsets_table"]

app = group("Consumers: stored offsets, and moving them; pause and resume a topic.")

Topic = Annotated[str, typer.Argument(help="The topic.", show_default=False)]


@command(app, "list")
async def list_offsets(
    session: Session,
    topic: Annotated[str | None, typer.Option("--topic", "-t", help="Of this topic.")] = None,
    as_json: Json = False,
) -> None:
    """The next offset of each partition, as Postgres has it, and pauses. Stateless consumers have theirs in Kafka."""
    rows = await session.rows("consumer_offsets", topic)
    if as_json:
        print_json(session, offsets=[dict(row) for row in rows])
    elif rows:
        table(*offsets_table(rows))
    else:
        note("no offsets are stored")


def offsets_table(rows: "Sequence[asyncpg.Record]") -> Table:
    """A row for each partition."""
    return ["topic", "partition", "next offset", "resets", "paused"], [tuple(row) for row in rows]


@command(app, "pause")
async def pause(session: Session, topic: Topic, because: Reason, by: By = None) -> None:
    """No further message of the topic is handled, in any instance; what is under way ends, what comes waits in Kafka.
    Not of stateless consumers, nor of directories."""
    admin = session.admin(by)
    await admin.pause(topic=topic, reason=because)
    typer.echo(f"the topic {topic} is paused")
    try:
        if not await session.rows("consumer_offsets", topic):
            note(
                "no consumer has stored offsets of it so far: if its name is a typing error, or only stateless "
                "consumers and directories read it, resume it; `sidings consumers list` has the names"
            )
        if await admin.jobs(type=f"message:{topic}", limit=1):
            stop = words("sidings", "types", "pause", f"message:{topic}", "--because", because)
            note(f"messages of it wait as jobs, which go on being handled: `{stop}` pauses them, too")
    except (Busy, PostgresUnavailable):  # what it says of changes is not meant of the pause, which stands
        note("whether it has a consumer, and messages that wait as jobs, could not be looked up")


@command(app, "resume")
async def resume(session: Session, topic: Topic, by: By = None, because: Because = None) -> None:
    """End a pause of the topic."""
    await session.admin(by).resume(topic=topic, reason=because)
    typer.echo(f"the topic {topic} goes on")


@command(app, "reset")
async def reset(
    session: Session,
    topic: Topic,
    to: Annotated[str, typer.Option("--to", help="earliest, latest, an offset, 2h (ago), or a time.")],
    partition: Annotated[
        list[int] | None, typer.Option("--partition", "-p", help="Default: all with a stored offset; may be repeated.")
    ] = None,
    kafka: Annotated[str | None, typer.Option("--kafka", envvar="SIDINGS_KAFKA", metavar="HOST:PORT")] = None,
    by: By = None,
    because: Because = None,
    yes: Yes = False,
) -> None:
    """Let a consumer go on from another place, whether instances run or not. Messages from there on are handled again;
    what they enqueue is enqueued again."""
    from ..kafka import reset_offsets
    from ..kafka.reset import handled_statelessly

    settings = kafka_settings(kafka)
    where = _place(to, session)
    if isinstance(where, int) and len(partition or ()) != 1:
        raise ConfigurationError(f"--to {to} is an offset of one partition: give one --partition")
    rows = await session.rows("consumer_offsets", topic)
    if not rows:
        raise ActionRefused(
            f"no consumer has stored offsets of {topic}: `sidings consumers list` has the topics; those of a stateless "
            "consumer are in Kafka, reset the group there"
        )
    stored = {row["partition"] for row in rows}
    if missing := set(partition or ()) - stored:
        named = ", ".join(f"{topic}/{number}" for number in sorted(missing))
        raise ActionRefused(f"there is no stored offset of {named}: nothing was done")
    chosen = set(partition or ()) or await _those_of_kafka(settings, topic, stored)
    group = settings.group or session.service
    if stateless := await handled_statelessly(settings, group, topic, chosen):
        named = ", ".join(f"{topic}/{number}" for number in sorted(stateless))
        raise ActionRefused(
            f"the offsets of {named} are in Kafka, since a stateless consumer has handled these last: reset the group "
            "there. If it is to be an ordinary one again, start that first, or call its service.reset_offsets: nothing "
            "was done"
        )
    meant = [row for row in rows if row["partition"] in chosen]
    table(*offsets_table(meant))
    ask(f"let the consumer of {topic} go on from {to} in {counted(len(meant), 'partition')}", yes=yes)
    done = await reset_offsets(
        settings,
        session.settings,
        group,
        topic,
        where,
        partitions=chosen,  # and no others, which nobody was asked about
        actor=by or whoever_runs_this(),
        reason=because,
    )
    for one in done:
        cancelled = f"; {one.cancelled} jobs cancelled, whose messages are delivered again" if one.cancelled else ""
        typer.echo(f"{topic}/{one.partition}: from {one.before} to {one.offset}{cancelled}")


async def _those_of_kafka(settings: "KafkaSettings", topic: str, stored: set[int]) -> set[int]:
    """Where no partition is named: those that Kafka still has. A topic that was made anew may have fewer."""
    from ..kafka.reset import existing_partitions

    there = stored & await existing_partitions(settings, topic)
    if not there:
        raise ActionRefused(f"Kafka has no partition of {topic} with a stored offset: nothing was done")
    if gone := stored - there:
        named = ", ".join(f"{topic}/{number}" for number in sorted(gone))
        note(f"left as they are: {named}, which Kafka does not have")
    return there


def kafka_settings(bootstrap: str | None) -> "KafkaSettings":
    """What the option says, else the environment, as for ``Service.from_env``."""
    from ..kafka import KafkaSettings
    from ..kafka.environment import environment

    if not bootstrap:
        raise ConfigurationError("no Kafka is named: give --kafka host:port, or set SIDINGS_KAFKA")
    given = environment(without=("postgres", "executor")).get("kafka")
    if isinstance(given, KafkaSettings) and given.bootstrap == bootstrap:
        return given
    return KafkaSettings(bootstrap=bootstrap)


def _place(to: str, session: Session) -> "ResetTo":
    match to:
        case "earliest" | "latest":
            return to
        case _ if to.isdecimal() and len(to) <= 19:
            return int(to)
        case _:
            time = a_time("--to", to, session.now)
            assert time is not None
            return time
