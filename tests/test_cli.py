"""The command line, looking: what it shows of a database, as text and as JSON."""

import json
import re
import shlex
from datetime import UTC, datetime, timedelta
from time import perf_counter

import pytest
import typer
from sidings import ConfigurationError
from sidings.cli.command import fail
from sidings.cli.filters import a_state, a_time, outcome_names, state_names
from sidings.cli.job_details import payload_text
from sidings.cli.job_types import backlogs
from sidings.cli.output import document, duration, plain
from sidings.jobs import OutcomeName
from sidings.jobs.admin import JobCount, JobState

from .admin_support import GROUP, STATES, a_holder, a_job, a_job_that_left_no_end, some_jobs
from .cli_support import cli, cli_json, refused
from .outbox_support import relaying
from .support import ORIGIN, a_role, connected, eventually


async def execute(dsn: str, *statements: str) -> None:
    async with connected(dsn) as connection:
        for statement in statements:
            await connection.execute(statement)


# -- jobs ---------------------------------------------------------------------------------------------------------


async def test_jobs_are_listed_in_every_state_and_filtered(database: str):
    ids = {state: await a_job(database, state, group=state) for state in STATES}
    other = await a_job(database, origin="other/1", type="'bill'")
    everything = await cli_json(database, "jobs", "list")
    assert {job["id"]: job["state"] for job in everything["jobs"]} == {
        **{id: state for state, id in ids.items()},
        other: "waiting",
    }
    assert everything["next"] is None
    for state, id in ids.items():
        found = await cli_json(database, "jobs", "list", "--state", state.replace(" ", "-"), "--origin", ORIGIN)
        assert [job["id"] for job in found["jobs"]] == [id]
    assert [job["id"] for job in (await cli_json(database, "jobs", "list", "--type", "bill"))["jobs"]] == [other]
    grouped = await cli_json(database, "jobs", "list", "--origin", ORIGIN, "--group", "held")
    assert [(job["id"], job["held"], "cursor" in job) for job in grouped["jobs"]] == [(ids["held"], "poison", False)]


async def test_pages_of_jobs_follow_each_other_without_gap_or_repeat(database: str):
    ids = await some_jobs(database, 5) + await some_jobs(database, 2, "delayed") + await some_jobs(database, 2, "held")
    seen: list[int] = []
    after: tuple[str, ...] = ()
    while True:
        page = await cli_json(database, "jobs", "list", "--limit", 4, *after)
        seen += [job["id"] for job in page["jobs"]]
        if page["next"] is None:
            break
        after = ("--after", page["next"])
    assert seen == ids
    text = await cli(database, "jobs", "list", "--limit", 4)
    assert "there may be more: add --after ordered:" in text.stderr


async def test_jobs_with_a_due_time_that_python_does_not_know_are_listed_and_shown(database: str):
    """`sidings.enqueue` once took any, and an UPDATE still does; one such job, and nothing was listed any more."""
    due = ("4000-01-01 BC", "3999-01-01 BC", "2030-01-01Z", "9999-12-31T23:59:59Z", "30000-01-01", "294000-01-01")
    ids = [await a_job(database, group=None, run_at=f"'{at}'") for at in due]
    assert [job["id"] for job in (await cli_json(database, "jobs", "list"))["jobs"]] == ids
    after: tuple[str, ...] = ()
    for id in ids:
        page = await cli_json(database, "jobs", "list", "--limit", 1, *after)
        assert [job["id"] for job in page["jobs"]] == [id]
        after = ("--after", page["next"])
    assert (await cli_json(database, "jobs", "list", "--limit", 1, *after))["jobs"] == []
    for id in ids:
        await cli(database, "jobs", "show", id)
    await cli(database, "status", exit_code=4)  # nobody holds the origin
    await cli(database, "jobs", "discard", ids[0], ids[-1], "--because", "no such time", "--yes")
    assert {job["job_id"] for job in (await cli_json(database, "jobs", "ended"))["jobs"]} == {ids[0], ids[-1]}
    await cli(database, "jobs", "show", ids[-1])


