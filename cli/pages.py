"""What the commands show, as pages for a browser: `sidings web` serves them, and an ASGI application can mount them.

They only look. Who acts has to have a name, for the audit, and a page without a login knows none; so each page says the
command that goes on from there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

import asyncpg

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    message = f"the pages need {error.name}: pip install 'sidings[web]'"
    raise ModuleNotFoundError(message, name=error.name) from None

from ..errors import ActionRefused, ConfigurationError, JobNotFound, PostgresUnavailable, SidingsError
from ..executor import PostgresSettings
from ..jobs.admin import JobState
from . import audit, consumers, groups, job_details, jobs, origins, outbox, status
from .filters import a_state, a_time, check_group, check_words, outcome_names
from .job_types import types_table
from .output import STYLES, Table, plain, words
from .session import Session, open_session

__all__ = ["pages"]

_ROWS = 100  # of a list, on one page
_AT_ONCE = 2  # pages that are being made; others wait, so that a hundred tabs take no more connections
_REFRESH_SECONDS = 10
_TEXT = 200_000  # characters of a payload; a browser is slow with megabytes

Row = Mapping[str, object]
Link = Callable[[Row], str | None]


@dataclass(frozen=True, slots=True)
class Cell:
    """text: None where there is nothing. href: where it leads, from the pages' root. style: the style sheet's class."""

    text: str | None
    href: str | None = None
    style: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page: a table, where there is nothing to show `empty`; or a text. more: the address of the next
    page of the list. act: commands that go on from here."""

    title: str | None = None
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    empty: str = "None."
    text: str | None = None
    more: str | None = None
    act: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """problems: what needs a person, each with the page that has more. filters: names of fields, and what they hold."""

    title: str
    sections: Sequence[Section]
    lead: str | None = None
    problems: Sequence[Cell] = ()
    filters: Mapping[str, str] | None = None


