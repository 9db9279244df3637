"""The command line, acting: what each command changes in the database, writes into the audit, and refuses."""

import re
import shlex
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from sidings import Job, StaticAssignment

from .admin_support import GROUP, a_holder, a_job, slow_updates, some_jobs, the_job
from .cli_support import cli, cli_json, refused
from .consumer_support import a_service
from .faulty_proxy import KINDS, Moment, proxied
from .support import ORIGIN, Ride, connected, drained, eventually, fetch, jobs_left, value
from .test_cli import a_parked_message, execute

Action = tuple[str, str, str | None]


async def actions(dsn: str) -> list[Action]:
    """Who did what and why, the oldest first."""
    return [tuple(row) for row in await fetch(dsn, "SELECT actor, action, reason FROM sidings.audit ORDER BY id")]


# -- jobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "outcome"), [("cancel", "cancelled"), ("discard", "discarded")])
async def test_a_job_is_ended_with_who_and_why(database: str, verb: str, outcome: str):
    id = await a_job(database, "blocked")
    result = await cli(database, "jobs", verb, id, "--because", "wrong address", "--by", "bob")
    assert result.stdout == f"job {id}: {outcome} (was blocked)\n"
    assert await jobs_left(database) == 0
    assert await value(database, "SELECT outcome::text FROM sidings.job_history") == outcome
    assert await actions(database) == [("bob", verb, "wrong address")]


async def test_who_did_it_is_the_user_of_the_process_where_nobody_is_named(database: str):
    await cli(database, "jobs", "cancel", await a_job(database), SIDINGS_BY=None)
    ((actor, _, _),) = await actions(database)
    user, _, host = actor.partition("@")
    assert user
    assert host


async def test_a_job_that_backs_off_runs_now(database: str):
    id = await a_job(database, "backing off")
    await cli(database, "jobs", "retry", id)
    job = await the_job(database, id)
    assert job is not None
    assert job["run_at"] is None
    assert await actions(database) == [("alice", "retry now", None)]
    assert f"job {id} is waiting" in await refused(database, "jobs", "retry", id)


async def test_held_jobs_are_released_by_filter_and_others_stay(database: str):
    held = await some_jobs(database, 2, "held", group="a")
    other = await a_job(database, "held", group="b", type="'bill'")
    waiting = await a_job(database, group="a")
    result = await cli(database, "jobs", "release", "--type", "ride", "--yes")
    assert result.stdout.splitlines()[-2:] == [f"job {held[0]}: released", f"job {held[1]}: released"]
    text = await refused(database, "jobs", "release", "--state", "waiting", exit_code=2)
    assert "only held jobs" in text
    rows = await fetch(database, "SELECT id, held FROM sidings.job ORDER BY id")
    assert {row["id"]: row["held"] for row in rows} == {held[0]: None, held[1]: None, other: "poison", waiting: None}


async def test_a_filter_for_retry_takes_no_jobs_that_wait_anyway(database: str):
    """They came first, filled the limit, and were refused each time."""
    for state in ("waiting", "waiting", "waiting", "held"):
        await a_job(database, state)
    later, blocked, soon = [await a_job(database, state) for state in ("delayed", "blocked", "backing off")]
    retry = ("jobs", "retry", "--type", "ride", "--limit", 2, "--yes")
    result = await cli(database, *retry)
    due = [line for line in result.stdout.splitlines() if line.startswith("job ")]
    assert due == [f"job {soon}: due now (was backing off)", f"job {blocked}: due now (was blocked)"]
    assert "these are the first 2; there may be more" in result.stderr
    assert f"job {later}: due now (was delayed)" in (await cli(database, *retry)).stdout
    for state in ("waiting", "running", "held"):
        text = await refused(database, "jobs", "retry", "--state", state, exit_code=2)
        assert "only backing off or blocked or delayed jobs: give such a --state" in text
    other = await a_job(database, "delayed")
    assert f"job {other}: due now" in (await cli(database, "jobs", "retry", "--state", "delayed", "--yes")).stdout


