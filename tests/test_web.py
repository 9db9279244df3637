"""The pages: what they show, where their links lead, and `sidings web` itself."""

import asyncio
import re
import shlex
import signal
import socket
import subprocess
import tracemalloc
from collections.abc import AsyncIterator
from html import unescape

import httpx
import pytest
from sidings import PostgresSettings
from sidings.cli.pages import pages
from starlette.applications import Starlette

from .admin_support import STATES, a_holder, a_job, some_jobs
from .cli_support import EXECUTABLE, cli, cli_json, executed, refused
from .faulty_proxy import Moment, proxied
from .guide import block
from .support import ORIGIN, a_role, connected
from .test_cli import a_parked_message, execute

EVIL = "<script>alert('x')</script> & 100%/é"


@pytest.fixture
async def browser(database: str) -> AsyncIterator[httpx.AsyncClient]:
    async with _browser(pages(PostgresSettings(dsn=database))) as client:
        yield client


def _browser(application: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://pages")


async def _of_everything(dsn: str) -> dict[str, int]:
    """One of each kind that a page has something of, with a group, an error and a key that are HTML."""
    quoted = EVIL.replace("'", "''")
    ids = {state: await a_job(dsn, state, group=f"{EVIL} {state}") for state in STATES}
    await execute(dsn, f"UPDATE sidings.job SET error = '{quoted}' WHERE id = {ids['backing off']}")
    await a_holder(dsn, ORIGIN)
    await cli(dsn, "types", "pause", "ride", "--because", EVIL)
    gone = await a_job(dsn, group=EVIL)
    await cli(dsn, "jobs", "discard", gone, "--because", EVIL)
    await execute(
        dsn,
        "INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, key, value, error) "
        f"VALUES (7, now(), 0, 'etas', convert_to('{quoted}', 'utf8'), '', '{quoted}')",
        "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ('positions', 3, 41)",
    )
    await cli(dsn, "consumers", "pause", "positions", "--because", EVIL)
    return {**ids, "ended": gone}


async def _page(browser: httpx.AsyncClient, address: str, code: int = 200) -> str:
    answer = await browser.get(address)
    assert answer.status_code == code, (address, answer.status_code, answer.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    return answer.text


def _cells(page: str) -> list[str]:
    return [unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<td>(.*?)</td>", page, re.DOTALL)]


async def test_every_link_leads_to_a_page_and_nothing_from_the_database_becomes_html(database: str):
    ids = await _of_everything(database)
    seen: dict[str, str] = {}
    todo = {"/"}
    async with a_role(database) as (role, dsn):
        await execute(  # docs/operations.md, Rights: to look
            database,
            f"REVOKE ALL ON SCHEMA sidings FROM {role}; GRANT USAGE ON SCHEMA sidings TO {role}",
            f"REVOKE ALL ON ALL TABLES IN SCHEMA sidings FROM {role}",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA sidings TO {role}",
            f"REVOKE ALL ON ALL SEQUENCES IN SCHEMA sidings FROM {role}",
        )
        browser = _browser(pages(PostgresSettings(dsn=dsn)))
        while todo:
            address = todo.pop()
            seen[address] = await _page(browser, address)
            assert "<script" not in seen[address], address
            found = {unescape(link) for link in re.findall(r'href="(/[^"]*)"', seen[address])}
            todo |= found - set(seen)
    assert {f"/jobs/{id}" for id in ids.values()} <= set(seen)
    assert {"/groups", "/origins", "/ended", "/outbox", "/outbox?topic=etas", "/consumers", "/audit"} <= set(seen)
    of_group = [address for address in seen if address.startswith("/jobs?origin=") and "group=" in address]
    assert len(of_group) == len(STATES) + 1  # each leads to that group alone, however it is called
    assert sorted(_cells(seen[address]).count("ride") for address in of_group) == [0] + [1] * len(STATES)


async def test_the_pages_show_what_the_commands_show(database: str, browser: httpx.AsyncClient):
    ids = await _of_everything(database)
    status = await _page(browser, "/")
    for problem in (await cli(database, "status", exit_code=4)).stdout.splitlines():
        if problem.startswith("! "):
            assert problem.removeprefix("! ") in unescape(status)
    assert 'href="/jobs?state=held"' in status
    cells = _cells(await _page(browser, "/jobs?state=held"))
    assert cells[:5] == [str(ids["held"]), "ride", ORIGIN, f"{EVIL} held", "held"]
    blocked = _cells(await _page(browser, "/groups"))[4::10]
    assert blocked == [str(ids["backing off"]), str(ids["blocked"])]
    assert str(ids["ended"]) in _cells(await _page(browser, "/ended"))
    assert str(ids["ended"]) not in _cells(await _page(browser, "/ended?since=2020-01-01T00:00Z&outcome=cancelled"))
    assert _cells(await _page(browser, "/consumers")) == ["positions", "3", "41", "0", f"alice: {EVIL}"]
    assert EVIL in _cells(await _page(browser, "/outbox"))
    assert "host-of-the-holder:4711" in _cells(await _page(browser, "/origins"))


@pytest.mark.parametrize(
    ("state", "commands"),
    [("held", ["release", "discard"]), ("blocked", ["retry", "cancel", "discard"]), ("ended", ["requeue"])],
)
async def test_a_job_is_shown_whole_with_the_commands_that_it_takes(
    database: str, browser: httpx.AsyncClient, state: str, commands: list[str]
):
    id = (await _of_everything(database))[state]
    page = await _page(browser, f"/jobs/{id}")
    assert re.findall(r"<code>(.*?)</code>", page) == [f"sidings jobs {verb} {id}" for verb in commands]
    await cli(database, "jobs", commands[0], id, "--yes")
    if state == "ended":
        assert EVIL in _cells(page)  # what people did, and why
    else:
        assert "&#34;transport&#34;: &#34;a&#34;" in page


async def test_the_command_for_a_group_whose_name_begins_with_a_dash_can_be_performed(
    database: str, browser: httpx.AsyncClient
):
    """The command took the name for an option."""
    await a_job(database, "backing off", group="-1")
    page = await _page(browser, str(httpx.URL("/jobs", params={"origin": ORIGIN, "group": "-1"})))
    [told] = re.findall(r"<code>(.*?)</code>", page)
    await cli(database, *shlex.split(unescape(told))[1:])
    assert "backing off" not in await _page(browser, "/groups")


async def test_the_command_for_a_group_cannot_steer_a_terminal_and_can_be_performed(
    database: str, browser: httpx.AsyncClient
):
    """Its name stood there as it is, with ESC and what turns a line round."""
    name = "it's \\ a\x1b[2J\u202eb"
    await a_job(database, "backing off", group=name)
    page = await _page(browser, str(httpx.URL("/jobs", params={"origin": ORIGIN, "group": name})))
    [told] = re.findall(r"<code>(.*?)</code>", page)
    assert unescape(told).isprintable()
    pasted = ["bash", "-c", f"printf '%s\\0' {unescape(told)}"]
    given = subprocess.run(pasted, stdout=subprocess.PIPE, check=True).stdout.decode().split("\0")[:-1]
    await cli(database, *given[1:])
    assert "backing off" not in await _page(browser, "/groups")


async def test_of_a_payload_of_megabytes_a_part_is_shown(database: str, browser: httpx.AsyncClient):
    id = await a_job(database, payload="""json_build_object('long', repeat('x', 3000000))""")
    page = await _page(browser, f"/jobs/{id}")
    assert 200_000 < len(page) < 210_000
    assert "and more of its 3,000,0" in page
    assert "which `sidings jobs show` has" in page


async def test_of_a_payload_that_would_be_megabytes_with_its_indentation_no_more_is_made(
    database: str, browser: httpx.AsyncClient
):
    """All of it was made, before a part was taken: the event loop that the pages are mounted in stood still."""
    nested = "(repeat('[', 50) || repeat('1,', 200000) || '1' || repeat(']', 50))::json"
    id = await a_job(database, payload=nested)
    small = await a_job(database)
    await _page(browser, f"/jobs/{small}")  # what is made once does not count
    tracemalloc.start()
    try:
        page = await _page(browser, f"/jobs/{id}")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 10_000_000
    assert 200_000 < len(page) < 210_000
    assert "and more of its 400,101 characters, which `sidings jobs show` has" in page


async def test_a_payload_that_no_page_could_hold_is_shown_escaped(database: str, browser: httpx.AsyncClient):
    """SQL stores half of a pair of surrogates, which UTF-8 does not have: the page was a bare 500. And text that turns
    its line round was shown so, and said something else than what is stored."""
    lines = ["{", r'  "a": "\ud800",', r'  "b": "\u202e"', "}"]
    id = await a_job(database, "held", payload=r"""'{"a":"\ud800","b":"\u202e"}'""")
    page = await _page(browser, f"/jobs/{id}")
    assert "<pre>" + "\n".join(lines) + "</pre>" in unescape(page)
    shown = (await cli(database, "jobs", "show", id)).stdout
    assert "".join(f"  {line}\n" for line in lines) in shown


async def test_a_table_of_parked_messages_does_not_read_all_that_they_hold(database: str):
    """A hundred of a megabyte each took longer through a slow link than a statement may, only to show their sizes. They
    could not be released by their topic either."""
    long = "repeat('é', 1000000)"
    values = f"now(), 0, 'etas', convert_to('x' || {long}, 'utf8'), convert_to({long}, 'utf8'), {long}"
    await execute(
        database,
        "INSERT INTO sidings.outbox_parked (id, published_at, slot, topic, key, value, error) "
        f"SELECT n, {values} FROM generate_series(1, 3) n",
    )
    await a_parked_message(database, 4)
    async with proxied(database) as proxy:
        shown = (await cli(proxy.dsn, "outbox", "parked")).stdout
        assert "send 4 parked messages for etas" in await refused(proxy.dsn, "outbox", "release", "--topic", "etas")
        async with _browser(pages(PostgresSettings(dsn=proxy.dsn))) as browser:
            page = await _page(browser, "/outbox")
        assert proxy.answered_bytes < 100_000
    _, *long_ones, short = [line.split() for line in shown.splitlines()]
    assert [row[:4] for row in long_ones] == [[str(id), "etas", "x" + 99 * "é" + "…", "2000000"] for id in (1, 2, 3)]
    assert [row[-1] for row in long_ones] == 3 * [2_000 * "é" + "…"]
    assert (short[:4], short[-1]) == (["4", "etas", "k", "1"], "MessageSizeTooLargeError")
    assert _cells(page)[-25::7] == ["2000000", "2000000", "2000000", "1"]
    whole = (await cli_json(database, "outbox", "parked"))["messages"]
    assert [len(message["error"]) for message in whole[:3]] == 3 * [1_000_000]


async def test_lists_go_on_where_the_page_ends(database: str, browser: httpx.AsyncClient):
    ids = await some_jobs(database, 150)
    first = await _page(browser, "/jobs?type=ride")
    (more,) = re.findall(r'<a href="([^"]*)">more</a>', first)
    second = await _page(browser, unescape(more))
    assert [int(cell) for page in (first, second) for cell in _cells(page)[::9]] == ids
    assert ">more</a>" not in second
    await cli(database, "jobs", "cancel", "--type", "ride", "--limit", 150, "--yes")
    for address, column in (("/ended", 8), ("/audit", 7)):
        page = await _page(browser, address)
        (more,) = re.findall(r'<a href="([^"]*)">more</a>', page)
        rest = await _page(browser, unescape(more))
        found = [*_cells(page)[::column], *_cells(rest)[::column]]
        assert len(found) == len(set(found)) == 150, address


async def test_a_page_of_groups_says_that_there_may_be_more(database: str, browser: httpx.AsyncClient):
    async with connected(database) as connection:
        await connection.execute(
            """INSERT INTO sidings.job (origin, "group", type, payload, run_at, attempt, failures, error)
               SELECT $1, 'g-' || n, 'ride', '{}', now() + interval '1 hour', 3, 2, 'ValueError: x'
               FROM generate_series(1, 101) n""",
            ORIGIN,
        )
    first = "These are the first 100; there may be more"
    page = unescape(await _page(browser, "/groups"))
    assert len(_cells(page)) == 1_000
    assert f"{first}, which `sidings groups list --limit 10000` has" in page
    page = unescape(await _page(browser, f"/groups?origin={ORIGIN}"))
    [command] = re.findall(f"{first}, which `(.*?)` has", page)
    assert len((await cli(database, *shlex.split(command)[1:])).stdout.splitlines()) == 1 + 101
    await execute(database, """DELETE FROM sidings.job WHERE "group" IN ('g-7', 'g-8')""")
    assert first not in unescape(await _page(browser, "/groups"))


@pytest.mark.parametrize(
    ("address", "code", "words"),
    [
        ("/jobs/4711", 404, "4711"),
        ("/jobs?state=lost", 400, "give waiting, backing-off"),
        ("/jobs?group=g", 400, "needs --origin"),
        ("/jobs?after=x", 400, "x"),
        ("/ended?since=yesterday", 400, "30m, 2h or 7d"),
        ("/ended?outcome=won", 400, "discarded, followed, cancelled"),
        ("/outbox?after=x", 400, "the id of a message"),
        ("/audit?before=x", 400, "the id of an entry"),
        ("/audit?before=%C2%B2", 400, "the id of an entry"),
        ("/audit?before=99999999999999999999", 400, "out of"),
        ("/jobs/99999999999999999999", 400, "out of"),
        ("/jobs/x", 400, "job 'x': give the id of a job"),
        pytest.param("/jobs/" + 5_000 * "9", 400, "the id of a job", id="more digits than Python reads"),
        pytest.param("/outbox?after=" + 5_000 * "9", 400, "the id of a message", id="after as many"),
        pytest.param("/audit?before=" + 5_000 * "9", 400, "the id of an entry", id="before as many"),
        ("/jobs?type=%00", 400, "0x00"),
    ],
)
async def test_what_is_asked_wrongly_is_said(browser: httpx.AsyncClient, address: str, code: int, words: str):
    assert words in unescape(await _page(browser, address, code))


async def test_while_postgres_is_away_the_page_says_so_and_then_goes_on(database: str, browser: httpx.AsyncClient):
    away = _browser(pages(PostgresSettings(dsn="postgresql://nobody:secret@127.0.0.1:1/x")))
    page = await _page(away, "/jobs", 503)
    assert "no connection to postgresql://127.0.0.1:1/x" in page
    assert "secret" not in page
    assert "No jobs." in await _page(browser, "/")


async def test_a_server_that_ceases_to_answer_is_told_and_keeps_no_further_page_waiting(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sidings.cli.session._STATEMENT_SECONDS", 2.0)
    async with proxied(database) as proxy, _browser(pages(PostgresSettings(dsn=proxy.dsn))) as client:
        for moment in (Moment.BEFORE, Moment.SILENT_BEFORE):
            proxy.arm("check", moment)
            async with asyncio.timeout(20):
                assert "Postgres did not answer" in await _page(client, "/jobs", 503)
        await _page(client, "/jobs")


async def test_pages_can_be_mounted_and_their_links_stay_there(database: str):
    id = await a_job(database)
    mounted = Starlette()
    text = block("cli.md", "In a browser", "python").replace("postgresql://localhost/tracker", database)
    exec(text, {"application": mounted})
    page = await _page(_browser(mounted), "/sidings/jobs?refresh=on")
    links = re.findall(r'href="([^"]*)"', page)
    assert f"/sidings/jobs/{id}" in links
    assert all(link.startswith(("/sidings/", "?")) for link in links)
    assert '<meta http-equiv="refresh"' in page
    for link in links:
        if not link.startswith("?"):
            await _page(_browser(mounted), unescape(link))


@pytest.mark.parametrize("path", ["/", "/jobs", "/outbox"])
async def test_more_pages_at_once_take_no_more_than_two_connections(
    database: str, browser: httpx.AsyncClient, path: str
):
    """Of the outbox a page asked through a connection of its own."""
    await some_jobs(database, 1)
    opened: list[int] = []
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"

    async def count() -> None:
        while True:
            opened.append(await admin.fetchval(others))

    async with connected(database) as admin:
        counting = asyncio.create_task(count())
        await asyncio.gather(*(_page(browser, path) for _ in range(20)))
        counting.cancel()
    assert 1 <= max(opened) <= 3  # one may be just ending


# -- the command ----------------------------------------------------------------------------------------------------


async def test_the_command_serves_them_to_this_machine_alone(database: str):
    id = await a_job(database)
    serving = await asyncio.create_subprocess_exec(
        EXECUTABLE, "web", "--port", "0", "--postgres", database, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert serving.stdout is not None
    try:
        told = (await serving.stdout.readline()).decode()
        address = re.match(r"(http://127\.0\.0\.1:\d+) shows postgresql://", told)
        assert address, told
        async with httpx.AsyncClient(base_url=address[1]) as browser:
            assert f"/jobs/{id}" in await _page(browser, "/jobs")
            # A site elsewhere whose name leads to this machine.
            elsewhere = await browser.get("/jobs", headers={"Host": "elsewhere.example"})
            assert (elsewhere.status_code, str(id) in elsewhere.text) == (400, False)
    finally:
        serving.send_signal(signal.SIGINT)
        _, errors = await serving.communicate()
    assert (serving.returncode, errors) == (130, b"")


async def test_the_address_that_it_prints_is_one_that_it_answers_to(database: str):
    """Of `[::1]:8400` the older releases of Starlette, which are allowed, took "[" for the name, and refused it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    serving = await asyncio.create_subprocess_exec(
        EXECUTABLE, "web", "--host", "::1", "--port", "0", "--postgres", database, stdout=subprocess.PIPE
    )
    assert serving.stdout is not None
    try:
        told = (await serving.stdout.readline()).decode()
        address = re.match(r"(http://\[::1\]:\d+) shows postgresql://", told)
        assert address, told
        async with httpx.AsyncClient(base_url=address[1]) as browser:
            await _page(browser, "/jobs")
            elsewhere = await browser.get("/jobs", headers={"Host": "elsewhere.example"})
            assert elsewhere.status_code == 400
    finally:
        serving.send_signal(signal.SIGINT)
        await serving.communicate()


async def test_what_keeps_it_from_serving_is_said_at_once(database: str):
    with_port = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = with_port.sockets[0].getsockname()[1]
    assert "cannot listen there" in await refused(database, "web", "--port", port, exit_code=2)
    with_port.close()
    assert "no connection to" in await refused("postgresql://127.0.0.1:1/x", "web", exit_code=3)
    missing = await executed("web", "--help")
    assert "Whoever can reach it reads all" in re.sub(r"[\s│]+", " ", missing.stdout)