async def test_what_is_piped_is_in_columns_that_cut_nothing(database: str):
    group = "g" * 300
    id = await a_job(database, "backing off", group=group, error=f"'ValueError: {'x' * 300}'")
    header, line = (await cli(database, "jobs", "list")).stdout.splitlines()
    assert header.split() == ["id", "type", "origin", "group", "state", "attempt", "age", "next", "in", "cause"]
    assert line.split()[:6] == [str(id), "ride", ORIGIN, group, "backing", "off"]
    assert line.endswith("ValueError: " + "x" * 300)
    assert line.index(group) == header.index("group")


async def test_a_key_or_an_error_cannot_steer_the_terminal(database: str):
    await a_job(database, "backing off", group="evil\x1b[2J\x9b", error="E'two\\nlines'")
    shown = (await cli(database, "jobs", "list")).stdout
    assert "\x1b" not in shown
    assert r"evil\x1b[2J" in shown
    assert r"two\nlines" in shown
    assert (await cli_json(database, "jobs", "list"))["jobs"][0]["group"] == "evil\x1b[2J\x9b"
    assert "\x9b" not in (await cli(database, "jobs", "list", "--json")).stdout  # as good as ESC ["


@pytest.mark.parametrize(
    "payload",
    [
        '{"amount": 12345678901234567.89, "rate": 0.10000000000000000001, "limit": 1e400}',  # Python rounds them
        '{"number": ' + "1" * 5_000 + "}",  # and refuses this one
        "[" * 3_000 + "]" * 3_000,
        '{"a": 1, "a": 2}',
        '{"empty": [{}, []], "text": "[,] {:} \\" \\\\", "none": null, "yes": true, "in words": -1.5e-3}',
        '"alone"',
    ],
    ids=lambda payload: payload[:20],
)
async def test_a_payload_is_shown_as_it_is(database: str, payload: str):
    """Of amounts, other numbers were shown; and of a held job, a traceback."""
    id = await a_job(database, "held", payload=f"'{payload}'")
    text = (await cli(database, "jobs", "show", id)).stdout
    shown = text.partition("payload:\n")[2]
    assert "".join(shown.split()) == "".join(payload.split())
    document = (await cli(database, "jobs", "show", id, "--json")).stdout
    assert "".join(document.partition('"payload":')[2].split()).startswith("".join(payload.split()) + ',"headers":')
    assert text.isascii()


async def test_a_text_in_a_payload_makes_no_lines_of_its_own(database: str):
    id = await a_job(database, payload='\'{"text": "a\u2028b\x85paused: by alice"}\'')
    shown = (await cli(database, "jobs", "show", id)).stdout.partition("payload:\n")[2]
    assert shown.split("\n")[:3] == ["  {", r'    "text": "a\u2028b\x85paused: by alice"', "  }"]


def test_a_payload_is_indented_as_python_does_it():
    for value in ({"a": [1, {"b": 'ü\n"', "c": []}], "d": {}}, [], {}, [[1.5, None], True], "x", 7):
        assert payload_text(json.dumps(value)) == json.dumps(value, indent=2, ensure_ascii=False)


async def test_one_job_is_shown_whole_also_after_its_end(database: str):
    id = await a_job(database, "backing off", headers="""'{"correlation_id": "c-1"}'""")
    await cli(database, "groups", "pause", ORIGIN, GROUP, "--because", "carrier down")
    shown = await cli_json(database, "jobs", "show", id)
    assert (shown["id"], shown["job"]["state"], shown["payload"]) == (id, "backing off", {"transport": "a"})
    assert shown["headers"] == {"correlation_id": "c-1"}
    assert [pause["reason"] for pause in shown["pauses"]] == ["carrier down"]
    text = (await cli(database, "jobs", "show", id)).stdout
    assert '"transport": "a"' in text
    assert "group g of transports/0, by alice: carrier down" in text
    await cli(database, "jobs", "cancel", id, "--because", "enough")
    shown = await cli_json(database, "jobs", "show", id)
    assert shown["job"] is None
    assert shown["attempts"][-1]["outcome"] == "cancelled"
    assert shown["actions"][-1]["reason"] == "enough"
    assert "ended: cancelled" in (await cli(database, "jobs", "show", id)).stdout
    assert "there is no job 4711" in await refused(database, "jobs", "show", 4711)