async def test_ended_jobs_come_back_in_the_order_of_their_groups_however_they_ended(
    database: str,
):
    ids = await some_jobs(database, 5)
    for id in reversed(ids):  # as a group is cleared: from its end to its head
        await cli(database, "jobs", "discard", id)
    requeue = ("jobs", "requeue", "--outcome", "discarded", "--since", "1h", "--yes", "--because", "mended")
    for _ in range(3):
        await cli(database, *requeue, "--limit", 2)
    rows = await fetch(
        database,
        "SELECT (detail ->> 'new_job')::bigint AS new, (target ->> 'job')::bigint AS old "
        "FROM sidings.audit WHERE action = 'requeue' ORDER BY 1",
    )
    assert [row["old"] for row in rows] == ids
    assert await jobs_left(database) == 5
    assert "was neither requeued nor delivered again: nothing was done" in await refused(database, *requeue)
    text = await refused(database, "jobs", "requeue", ids[0])
    assert "requeued already" in text
    assert "--force" in text
    await cli(database, "jobs", "requeue", ids[0], "--force")
    await cli(database, *requeue, "--limit", 2, "--force")
    assert await jobs_left(database) == 8


async def test_a_filter_brings_back_what_was_discarded_and_not_what_was_not_to_run(database: str):
    """What was withdrawn, and old states that a newer job had superseded, ran again: an alert named the command. And
    what another job had followed: it was delivered and refunded."""
    discarded, cancelled, superseded, followed = await some_jobs(database, 4)
    await cli(database, "jobs", "discard", discarded)
    await cli(database, "jobs", "cancel", cancelled, superseded, followed, "--yes")
    for id, outcome in ((superseded, "superseded"), (followed, "followed")):
        await execute(database, f"UPDATE sidings.job_history SET outcome = '{outcome}' WHERE job_id = {id}")
    requeue = ("jobs", "requeue", "--type", "ride", "--yes")
    result = await cli(database, *requeue)
    assert [line.split(":")[0] for line in result.stdout.splitlines() if line.startswith("job ")] == [
        f"job {discarded}"
    ]
    assert "no job was discarded since 24h that fits" in await refused(database, *requeue)
    result = await cli(database, *requeue, "--outcome", "cancelled", "--outcome", "superseded")
    assert f"job {cancelled}: requeued" in result.stdout
    assert f"job {superseded}: requeued" in result.stdout
    text = await refused(database, *requeue, "--outcome", "cancelled", "--outcome", "superseded")
    assert "no job was cancelled or superseded since 24h that fits" in text
    assert f"job {followed}: requeued" in (await cli(database, *requeue, "--outcome", "followed")).stdout


async def test_none_of_a_group_come_back_before_one_that_somebody_keeps(database: str):
    """Those behind it were requeued, and so ran before it."""
    ids = await some_jobs(database, 3)
    for id in ids:
        await cli(database, "jobs", "discard", id)
    requeue = ("jobs", "requeue", "--outcome", "discarded", "--yes")
    async with connected(database) as other, other.transaction():
        await other.execute("SELECT pg_advisory_xact_lock(hashtextextended('sidings.requeue', $1))", ids[0])
        result = await cli(database, *requeue, exit_code=1)
    assert "3 of 3 jobs were left as they are" in result.stderr
    assert await jobs_left(database) == 0
    await cli(database, *requeue)
    assert await jobs_left(database) == 3


@pytest.mark.parametrize("verb", ["cancel", "discard"])
async def test_a_job_that_is_released_while_a_person_is_asked_about_held_ones_is_left(
    database: str, monkeypatch: pytest.MonkeyPatch, verb: str
):
    """It was ended, whatever its state was by then, and its handler cancelled."""
    kept, ended = await some_jobs(database, 2, "held")

    def ask(what: str, *, yes: bool) -> None:
        with psycopg.connect(database, autocommit=True) as other:
            other.execute("SELECT sidings.release_job(%s, 'bob')", [kept])

    monkeypatch.setattr("sidings.cli.job_actions.ask", ask)
    result = await cli(database, "jobs", verb, "--state", "held", "--type", "ride", exit_code=1)
    assert f"job {ended}: " in result.stdout
    assert result.stderr.splitlines() == [
        f"error: job {kept} is waiting now, not held",
        "error: 1 of 2 jobs were left as they are",
    ]
    assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.job")] == [kept]
    assert await actions(database) == [("bob", "release", None), ("alice", verb, None)]


async def test_many_jobs_are_not_touched_unless_somebody_says_yes(database: str):
    ids = await some_jobs(database, 3)
    await cli(database, "groups", "pause", ORIGIN, GROUP, "--because", "look")
    before = await actions(database)
    for command in (
        ("jobs", "cancel", *ids),
        ("jobs", "cancel", "--type", "ride"),
        ("jobs", "cancel", ids[0], ids[1]),
        ("groups", "clear", ORIGIN, GROUP),
        ("origins", "move", ORIGIN, "other/1"),
    ):
        text = await refused(database, *command)
        assert "nothing was done: give --yes" in text, command
    assert await jobs_left(database) == 3
    assert await actions(database) == before
    shown = await cli(database, "jobs", "cancel", "--type", "ride", exit_code=1)
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:]] == [str(id) for id in ids]


