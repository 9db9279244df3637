"""`sidings outbox`: what waits for the relays, what fails, and what is parked."""

import codecs
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigurationError
from .command import LAST_ID, Because, By, Json, Limit, Yes, command, fail, group, once
from .consent import ask
from .output import Table, age, counted, document, note, print_json, table, until
from .session import Session, whoever_runs_this

if TYPE_CHECKING:
    import asyncpg

    from ..kafka.outbox.publish import FailingTopic

__all__ = ["OutboxTopic", "app", "parked_rows", "parked_table", "print_topics", "topics", "topics_table"]

app = group("The outbox: what waits, fails or is parked, by topic; retry, release, discard.")

Topic = Annotated[str | None, typer.Option("--topic", "-t", help="Of this topic.", metavar="TOPIC")]
Ids = Annotated[list[int] | None, typer.Argument(help="Their numbers.", show_default=False, max=LAST_ID, callback=once)]


@dataclass(frozen=True, slots=True)
class OutboxTopic:
    """What the outbox has for one topic. oldest: when the oldest waiting message was published."""

    topic: str
    waiting: int
    oldest: datetime | None
    parked: int
    failing: "FailingTopic | None"


@command(app, "list")
async def list_topics(session: Session, as_json: Json = False) -> None:
    """Topics for which messages wait, are parked, or cannot be sent now. Reads all of the outbox."""
    found = await topics(session)
    if as_json:
        print_json(session, topics=found)
    elif found:
        print_topics(session, found)
    else:
        note("the outbox is empty")


@command(app, "parked")
async def parked(
    session: Session,
    topic: Topic = None,
    limit: Limit = 100,
    after: Annotated[int, typer.Option("--after", help="The next page: after this id.", min=0, max=LAST_ID)] = 0,
    as_json: Json = False,
) -> None:
    """Messages that Kafka refused, the oldest first, with the reason."""
    if as_json:
        async with session.outbox() as outbox:
            messages = await outbox.parked(topic, after=after, limit=limit)
        print_json(session, messages=messages, next=messages[-1].id if len(messages) == limit else None)
        return
    found = await parked_rows(session, topic, after=after, limit=limit)
    _print_parked(session, found)
    if len(found) == limit:
        note(f"there may be more: add --after {found[-1]['id']}")


@command(app, "retry")
async def retry(
    session: Session,
    topic: Annotated[str, typer.Argument(help="The topic.", show_default=False)],
    by: By = None,
    because: Because = None,
) -> None:
    """Try a failing topic again now, instead of when its backoff ends."""
    async with session.outbox() as outbox:
        if not await outbox.retry(topic, actor=by or whoever_runs_this(), reason=because):
            fail(f"the topic {topic} is not failing: `sidings outbox list` says which are")
    typer.echo(f"{topic}: the relays try it again now")


@command(app, "release")
async def release(
    session: Session, ids: Ids = None, topic: Topic = None, by: By = None, because: Because = None, yes: Yes = False
) -> None:
    """Send parked messages again, as new ones, behind all that waits."""
    chosen = await _choose(session, "send", ids, topic, yes)
    async with session.outbox() as outbox:
        done = await outbox.release(topic, ids=chosen, actor=by or whoever_runs_this(), reason=because)
    _say("released", ids, done)


@command(app, "discard")
async def discard(
    session: Session, ids: Ids = None, topic: Topic = None, by: By = None, because: Because = None, yes: Yes = False
) -> None:
    """Delete parked messages for good."""
    chosen = await _choose(session, "delete for good", ids, topic, yes)
    async with session.outbox() as outbox:
        done = await outbox.discard(topic, ids=chosen, actor=by or whoever_runs_this(), reason=because)
    _say("discarded", ids, done)


async def _choose(
    session: Session, verb: str, ids: Sequence[int] | None, topic: str | None, yes: bool
) -> Sequence[int]:
    """The messages that are meant. It is asked, unless a single one that is named is to be sent."""
    if not ids and topic is None:
        raise ConfigurationError("say which messages: give their numbers, or --topic")
    if ids:
        if len(ids) > 1 or verb != "send":
            ask(f"{verb} {counted(len(ids), 'parked message')}", yes=yes)
        return ids
    _print_parked(session, await parked_rows(session, topic, limit=10))
    # Each by its number, and no bound: numbers are given before a message waits, and any of them may be parked next.
    parked_now = [row["id"] for row in await session.rows("parked_ids", topic)]
    if not parked_now:
        fail(f"no message for {topic} is parked: nothing was done")
    ask(f"{verb} {counted(len(parked_now), 'parked message')} for {topic}", yes=yes)
    return parked_now


def _say(done: str, named: Sequence[int] | None, ids: Sequence[int]) -> None:
    for id in ids:
        typer.echo(f"message {id}: {done}")
    if missing := sorted(set(named or ()) - set(ids)):
        fail(f"no such parked message: {', '.join(map(str, missing))}")


async def topics(session: Session) -> list[OutboxTopic]:
    """One row for each topic; those that cannot be sent to with the error of the relay that has failed longest."""
    from ..kafka import outbox

    counted = {row["topic"]: row for row in await session.rows("outbox_topics")}
    # As Outbox.failing() asks, which would open a connection of its own, for each page too.
    found = await session.rows("failing_topics", package=outbox.__name__)
    failing = {row["topic"]: outbox.FailingTopic(**dict(row)) for row in reversed(found)}
    return [
        OutboxTopic(topic, row["waiting"], row["oldest"], row["parked"], failing.get(topic))
        if (row := counted.get(topic))
        else OutboxTopic(topic, 0, None, 0, failing.get(topic))
        for topic in sorted({*counted, *failing})
    ]


def print_topics(session: Session, found: Sequence[OutboxTopic]) -> None:
    """A table of them."""
    table(*topics_table(found, session.now))


def topics_table(found: Sequence[OutboxTopic], now: datetime) -> Table:
    """A row for each."""
    rows = [
        (
            row.topic,
            row.waiting or None,
            age(row.oldest, now),
            row.parked or None,
            row.failing and until(row.failing.retry_at, now),
            row.failing and row.failing.error,
        )
        for row in found
    ]
    return ["topic", "waiting", "oldest", "parked", "next try in", "error"], rows


def _print_parked(session: Session, found: "Sequence[asyncpg.Record]") -> None:
    table(*parked_table(found, session.now)) if found else note("no parked messages")


async def parked_rows(session: Session, topic: str | None, *, after: int = 0, limit: int) -> "list[asyncpg.Record]":
    """Parked messages without what only --json shows: a page of them may hold hundreds of megabytes."""
    return await session.rows("parked_rows", topic, after, limit)


def parked_table(found: "Sequence[asyncpg.Record]", now: datetime) -> Table:
    """A row for each of `parked_rows`."""
    columns = ["id", "topic", "key", "bytes", "published ago", "parked ago", "error"]
    rows = [
        (
            row["id"],
            row["topic"],
            _key(row["key"], goes_on=row["key_goes_on"]),
            row["bytes"] or 0,
            age(row["published_at"], now),
            age(row["parked_at"], now),
            row["error"],
        )
        for row in found
    ]
    return columns, rows


def _key(beginning: bytes | None, *, goes_on: bool) -> str | None:
    if not goes_on or beginning is None:
        return document(beginning)
    with suppress(UnicodeDecodeError):  # not of a character that is cut off
        beginning = codecs.getincrementaldecoder("utf-8")().decode(beginning).encode()
    return f"{document(beginning)}…"