async def test_a_job_that_left_no_end_is_shown_without_one(database: str):
    """It was 'ended: lost', though it ran well behind that."""
    shown = (await cli(database, "jobs", "show", await a_job_that_left_no_end(database))).stdout
    assert "ended" not in shown.partition("attempts")[0]
    assert re.search(r"state: +gone; its last attempt on record was lost .* ago", shown)
    assert "history=False" in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("list", "--state", "failed"),
            "give waiting, backing-off, blocked, running, delayed, held; `sidings jobs ended`",
        ),
        (("list", "--group", "g"), "--group 'g' needs --origin"),
        (("list", "--after", "x"), "--after 'x': give what the page before said"),
        (("counts", "--by", "state", "--by", "topic"), "--by 'topic': give some of state, type, origin"),
        (
            ("ended", "--outcome", "lost"),
            "--outcome 'lost': give some of discarded, followed, cancelled, superseded, succeeded",
        ),
        (("requeue", "--outcome", "lost"), "--outcome 'lost'"),
        (("requeue", "--outcome", "succeeded"), "what succeeded leaves no payload: enqueue anew, or reset"),
        (("ended", "--before", "x"), "--before 'x': give 30m"),
    ],
)
async def test_a_word_that_there_is_not_is_a_mistake_of_the_command(
    database: str, arguments: tuple[str, ...], text: str
):
    assert text in await refused(database, "jobs", *arguments, exit_code=2)


async def test_what_is_refused_for_another_reason_is_not_laid_to_the_page(database: str):
    """`--after None: give what the page before said`, of half a pair of surrogates, or a missing right."""
    for after in ((), ("--after", "ordered:0:0:t/0")):
        assert "--after" not in await refused(database, "jobs", "list", "--type", "\ud800", *after)
    async with a_role(database) as (role, dsn):
        await execute(database, f"REVOKE ALL ON ALL TABLES IN SCHEMA sidings FROM {role}")
        await execute(database, f"GRANT SELECT ON sidings.service, sidings.migration TO {role}")
        assert "give this one the rights that docs/operations.md names" in await refused(dsn, "jobs", "list")


@pytest.mark.parametrize("limit", [0, 10_001])
async def test_a_limit_is_at_least_one_and_no_more_than_what_admin_counts(database: str, limit: int):
    for command in (("jobs", "list"), ("jobs", "cancel", "--type", "ride"), ("audit",), ("outbox", "parked")):
        assert "--limit" in (await cli(database, *command, "--limit", limit, exit_code=2)).stderr, command


async def test_nothing_found_says_where_the_names_are(database: str):
    await a_job(database)
    for wrong in (("--type", "rides"), ("--origin", "transport/0")):
        result = await cli(database, "jobs", "list", *wrong)
        assert (result.stdout, result.stderr) == (
            "",
            "no job fits: `sidings types list` and `sidings origins list` have the names\n",
        )
    assert (await cli(database, "jobs", "list", "--state", "held")).stderr == "no jobs\n"
    assert (await cli(database, "jobs", "list", "--state", "Backing_Off")).stderr == "no jobs\n"


async def test_a_held_job_has_no_next_attempt(database: str):
    id = await a_job(database, "held", run_at="now() - interval '1 minute'")
    line = (await cli(database, "jobs", "list")).stdout.splitlines()[1]
    assert line.split()[-2:] == ["-", "poison"]
    assert "next attempt" not in (await cli(database, "jobs", "show", id)).stdout
    waiting = await a_job(database, "backing off")
    assert "next attempt in:" in (await cli(database, "jobs", "show", waiting)).stdout