async def test_of_many_jobs_those_that_can_are_done_and_the_others_named(database: str):
    backing_off, waiting, last = (
        await a_job(database, "backing off"),
        await a_job(database),
        await a_job(database, "delayed"),
    )
    result = await cli(database, "jobs", "retry", backing_off, waiting, last, 4711, "--yes", exit_code=1)
    assert result.stdout == f"job {backing_off}: due now (was backing off)\njob {last}: due now (was delayed)\n"
    assert f"error: job {waiting} is waiting" in result.stderr
    assert "error: there is no job 4711" in result.stderr
    assert result.stderr.endswith("error: 2 of 4 jobs were left as they are\n")


async def test_a_filter_takes_no_more_than_the_limit_and_says_so(database: str):
    await some_jobs(database, 5)
    result = await cli(database, "jobs", "cancel", "--type", "ride", "--limit", 3, "--yes")
    assert "these are the first 3; there may be more" in result.stderr
    assert await jobs_left(database) == 2
    result = await cli(database, "jobs", "requeue", "--outcome", "cancelled", "--limit", 2, "--yes")
    assert "these are the first 2; there may be more" in result.stderr
    assert await jobs_left(database) == 4


async def test_what_handlers_have_declined_is_left_out_and_counted(database: str):
    ids = [await a_job(database) for _ in range(4)]
    for id in ids:
        await cli(database, "jobs", "discard", id)
    declined = "UPDATE sidings.job_history SET error_class = 'sidings.jobs.retry.Discard' WHERE job_id = ANY ($1)"
    await fetch(database, declined, ids[:2])
    requeue = ("jobs", "requeue", "--type", "ride", "--yes")
    result = await cli(database, *requeue)
    assert re.findall(r"job (\d+): requeued", result.stdout) == [str(id) for id in ids[2:]]
    said = "left out: 2 jobs that handlers have ended by Discard; --declined brings them, too"
    assert said in result.stderr
    assert said in (await cli(database, *requeue, exit_code=1)).stderr
    result = await cli(database, *requeue, "--declined")
    assert re.findall(r"job (\d+): requeued", result.stdout) == [str(id) for id in ids[:2]]
    assert "left out" not in result.stderr


async def test_whoever_is_to_requeue_more_is_told_from_when_on(database: str):
    """An hour ago is later the next time: those that ended first would be left behind."""
    (id,) = await some_jobs(database, 1)
    await cli(database, "jobs", "cancel", id)
    requeue = ("jobs", "requeue", "--outcome", "cancelled", "--limit", 1, "--yes", "--force")
    result = await cli(database, *requeue, "--since", "1h")
    told = re.search(r"or do it again with --since (\S+) --before (\S+)$", result.stderr, re.MULTILINE)
    assert told
    assert timedelta(minutes=59) < datetime.now(UTC) - datetime.fromisoformat(told[1]) < timedelta(minutes=61)
    result = await cli(database, *requeue, "--since", told[1], "--before", told[2])
    assert f"or do it again with --since {told[1]} --before {told[2]}\n" in result.stderr


async def test_to_requeue_until_no_job_fits_comes_to_an_end_where_they_are_discarded_again(database: str):
    """What came back is another job: the loop of the guide, and that of the hint, went on as long as the fault."""
    first = await some_jobs(database, 3)
    for id in first:
        await cli(database, "jobs", "discard", id)
    requeue, window = ("jobs", "requeue", "--type", "ride", "--limit", 2, "--yes"), list[str]()
    for expected in (first[:2], first[2:]):
        result = await cli(database, *requeue, *window)
        assert [int(old) for old in re.findall(r"job (\d+): requeued", result.stdout)] == expected
        if hint := re.search(r"or do it again with (--since \S+ --before \S+)$", result.stderr, re.MULTILINE):
            window = shlex.split(hint[1])
        for row in await fetch(database, "SELECT id FROM sidings.job"):
            await cli(database, "jobs", "discard", row["id"])
    assert f"and before {window[-1]} that fits" in await refused(database, *requeue, *window)
    result = await cli(database, *requeue)
    assert result.stdout.count("requeued") == 2, "they are there, for whoever names no end"
    text = await refused(database, "jobs", "requeue", first[0], "--before", "1h", exit_code=2)
    assert "--before belongs to a filter" in text
    assert "--before '3'" in await refused(database, *requeue, "--before", "3", exit_code=2)