def pages(settings: PostgresSettings) -> Starlette:
    """An ASGI application that shows what a service's database holds: status, jobs, groups, origins, outbox, offsets,
    audit.

    Each page opens a connection and closes it again; nothing is kept, and nothing is changed. There is no login, and
    payloads are shown: mount it behind what keeps strangers away, or use `sidings web`, which listens on this machine
    only. What goes wrong is said on the page, with the status 400 (a filter), 404 (no such job), 503 (Postgres).
    """
    environment = Environment(
        loader=PackageLoader(__package__ or "", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    template = environment.get_template("pages.html.j2")
    gate = asyncio.Semaphore(_AT_ONCE)

    def route(path: str, make: Callable[[Session, Request], Awaitable[Page]]) -> Route:
        async def endpoint(request: Request) -> Response:
            session: Session | None = None
            code = 200
            try:
                async with gate, open_session(settings) as session:
                    page = await make(session, request)
            except (SidingsError, asyncpg.PostgresError) as error:
                code, page = _code(error), Page("Sorry", [Section(text=plain(str(error)))])
            refresh = "refresh" in request.query_params
            text = template.render(
                page=page,
                session=session,
                root=str(request.scope.get("root_path", "")),
                at=request.scope["path"],
                refresh=_REFRESH_SECONDS if refresh else None,
                turn=_address("", {**request.query_params, "refresh": None if refresh else "on"}) or "?",
            )
            return HTMLResponse(text, code, _HEADERS)

        return Route(path, endpoint)

    return Starlette(
        routes=[
            route("/", _overview),
            route("/jobs", _jobs),
            route("/jobs/{id}", _job),
            route("/groups", _groups),
            route("/origins", _origins),
            route("/ended", _ended),
            route("/outbox", _outbox),
            route("/consumers", _consumers),
            route("/audit", _audit),
        ]
    )


_HEADERS = {
    "Cache-Control": "no-store",  # payloads
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _code(error: Exception) -> int:
    match error:
        case ConfigurationError() | ActionRefused() | asyncpg.DataError():
            return 400
        case JobNotFound():
            return 404
        case PostgresUnavailable():
            return 503
        case _:
            return 500


# -- the pages ------------------------------------------------------------------------------------------------------


async def _overview(session: Session, request: Request) -> Page:
    now, seen = session.now, await status.look(session)
    sections = [_section("Jobs", types_table(seen.types, now), _OF_TYPES, empty="No jobs.")]
    if seen.blocked_groups:
        found = await session.admin().blocked_groups(limit=10)
        sections.append(_section("Groups behind a head that fails", groups.groups_table(found, now), more="/groups"))
    if seen.pauses:
        sections.append(_section("Paused", audit.pauses_table(seen.pauses, now)))
    if seen.outbox:
        sections.append(_section("Outbox", outbox.topics_table(seen.outbox, now), _OF_OUTBOX))
    sections.append(_section("Executors", status.executors_table(seen.executors, now), empty="None holds an origin."))
    problems = [Cell(problem, _page_of(problem)) for problem in seen.problems]
    return Page("Status", sections, lead=seen.holders, problems=problems)


async def _jobs(session: Session, request: Request) -> Page:
    asked = _asked(request, "state", "type", "origin", "group")
    check_group(asked["origin"], asked["group"])
    wanted = {**asked, "state": a_state(asked["state"])}
    found = await session.admin().jobs(**wanted, limit=_ROWS, after=_one(request, "after"))
    more = _address("/jobs", {**asked, "after": found[-1].cursor}) if len(found) == _ROWS else None
    act = [_release(asked["origin"] or "", asked["group"])] if asked["group"] else []
    section = _section(None, jobs.jobs_table(found, session.now), _OF_JOBS, more=more, act=act)
    return Page("Jobs", [section], filters=_filled(asked))


async def _job(session: Session, request: Request) -> Page:
    details = await session.admin().show(_number("job", request.path_params["id"], "a job"))
    now, row = session.now, details.row
    known = [(name, str(value)) for name, value in job_details.facts(details, now).items()]
    known += [("paused", job_details.pause_text(pause)) for pause in details.pauses]
    known += [("header", f"{name}={value}") for name, value in details.headers.items()]
    of_it = {"type": row.type, "origin": row.origin, "group": row.group} if row else {}
    cells = [
        [Cell(name), Cell(plain(text), link({**of_it, name: text}) if (link := _LINKS.get(name)) else None)]
        for name, text in known
    ]
    sections = [Section(columns=("", ""), rows=cells, act=_acts(details.id, row and row.state))]
    if details.payload is not None:
        sections.append(Section("Payload", text=_begun(details.payload)))
    if details.attempts:
        sections.append(_section("Attempts", job_details.attempts_table(details.attempts, now), {}))
    if details.actions:
        sections.append(_section("What people did", job_details.actions_table(details.actions, now), {}))
    return Page(f"Job {details.id}", sections)


def _begun(payload: str) -> str:
    """As much of it as a page holds. No more than that is made of it: others wait for the event loop."""
    text = "\n".join(job_details.payload_lines(payload, _TEXT + 1))
    more = f"\n… and more of its {len(payload):,} characters, which `sidings jobs show` has"
    return text if len(text) <= _TEXT else text[:_TEXT] + more


def _acts(id: int, state: JobState | None) -> list[str]:
    """The commands that fit a job's state; None: it has ended."""
    match state:
        case None:
            verbs = ["requeue"]
        case JobState.HELD:
            verbs = ["release", "discard"]
        case JobState.BACKING_OFF | JobState.BLOCKED | JobState.DELAYED:
            verbs = ["retry", "cancel", "discard"]
        case _:
            verbs = ["cancel", "discard"]
    return [f"sidings jobs {verb} {id}" for verb in verbs]


def _release(origin: str, group: str) -> str:
    dashes = ["--"] if origin.startswith("-") or group.startswith("-") else []  # else it would be taken for an option
    return words("sidings", "groups", "release", *dashes, origin, group)


async def _groups(session: Session, request: Request) -> Page:
    asked = _asked(request, "origin")
    found = await session.admin().blocked_groups(origin=asked["origin"], limit=_ROWS)
    section = _section(
        None,
        groups.groups_table(found, session.now),
        empty="No group is blocked.",
        act=["sidings groups release ORIGIN GROUP", "sidings groups skip ORIGIN GROUP --head JOB"] if found else (),
    )
    lead = f"These are the first {_ROWS}; there may be more, which `{_all_groups(asked['origin'])}` has"
    return Page(
        "Groups that wait for their head",
        [section],
        lead=lead if len(found) == _ROWS else None,
        filters=_filled(asked),
    )


def _all_groups(origin: str | None) -> str:
    return words("sidings", "groups", "list", *(["--origin", origin] if origin else []), "--limit", "10000")


async def _origins(session: Session, request: Request) -> Page:
    found = origins.in_order(await session.admin().origins())
    nobody = "None: no executor has run, and no job waits."
    return Page("Origins", [_section(None, origins.origins_table(found, session.now), _OF_ORIGINS, empty=nobody)])


async def _ended(session: Session, request: Request) -> Page:
    asked = _asked(request, "outcome", "type", "origin", "since")
    outcomes = [asked["outcome"]] if asked["outcome"] else None
    check_words("outcome", outcomes, [*outcome_names(), "succeeded"])
    found = await session.admin().ended(
        outcomes=outcomes or outcome_names(),
        since=a_time("since", asked["since"] or "24h", session.now),
        before=a_time("before", _one(request, "before"), session.now),
        type=asked["type"],
        origin=asked["origin"],
        limit=_ROWS,
    )
    more = _address("/ended", {**asked, "before": found[-1].finished_at.isoformat()}) if len(found) >= _ROWS else None
    section = _section(None, jobs.ended_table(found, session.now), _OF_JOBS, more=more)
    filters = _filled({**asked, "since": asked["since"] or "24h"})
    return Page("Jobs that ended without success", [section], filters=filters)


async def _outbox(session: Session, request: Request) -> Page:
    asked, now = _asked(request, "topic"), session.now
    after = _number("after", _one(request, "after") or "0", "a message")
    parked = await outbox.parked_rows(session, asked["topic"], after=after, limit=_ROWS)
    more = _address("/outbox", {**asked, "after": str(parked[-1]["id"])}) if len(parked) == _ROWS else None
    found = await outbox.topics(session)
    return Page(
        "Outbox",
        [
            _section("Topics", outbox.topics_table(found, now), _OF_OUTBOX, empty="The outbox is empty."),
            _section(
                "Parked messages",
                outbox.parked_table(parked, now),
                _OF_OUTBOX,
                more=more,
                act=["sidings outbox release ID", "sidings outbox discard ID"] if parked else (),
            ),
        ],
        filters=_filled(asked),
    )


async def _consumers(session: Session, request: Request) -> Page:
    rows = await session.rows("consumer_offsets", None)
    nothing = "No offsets are stored; those of stateless consumers are in Kafka."
    return Page("Consumers' next offsets", [_section(None, consumers.offsets_table(rows), {}, empty=nothing)])


async def _audit(session: Session, request: Request) -> Page:
    asked = _asked(request, "by", "action")
    before = _one(request, "before")
    admin = session.admin()
    rows = await admin.audit(
        limit=_ROWS,
        before=None if before is None else _number("before", before, "an entry"),
        actor=asked["by"],
        action=asked["action"],
    )
    more = _address("/audit", {**asked, "before": str(rows[-1].id)}) if len(rows) == _ROWS else None
    paused = audit.pauses_table(await admin.pauses(), session.now)
    done = audit.audit_table(rows, session.now)
    return Page(
        "What people and programs did",
        [
            _section("Paused now", paused, empty="Nothing."),
            _section("Audit", done, {}, empty="Nothing was done.", more=more),
        ],
        filters=_filled(asked),
    )


# -- links ----------------------------------------------------------------------------------------------------------


def _asked(request: Request, *names: str) -> dict[str, str | None]:
    return {name: _one(request, name) for name in names}


def _one(request: Request, name: str) -> str | None:
    return request.query_params.get(name) or None  # a form sends what was left empty, too


def _number(name: str, text: str, of: str) -> int:
    try:
        return int(text)
    except ValueError:  # so says Python of more than 4,300 digits, too
        raise ConfigurationError(f"{name} {text[:40]!r}: give the id of {of}") from None


def _filled(asked: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value or "" for name, value in asked.items()}


def _address(path: str, query: Mapping[str, object]) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _job_page(column: str) -> Link:
    return lambda row: f"/jobs/{row[column]}" if row[column] else None


def _jobs_page(*columns: str, **given: str) -> Link:
    """The jobs that are alike in these columns; nowhere, where one of them is empty."""

    def link(row: Row) -> str | None:
        values = {name: row.get(name) for name in columns}
        return _address("/jobs", {**given, **values}) if all(values.values()) else None

    return link


def _groups_of(row: Row) -> str | None:
    return _address("/groups", {"origin": row["origin"]}) if row["groups"] else None


_LINKS: dict[str, Link] = {
    "job": _job_page("job"),
    "type": _jobs_page("type"),
    "origin": _jobs_page("origin"),
    "group": _jobs_page("origin", "group"),
}
_OF_JOBS = _LINKS | {"id": _job_page("id")}
_OF_TYPES = _LINKS | {state.value: _jobs_page("type", state=state.value) for state in JobState}
_OF_ORIGINS = _LINKS | {"groups": _groups_of}
_OF_OUTBOX: dict[str, Link] = {"topic": lambda row: _address("/outbox", {"topic": row["topic"]})}

_PAGES = {
    "sidings groups list": "/groups",
    "sidings jobs list --state held": "/jobs?state=held",
    "sidings origins list --orphans": "/origins",
    "sidings outbox list": "/outbox",
    "sidings outbox parked": "/outbox",
}


def _page_of(problem: str) -> str | None:
    """That of the command which a problem names last."""
    return _PAGES.get(problem.rpartition(": ")[2])


def _section(
    title: str | None,
    table: Table,
    links: Mapping[str, Link] = _LINKS,
    *,
    empty: str = "None.",
    more: str | None = None,
    act: Sequence[str] = (),
) -> Section:
    columns, values = table
    rows = [[_cell(name, dict(zip(columns, row, strict=True)), links.get(name)) for name in columns] for row in values]
    return Section(title, columns, rows, empty, more=more, act=act)


def _cell(name: str, row: Row, link: Link | None) -> Cell:
    value = row[name]
    if value is None or value == "":
        return Cell(None)
    text = plain(str(value))
    return Cell(text, link(row) if link else None, STYLES.get(text, ""))