async def test_counts_and_types_say_how_many_jobs_there_are(database: str):
    await some_jobs(database, 3)
    await some_jobs(database, 2, "held", type="'bill'")
    counted = await cli_json(database, "jobs", "counts")
    assert [(row["type"], row["state"], row["jobs"]) for row in counted["counts"]] == [
        ("bill", "held", 2),
        ("ride", "waiting", 3),
    ]
    assert [row["jobs"] for row in (await cli_json(database, "jobs", "counts", "--by", "origin"))["counts"]] == [5]
    for wanted, jobs in ((("--type", "bill"), [2]), (("--origin", ORIGIN), [2, 3]), (("--origin", "b/0"), [])):
        counted = await cli_json(database, "jobs", "counts", *wanted)
        assert [row["jobs"] for row in counted["counts"]] == jobs, wanted
    await cli(database, "types", "pause", "ride", "--because", "look")
    rows = {row["name"]: row for row in (await cli_json(database, "types", "list"))["types"]}
    assert rows["ride"]["states"]["waiting"] == 3
    assert rows["ride"]["paused"] == "alice: look"
    assert rows["bill"]["states"]["held"] == 2
    assert "alice: look" in (await cli(database, "types", "list")).stdout


def test_ten_times_as_many_types_take_ten_times_as_long_to_look_at() -> None:
    """A page of 10,000 took five seconds of the event loop that it is mounted in."""
    types = [f"type {number}" for number in range(40_000)]
    started = perf_counter()
    found = backlogs([JobCount(JobState.HELD, type, None, 2, datetime.now(UTC)) for type in types], [])
    assert perf_counter() - started < 10  # and not minutes
    assert [(backlog.name, backlog.jobs) for backlog in found] == [(type, 2) for type in sorted(types)]


async def test_ended_jobs_are_listed_by_outcome_and_time_page_by_page(database: str):
    ids = await some_jobs(database, 3)
    for id in ids:
        await cli(database, "jobs", "discard", id)
    await cli(database, "jobs", "cancel", await a_job(database, origin="b/0", type="'bill'"))
    for wanted, count in ((("--type", "bill"), 1), (("--type", "ride"), 3), (("--origin", "b/0"), 1)):
        assert len((await cli_json(database, "jobs", "ended", *wanted))["jobs"]) == count, wanted
    first = await cli_json(database, "jobs", "ended", "--outcome", "discarded", "--limit", 2)
    assert [row["job_id"] for row in first["jobs"]] == [ids[2], ids[1]]
    rest = await cli_json(database, "jobs", "ended", "--outcome", "discarded", "--before", first["next"])
    assert [row["job_id"] for row in rest["jobs"]] == [ids[0]]
    await execute(database, "UPDATE sidings.job_history SET finished_at = finished_at - interval '3 hours'")
    assert (await cli_json(database, "jobs", "ended", "--since", "2h"))["jobs"] == []
    assert len((await cli_json(database, "jobs", "ended", "--since", "4h"))["jobs"]) == 4


# -- groups, origins, the rest ------------------------------------------------------------------------------------


async def test_groups_that_wait_for_their_head_are_listed_with_the_cause(database: str):
    head = await a_job(database, "blocked")
    await some_jobs(database, 3)
    await a_job(database, group="healthy")
    (row,) = (await cli_json(database, "groups", "list"))["groups"]
    assert (row["origin"], row["group"], row["head"], row["state"], row["behind"]) == (
        ORIGIN,
        GROUP,
        head,
        "blocked",
        3,
    )
    assert row["error"] == "ValueError: x"
    text = (await cli(database, "groups", "list")).stdout
    assert text.splitlines()[1].endswith("3       ValueError: x")
    shown = await cli_json(database, "groups", "show", ORIGIN, GROUP)
    assert [job["state"] for job in shown["jobs"]] == ["blocked", "waiting", "waiting", "waiting"]
    none = (await cli(database, "groups", "list", "--origin", "other/1")).stderr
    assert "`sidings jobs list --state running`" in none, "which is not to say that none stands still"
    assert "has a handler in no instance" in none
    assert "type or origin is paused (`sidings pauses`)" in none
    await a_job(database, "blocked", group="second")
    for command in (("list", "--limit", 1), ("show", ORIGIN, GROUP, "--limit", 1)):
        result = await cli(database, "groups", *command)
        assert len(result.stdout.splitlines()) == 2, command
        assert "these are the first 1" in result.stderr
    odd = "O'Brien; $(id)"  # keys come from elsewhere
    await some_jobs(database, 2, group=odd)
    told = (await cli(database, "groups", "show", ORIGIN, odd, "--limit", 1)).stderr
    command = shlex.split(told.partition("; ")[2].removesuffix(" lists all\n"))
    assert len((await cli_json(database, *command[1:]))["jobs"]) == 2
    await cli(database, "groups", "clear", ORIGIN, odd, "--yes")
    await cli(database, "origins", "pause", ORIGIN, "--because", "look")
    await cli(database, "groups", "pause", ORIGIN, "second", "--because", "not this one")
    await cli(database, "types", "pause", "ride", "--because", "carrier down")
    await cli(database, "types", "pause", "bill", "--because", "nor this one")
    shown = await cli_json(database, "groups", "show", ORIGIN, GROUP)
    assert [pause["reason"] for pause in shown["pauses"]] == ["carrier down", "look"]