async def test_a_filter_takes_what_fits_all_of_it(database: str):
    ids = [await a_job(database, origin=origin, group=group) for origin in (ORIGIN, "b/0") for group in ("g", "h")]
    await cli(database, "jobs", "cancel", "--origin", ORIGIN, "--group", "g", "--yes")
    assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.job ORDER BY id")] == ids[1:]
    await cli(database, "jobs", "cancel", "--origin", "b/0", "--yes")
    assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.job")] == [ids[1]]
    await cli(database, "jobs", "requeue", "--origin", ORIGIN, "--outcome", "cancelled", "--yes")
    rows = await fetch(database, 'SELECT origin, "group" FROM sidings.job ORDER BY id')
    assert [tuple(row) for row in rows] == [(ORIGIN, "h"), (ORIGIN, "g")]


async def test_what_a_filter_finds_is_asked_about_also_where_it_is_one_job(database: str):
    """Whoever gives its number has said which; whoever gives a filter may not know."""
    id = await a_job(database)
    text = await refused(database, "jobs", "cancel", "--type", "ride")
    assert text.startswith("this would cancel 1 job; nothing was done")
    await cli(database, "jobs", "discard", id)
    text = await refused(database, "jobs", "requeue", "--type", "ride")
    assert text.startswith("this would requeue 1 job; nothing was done")
    assert await jobs_left(database) == 0


@pytest.mark.parametrize("verb", ["cancel", "requeue"])
async def test_a_number_that_is_given_twice_is_one_job(database: str, verb: str):
    """It was asked about as if there were more, and left as it was the second time."""
    id = await a_job(database)
    if verb == "requeue":
        await cli(database, "jobs", "cancel", id)
    result = await cli(database, "jobs", verb, id, id, id)
    assert result.output.count(f"job {id}: {verb}") == 1


async def test_which_jobs_are_meant_must_be_clear(database: str):
    id = await a_job(database)
    for verb in ("cancel", "discard", "retry", "release", "requeue"):
        assert "say which jobs" in await refused(database, "jobs", verb, exit_code=2)
        assert "not both" in await refused(database, "jobs", verb, id, "--type", "ride", exit_code=2)
    assert "--group 'g' needs --origin" in await refused(database, "jobs", "cancel", "--group", "g", exit_code=2)
    assert "no job fits: nothing was done" in await refused(database, "jobs", "cancel", "--type", "nothing", "--yes")
    assert await jobs_left(database) == 1


@pytest.mark.parametrize(
    "command",
    [
        ("jobs", "show", "{}"),
        ("jobs", "cancel", "1", "{}", "--yes"),
        ("groups", "skip", "t/0", "g", "--head", "{}"),
        ("outbox", "release", "{}"),
        ("outbox", "parked", "--after", "{}"),
        ("audit", "--before", "{}"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
async def test_a_number_that_no_row_can_have_is_a_wrong_option(database: str, command: tuple[str, ...]):
    """It was an error of Postgres, about a query argument."""
    result = await cli(database, *(part.format(2**63) for part in command), exit_code=2)
    assert f"{2**63 - 1}" in result.stderr


async def test_whatever_is_done_the_audit_has_who_and_why(database: str):
    await a_holder(database, ORIGIN)
    ended, again, held = await a_job(database), await a_job(database, "backing off"), await a_job(database, "held")
    await some_jobs(database, 3, "blocked", group="b")
    await some_jobs(database, 1, origin="gone/0")
    for id in range(1, 5):
        await a_parked_message(database, id, "etas" if id < 3 else "bills")
    await execute(
        database,
        "INSERT INTO sidings.outbox_relay (id, alive_until) VALUES (gen_random_uuid(), now())",
        "INSERT INTO sidings.outbox_topic (topic, relay, retries, retry_at, error) "
        "SELECT 'etas', id, 3, now() + interval '1 hour', 'no such topic' FROM sidings.outbox_relay",
    )
    commands: list[tuple[object, ...]] = [
        ("jobs", "discard", ended),
        ("jobs", "requeue", ended),
        ("jobs", "retry", again),
        ("jobs", "cancel", again),
        ("jobs", "release", held),
        ("groups", "release", ORIGIN, "b"),
        ("groups", "clear", ORIGIN, GROUP, "--yes"),
        *[("types", verb, "ride") for verb in ("pause", "resume")],
        *[("origins", verb, ORIGIN) for verb in ("pause", "resume")],
        *[("groups", verb, ORIGIN, GROUP) for verb in ("pause", "resume")],
        *[("consumers", verb, "positions") for verb in ("pause", "resume")],
        ("origins", "move", "gone/0", ORIGIN, "--yes"),
        ("outbox", "retry", "etas"),
        *[("outbox", verb, "--topic", topic, "--yes") for verb, topic in (("release", "etas"), ("discard", "bills"))],
    ]
    for command in commands:
        await cli(database, *command, "--by", "bob", "--because", "why")
        assert (await actions(database))[-1][::2] == ("bob", "why"), command
    await execute(database, "UPDATE sidings.job SET run_at = 'infinity' WHERE \"group\" = 'b'")
    await cli(database, "groups", "skip", ORIGIN, "b", "--by", "bob", "--because", "why")
    found = await actions(database)
    assert {(actor, reason) for actor, _, reason in found} == {("bob", "why")}
    assert len(found) == len(commands) + 1


# -- groups, types, origins ---------------------------------------------------------------------------------------


async def test_a_blocked_group_is_released_skipped_and_cleared(database: str):
    head = await a_job(database, "blocked")
    second, *_ = await some_jobs(database, 3)
    assert (await cli(database, "groups", "release", ORIGIN, GROUP)).stdout == f"job {head}: due now\n"
    assert "is not blocked" in await refused(database, "groups", "skip", ORIGIN, GROUP)
    await execute(database, f"UPDATE sidings.job SET run_at = 'infinity' WHERE id = {head}")
    assert f"is job {head} now, not {second}" in await refused(
        database, "groups", "skip", ORIGIN, GROUP, "--head", second
    )
    await cli(database, "groups", "skip", ORIGIN, GROUP, "--head", head, "--because", "no such carrier")
    assert await the_job(database, head) is None
    assert await jobs_left(database) == 3
    assert (await cli(database, "groups", "clear", ORIGIN, GROUP, "--yes")).stdout.endswith("cancelled 3 jobs\n")
    assert await jobs_left(database) == 0
    assert [action for _, action, _ in await actions(database)] == ["release group", "skip head", "clear group"]


async def test_a_group_is_cleared_of_the_job_that_runs_only_when_that_is_said(database: str):
    running, *_ = await some_jobs(database, 3)
    await a_holder(database, ORIGIN, running=[running])
    clear = ("groups", "clear", ORIGIN, GROUP, "--yes")
    assert (await cli(database, *clear)).stdout.endswith("cancelled 2 jobs\n")
    assert await the_job(database, running) is not None
    assert (await cli(database, *clear, "--running")).stdout.endswith("cancelled 1 job\n")
    assert await jobs_left(database) == 0
    assert (await cli(database, *clear)).stderr == "no job of this group waits: nothing was done\n"


@pytest.mark.parametrize(
    ("command", "target"),
    [
        (("types", "{}", "ride"), {"type": "ride"}),
        (("origins", "{}", ORIGIN), {"origin": ORIGIN}),
        (("groups", "{}", ORIGIN, GROUP), {"origin": ORIGIN, "group": GROUP}),
        (("consumers", "{}", "positions"), {"topic": "positions"}),
    ],
)
async def test_types_origins_groups_and_topics_are_paused_and_resumed(
    database: str, command: tuple[str, ...], target: dict[str, str]
):
    await a_job(database)
    await execute(
        database, "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ('positions', 0, 42)"
    )
    await a_holder(database, ORIGIN)
    pause = [word.format("pause") for word in command]
    resume = [word.format("resume") for word in command]
    assert "Missing option '--because'" in (await cli(database, *pause, exit_code=2)).stderr
    result = await cli(database, *pause, "--because", "carrier down")
    assert result.stderr == ""
    (row,) = (await cli_json(database, "pauses"))["pauses"]
    assert {name: row[name] for name in ("type", "origin", "group", "topic") if row[name] is not None} == target
    status = await cli(database, "status")
    assert f"paused: {command[0][:-1].replace('consumer', 'topic')} {command[-1]}" in status.stdout
    assert (row["paused_by"], row["reason"]) == ("alice", "carrier down")
    assert "paused already, by alice" in await refused(database, *pause, "--because", "again")
    await cli(database, *resume)
    assert (await cli(database, "pauses")).stderr == "nothing is paused\n"
    assert "is not paused" in await refused(database, *resume)


async def test_a_pause_of_what_is_not_there_says_that_it_may_be_a_typing_error(database: str):
    named = ("types", "pause", "rode"), ("origins", "pause", "transport/0"), ("groups", "pause", ORIGIN, "G")
    for command in (*named, ("consumers", "pause", "position")):
        for _ in range(2):  # the first leaves a row of the origin
            assert "typing error" in (await cli(database, *command, "--because", "x")).stderr, command
            await cli(database, command[0], "resume", *command[2:])


async def test_who_pauses_a_topic_is_told_of_its_messages_that_wait_as_jobs(database: str):
    await execute(
        database, "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ('positions', 0, 42)"
    )
    await a_job(database, type="'message:positions'")
    told = (await cli(database, "consumers", "pause", "positions", "--because", "a repair")).stderr
    assert told == (
        "messages of it wait as jobs, which go on being handled: `sidings types pause message:positions --because "
        "'a repair'` pauses them, too\n"
    )


async def test_a_pause_of_a_topic_is_told_of_though_what_it_has_could_not_be_looked_up(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(KINDS, "list", re.compile(r"FROM sidings\.consumer_offset c"))
    async with proxied(database) as proxy:
        fault = proxy.arm("list", Moment.BEFORE)
        result = await cli(proxy.dsn, "consumers", "pause", "positions", "--because", "x")
    assert fault.hits == 1
    assert result.stdout == "the topic positions is paused\n"
    assert result.stderr.startswith("whether it has a consumer, and messages that wait as jobs, could not be looked up")
    assert [pause["topic"] for pause in (await cli_json(database, "pauses"))["pauses"]] == ["positions"]


async def test_a_pause_is_told_of_though_it_cannot_be_looked_up_whether_there_are_jobs(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """Behind "the type ride is paused" stood an error that nothing had changed: a type without jobs takes as long to
    look for as all jobs take to read."""
    monkeypatch.setitem(KINDS, "list", re.compile(r"FROM sidings\.job_overview v\s+WHERE \$3::text IS NULL"))
    async with proxied(database) as proxy:
        fault = proxy.arm("list", Moment.BEFORE)
        result = await cli(proxy.dsn, "types", "pause", "ride", "--because", "x")
    assert fault.hits == 1
    assert result.stdout == "the type ride is paused\n"
    assert result.stderr.startswith("whether it has jobs could not be looked up: ")
    assert [pause["type"] for pause in (await cli_json(database, "pauses"))["pauses"]] == ["ride"]


@pytest.mark.long
async def test_many_orphans_are_moved_in_more_than_the_time_of_other_statements(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sidings.cli.session._STATEMENT_SECONDS", 4.0)
    await some_jobs(database, 20, origin="gone/0")
    await a_holder(database, ORIGIN)
    async with connected(database) as connection:
        await slow_updates(connection)
    result = await cli(database, "origins", "move", "gone/0", ORIGIN, "--yes")
    assert result.stdout.endswith(f"moved 20 jobs from gone/0 to {ORIGIN}\n")


async def test_an_orphan_s_jobs_are_moved_and_those_of_a_held_origin_are_not(database: str):
    await a_holder(database, ORIGIN, "other/0")
    await some_jobs(database, 3, origin="gone/0")
    result = await cli(database, "origins", "move", "gone/0", ORIGIN, "--yes", "--because", "topic deleted")
    assert result.stdout.endswith(f"moved 3 jobs from gone/0 to {ORIGIN}\n")
    assert await value(database, "SELECT count(*) FROM sidings.job WHERE origin = $1", ORIGIN) == 3
    assert await actions(database) == [("alice", "move", "topic deleted")]
    assert "is held by" in await refused(database, "origins", "move", ORIGIN, "other/0", "--yes")
    assert "no jobs in" in await refused(database, "origins", "move", "gone/0", ORIGIN, "--yes")


async def test_what_waits_in_an_origin_that_is_no_partition_is_moved_to_one_that_is(database: str):
    """`StaticAssignment(["local"])` was taken once; its jobs are the changelog's business."""
    ran: list[str | None] = []
    service = a_service(database, assignment=StaticAssignment(["local/0"]))

    @service.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        ran.append(job.payload.transport)

    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.origin (origin, epoch) VALUES ('local', 3)")  # held, released
        for transport in ("first", "second"):
            by_sql = "SELECT sidings.enqueue('ride', json_build_object('transport', $1::text), origin => 'local')"
            await connection.execute(by_sql, transport)
    async with service:
        await eventually(lambda: service.executor.held)
        result = await cli(database, "origins", "move", "local", "local/0", "--yes")
        assert "2 jobs" in result.stdout
        await drained(database)
    assert sorted(map(str, ran)) == ["first", "second"]


async def test_an_expired_lease_is_believed_when_postgres_has_been_up_for_the_longest(database: str):
    await a_holder(database, ORIGIN)
    await a_holder(database, "gone/0", lease="-1 minute")
    await some_jobs(database, 1, origin="gone/0")
    move = ("origins", "move", "gone/0", ORIGIN, "--yes", "--lease-seconds")
    await refused(database, *move, 1_000_000)
    assert (await cli(database, *move, 0)).stdout.endswith(f"moved 1 job from gone/0 to {ORIGIN}\n")


# -- outbox, consumers --------------------------------------------------------------------------------------------


async def test_parked_messages_are_listed_released_and_discarded(database: str):
    for id, topic in enumerate(("etas", "etas", "etas", "bills"), start=1):
        await a_parked_message(database, id, topic)
    page = await cli_json(database, "outbox", "parked", "--topic", "etas", "--limit", 2)
    assert [(m["id"], m["key"], m["error"]) for m in page["messages"]] == [
        (1, "k", "MessageSizeTooLargeError"),
        (2, "k", "MessageSizeTooLargeError"),
    ]
    rest = await cli_json(database, "outbox", "parked", "--topic", "etas", "--after", page["next"])
    assert [m["id"] for m in rest["messages"]] == [3]
    assert (await cli(database, "outbox", "release", 1)).stdout == "message 1: released\n"
    assert "delete for good 1 parked message" in await refused(database, "outbox", "discard", 2)
    await cli(database, "outbox", "discard", 2, "--yes", "--because", "wrong file")
    assert "no such parked message: 2" in await refused(database, "outbox", "discard", 2, "--yes")
    assert "send 2 parked messages; nothing was done" in await refused(database, "outbox", "release", 3, 4)
    assert "send 1 parked message for etas" in await refused(database, "outbox", "release", "--topic", "etas")
    await cli(database, "outbox", "release", "--topic", "etas", "--yes", "--by", "bob")
    rows = {row["topic"]: row for row in (await cli_json(database, "outbox", "list"))["topics"]}
    assert (rows["etas"]["waiting"], rows["etas"]["parked"]) == (2, 0)
    assert (rows["bills"]["waiting"], rows["bills"]["parked"]) == (0, 1)
    assert "no message for etas is parked" in await refused(database, "outbox", "discard", "--topic", "etas", "--yes")
    assert "say which messages" in await refused(database, "outbox", "release", exit_code=2)
    assert await actions(database) == [
        ("alice", "release messages", None),
        ("alice", "discard messages", "wrong file"),
        ("bob", "release messages", None),
    ]
    assert "topic=etas  wrong file  ids=[2], messages=1" in (await cli(database, "audit")).stdout


@pytest.mark.parametrize("verb", ["release", "discard"])
async def test_what_is_parked_while_a_person_is_asked_is_left_alone(
    database: str, monkeypatch: pytest.MonkeyPatch, verb: str
):
    """It was deleted for good, and nobody had been asked. Messages are parked in any order of their numbers."""
    for id in (3, 5):
        await a_parked_message(database, id)
    asked: list[str] = []

    def ask(what: str, *, yes: bool) -> None:
        asked.append(what)
        with psycopg.connect(database, autocommit=True) as other:
            other.execute(
                "INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, value, error) "
                "SELECT n, now(), 0, 'etas', '', 'too late' FROM unnest(ARRAY[4, 6]) n"
            )

    monkeypatch.setattr("sidings.cli.outbox.ask", ask)
    done = (await cli(database, "outbox", verb, "--topic", "etas")).stdout.splitlines()
    assert [line.split(":")[0] for line in done if line.startswith("message ")] == ["message 3", "message 5"]
    assert "2 parked messages for etas" in asked[0]
    assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.outbox_parked ORDER BY id")] == [4, 6]


async def test_a_failing_topic_is_shown_and_tried_again_at_once(database: str):
    relay = "00000000-0000-0000-0000-000000000001"
    await execute(
        database,
        f"INSERT INTO sidings.outbox_relay (id, alive_until) VALUES ('{relay}', now())",
        "INSERT INTO sidings.outbox_topic (topic, relay, retries, retry_at, error) "
        f"VALUES ('etas', '{relay}', 3, now() + interval '1 hour', 'no such topic')",
    )
    (row,) = (await cli_json(database, "outbox", "list"))["topics"]
    assert (row["failing"]["error"], row["failing"]["retries"]) == ("no such topic", 3)
    assert "no such topic" in (await cli(database, "outbox", "list")).stdout
    await cli(database, "outbox", "retry", "etas", "--because", "made it")
    assert await actions(database) == [("alice", "retry topic", "made it")]
    assert await value(database, "SELECT retry_at <= clock_timestamp() FROM sidings.outbox_topic")
    assert "the topic bills is not failing" in await refused(database, "outbox", "retry", "bills")


async def test_a_consumer_goes_on_where_it_is_told(database: str, sidings_kafka: str, topic):
    name = await topic("positions", partitions=2)
    other = await topic("positions", partitions=1)
    await execute(
        database,
        "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) "
        f"VALUES ('{name}', 0, 5), ('{name}', 1, 7)",
    )
    reset = ("consumers", "reset", name, "--to", "earliest", "--kafka", sidings_kafka)
    assert "in 2 partitions; nothing was done" in await refused(database, *reset)
    result = await cli(database, *reset, "--partition", 1, "--yes", "--because", "again", "--by", "bob")
    assert result.stdout.endswith(f"{name}/1: from 7 to 0\n")
    offsets = "SELECT next_offset FROM sidings.consumer_offset ORDER BY partition"
    assert [row[0] for row in await fetch(database, offsets)] == [5, 0]
    assert await actions(database) == [("bob", "reset", "again")]
    for bootstrap, code in (
        (sidings_kafka, 3),
        ("elsewhere:9092", 0),
    ):  # settings are of the server named
        await cli(
            database,
            *(*reset, "--partition", 1, "--yes"),
            exit_code=code,
            SIDINGS_KAFKA=bootstrap,
            SIDINGS_KAFKA_SECURITY_PROTOCOL="SSL",
        )
    later = datetime.now(UTC).isoformat()
    for to in (later, "1h", "latest"):
        await cli(database, "consumers", "reset", name, "--to", to, "--kafka", sidings_kafka, "--yes")
    assert [row[0] for row in await fetch(database, offsets)] == [0, 0]
    assert "its log goes from 0 to 0" in await refused(
        database, "consumers", "reset", name, "--to", 9, "--partition", 0, "--kafka", sidings_kafka, "--yes"
    )
    assert "no consumer has stored offsets" in await refused(
        database, "consumers", "reset", other, "--to", "latest", "--kafka", sidings_kafka, "--yes"
    )
    assert "give one --partition" in await refused(database, *reset[:4], 9, "--kafka", sidings_kafka, exit_code=2)
    assert "no Kafka is named" in await refused(database, "consumers", "reset", name, "--to", "latest", exit_code=2)
    assert "--to 'soon'" in await refused(
        database, "consumers", "reset", name, "--to", "soon", "--kafka", sidings_kafka, exit_code=2
    )


async def test_only_the_partitions_are_reset_that_a_person_was_asked_about(database: str, sidings_kafka: str, topic):
    """Those without a stored offset were reset, too, and nobody had been asked: `--to latest` passed them over."""
    name = await topic("positions", partitions=3)
    await execute(
        database,
        "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) "
        f"SELECT '{name}', n, 5 FROM unnest(ARRAY[0, 1, 7]) n",  # it had more partitions once
    )
    offsets = "SELECT partition, next_offset FROM sidings.consumer_offset ORDER BY partition"
    reset = ("consumers", "reset", name, "--to", "latest", "--kafka", sidings_kafka)
    for partitions in ((2,), (0, 2)):
        options = [option for partition in partitions for option in ("--partition", partition)]
        text = await refused(database, *reset, *options, "--yes")
        assert f"no stored offset of {name}/2: nothing was done" in text
    assert "in 2 partitions; nothing was done" in await refused(database, *reset)
    assert [tuple(row) for row in await fetch(database, offsets)] == [(0, 5), (1, 5), (7, 5)]
    result = await cli(database, *reset, "--yes")
    assert result.stdout.endswith(f"{name}/0: from 5 to 0\n{name}/1: from 5 to 0\n")
    assert f"left as they are: {name}/7, which Kafka does not have" in result.stderr
    assert [tuple(row) for row in await fetch(database, offsets)] == [(0, 0), (1, 0), (7, 5)]
    text = await refused(database, *reset, "--partition", 7, "--yes", exit_code=2)
    assert "has the partitions [0, 1, 2]" in text
    await execute(database, "DELETE FROM sidings.consumer_offset WHERE partition <> 7")
    assert f"Kafka has no partition of {name} with a stored offset" in await refused(database, *reset, "--yes")