async def test_origins_are_listed_with_holder_and_backlog_and_without_the_slots_of_the_outbox(database: str):
    me = await a_holder(database, "transports/2", "transports/10", "outbox/3", lease="1 hour")
    await a_holder(database, "gone/1", "gone/2", lease="-1 minute")
    await some_jobs(database, 2, origin="transports/10")
    await a_job(database, "blocked", origin="transports/2")
    await a_job(database, "held", origin="gone/1")
    await a_job(database, origin="never/0")
    await cli(database, "origins", "pause", "transports/2", "--because", "look")
    rows = {row["origin"]: row for row in (await cli_json(database, "origins", "list"))["origins"]}
    assert list(rows) == ["gone/1", "gone/2", "never/0", "transports/2", "transports/10"]
    leased = rows["transports/10"]
    assert (leased["leased"], leased["owner"], leased["epoch"], leased["pid"]) == (True, str(me), 7, 4711)
    assert (leased["waiting"], rows["transports/2"]["blocked"], rows["transports/2"]["blocked_groups"]) == (2, 1, 1)
    assert (rows["gone/1"]["leased"], rows["gone/1"]["held"]) == (False, 1)
    assert (rows["never/0"]["leased"], rows["never/0"]["epoch"], rows["never/0"]["waiting"]) == (False, None, 1)
    orphans = await cli_json(database, "origins", "list", "--orphans")
    assert [row["origin"] for row in orphans["origins"]] == ["gone/1", "never/0"]
    header, _, _, _, paused, leased = (await cli(database, "origins", "list")).stdout.splitlines()
    counts = ["waiting", "running", "failing", "delayed", "held"]
    assert re.split(r"\s{2,}", header) == [
        *("origin", "held by", "epoch", "lease"),
        *counts,
        *("oldest", "groups", "paused"),
    ]
    assert paused.split()[:3] == ["transports/2", "host-of-the-holder:4711", "7"]
    assert paused.split()[4:9] == [*"--1--"]
    assert paused.endswith("1       alice: look")
    assert leased.split()[4:9] == ["2", *"----"]


async def test_an_origin_that_ends_in_a_digit_that_is_no_number_is_listed_as_others(database: str):
    """SQL takes any name, and "²" is a digit to Python; one job there, and no origin was listed any more."""
    await execute(database, "SELECT sidings.enqueue('t', '{}'::json, origin => 'area/m²')")
    await execute(database, "SELECT sidings.enqueue('t', '{}'::json, origin => 'area/²')")
    rows = (await cli_json(database, "origins", "list"))["origins"]
    assert [row["origin"] for row in rows] == ["area/m²", "area/²"]


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e30", "-1"])
async def test_a_lease_that_is_no_time_is_a_mistake_of_the_command(database: str, seconds: str):
    await a_job(database, origin="gone/1")
    move = ("origins", "move", "gone/1", ORIGIN, "--yes", "--lease-seconds", seconds)
    assert "give the seconds of the longest lease" in await refused(database, *move, exit_code=2)


async def test_what_admin_counts_only_so_far_is_shown_so(database: str):
    await some_jobs(database, 10_000, group=None)
    assert (await cli(database, "origins", "list")).stdout.splitlines()[1].split()[4] == "10000+"


async def test_the_audit_is_filtered_and_paged(database: str):
    ids = await some_jobs(database, 3)
    for id in ids:
        await cli(database, "jobs", "cancel", id, "--by", "bob")
    await cli(database, "types", "pause", "ride", "--because", "look")
    newest = await cli_json(database, "audit", "--limit", 2)
    assert [(row["actor"], row["action"]) for row in newest["audit"]] == [("alice", "pause"), ("bob", "cancel")]
    older = await cli_json(database, "audit", "--before", newest["next"])
    assert [row["target"]["job"] for row in older["audit"]] == [ids[1], ids[0]]
    assert older["next"] is None
    assert len((await cli_json(database, "audit", "--by", "bob", "--action", "cancel"))["audit"]) == 3
    for wanted, rows in ((("--action", "pause"), 1), (("--by", "bob", "--action", "pause"), 0), (("--by", "alice"), 1)):
        assert len((await cli_json(database, "audit", *wanted))["audit"]) == rows, wanted
    assert [row["type"] for row in (await cli_json(database, "pauses"))["pauses"]] == ["ride"]


@pytest.mark.parametrize("to", ["²", 5_000 * "9", "yesterday"])
async def test_an_offset_that_is_none_is_a_mistake_of_the_command(database: str, to: str):
    reset = ("consumers", "reset", "positions", "--partition", 0, "--kafka", "127.0.0.1:1", "--to", to)
    assert "give 30m, 2h or 7d (ago)" in await refused(database, *reset, exit_code=2)


async def test_stored_offsets_are_listed(database: str):
    await execute(
        database, "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ('a', 1, 42), ('b', 0, 7)"
    )
    found = await cli_json(database, "consumers", "list", "--topic", "a")
    assert found["offsets"] == [{"topic": "a", "partition": 1, "next_offset": 42, "resets": 0, "paused": None}]
    await cli(database, "consumers", "pause", "a", "--because", "look")
    paused = {row["topic"]: row["paused"] for row in (await cli_json(database, "consumers", "list"))["offsets"]}
    assert paused == {"a": "alice: look", "b": None}
    assert len((await cli(database, "consumers", "list")).stdout.splitlines()) == 3


# -- status -------------------------------------------------------------------------------------------------------


async def test_status_is_well_as_long_as_nothing_needs_a_person(database: str):
    await a_holder(database, ORIGIN)
    await a_job(database)
    await a_job(database, "backing off", group="other")  # a retry is no trouble
    await execute(
        database,
        "SELECT sidings.publish('etas', 'k', '1')",
        "INSERT INTO sidings.outbox_relay (id, alive_until) VALUES (gen_random_uuid(), now() + interval '1 hour')",
    )
    found = await cli_json(database, "status")
    assert (found["service"], found["schema"], found["problems"]) == ("test", "sidings", [])
    assert (found["origins_held"], found["origins_free"]) == (1, 0)
    assert [(executor["pid"], executor["origins"]) for executor in found["executors"]] == [(4711, 1)]
    text = (await cli(database, "status")).stdout
    assert "service test, schema sidings at 00" in text
    assert "held by 1 executor: 1 origin" in text
    assert "1 group behind a head that fails: sidings groups list" in text


@pytest.mark.parametrize(
    ("trouble", "problem"),
    [
        ("blocked", "1 group blocked until a person decides: sidings groups list"),
        ("held", "1 job held: sidings jobs list --state held"),
        ("parked", "1 message parked: sidings outbox parked"),
        ("failing", "the outbox cannot send to etas: sidings outbox list"),
        ("orphan", "jobs wait in origins that nobody holds: gone/0: sidings origins list --orphans"),
        ("no relay", "1 message to send, and no relay is alive: sidings outbox list"),
        ("nobody", "no executor holds an origin: does the service run? If so, its /health says what it lacks"),
    ],
)
async def test_status_names_what_needs_a_person_and_says_so_by_its_exit_code(database: str, trouble: str, problem: str):
    await a_holder(database, ORIGIN, lease="-1 minute" if trouble == "nobody" else "1 hour")
    match trouble:
        case "blocked" | "held":
            await a_job(database, trouble)
        case "parked":
            await a_parked_message(database)
        case "failing":
            relay = "00000000-0000-0000-0000-000000000001"
            await execute(
                database,
                f"INSERT INTO sidings.outbox_relay (id, alive_until) VALUES ('{relay}', now())",
                "INSERT INTO sidings.outbox_topic (topic, relay, retries, retry_at, error) "
                f"VALUES ('etas', '{relay}', 3, now() + interval '1 minute', 'no such topic')",
            )
        case "no relay":
            await execute(
                database,
                "SELECT sidings.publish('etas', 'k', '1')",
                "INSERT INTO sidings.outbox_relay (id, alive_until) VALUES (gen_random_uuid(), now() - interval '6 s')",
            )
        case "orphan":
            await a_job(database, origin="gone/0")
        case _:
            pass
    found = await cli_json(database, "status", exit_code=4)
    assert found["problems"] == [problem]
    assert f"! {problem}" in (await cli(database, "status", exit_code=4)).stdout


async def test_status_tells_a_relay_that_does_not_reach_kafka_from_none(database: str):
    await a_holder(database, ORIGIN)
    await execute(database, "SELECT sidings.publish('etas', 'k', '1')")
    async with relaying(database, "127.0.0.1:1") as relay:
        await eventually(lambda: bool(relay.metrics.waiting), "it has looked at the outbox")

        async def problems() -> bool:
            found = await cli_json(database, "status", exit_code=4)
            return found["problems"] == ["1 message to send, and no relay reaches Kafka: sidings outbox list"]

        await eventually(problems)


async def a_parked_message(dsn: str, id: int = 1, topic: str = "etas") -> None:
    await execute(
        dsn,
        "INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, key, value, error) "
        f"VALUES ({id}, now(), 0, '{topic}', 'k', 'v', 'MessageSizeTooLargeError')",
    )


# -- words --------------------------------------------------------------------------------------------------------


def test_durations_have_one_or_two_units():
    seconds = {0.85: "850ms", -3: "0ms", 4: "4s", 60: "1m", 200: "3m20s", 7500: "2h5m", 273_600: "3d4h", 86_400: "1d"}
    assert {number: duration(timedelta(seconds=number)) for number in seconds} == seconds


def test_times_are_ages_or_iso_with_a_zone():
    now = datetime(2026, 5, 1, tzinfo=UTC)
    assert a_time("--since", "90s", now) == now - timedelta(seconds=90)
    assert a_time("--since", "7d", now) == now - timedelta(days=7)
    assert a_time("--since", "2026-05-01T03:00Z", now) == now + timedelta(hours=3)
    for wrong in ("", "yesterday", "2026-05-01T03:00", "1y", "999999d"):
        with pytest.raises(ConfigurationError, match=r"--since .*: give 30m, 2h or 7d"):
            a_time("--since", wrong, now)


def test_json_has_times_in_utc_durations_in_seconds_and_bytes_as_text():
    east = datetime(2026, 5, 1, 3, tzinfo=UTC).astimezone()
    value = {"at": east, "took": timedelta(seconds=1.5), "key": b"k", "raw": b"\xff\x00", "n": None}
    assert json.loads(json.dumps(document(value))) == {
        "at": "2026-05-01T03:00:00Z",
        "took": 1.5,
        "key": "k",
        "raw": "\\xff00",
        "n": None,
    }


def test_text_is_one_line_without_control_characters():
    assert plain("a\nb\tc\x1b[0m\u202eé") == "a\\nb\\tc\\x1b[0m\\u202eé"


def test_nor_does_an_error_steer_the_terminal(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit):
        fail("no job fits\n\x1b[2J")
    assert capsys.readouterr().err == "error: no job fits \\x1b[2J\n"


def test_the_words_that_a_shell_offers_are_those_that_there_are():
    assert [a_state(name) for name in state_names()] == list(JobState)
    without_success = {name for name in OutcomeName if name.terminal} - {OutcomeName.SUCCEEDED}
    assert set(outcome_names()) == without_success
