"""Each Python and SQL block of the documentation is run by some test; here those that no other test runs."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel
from sidings import Changed, Job, Message, MissingOrigin, Registry, SchemaMissing, Service, Transaction, migrate
from sidings.spark_analytics.transactions.config import load
from sidings.testing import drain

from .admin_support import some_jobs
from .consumer_support import a_service, offset_reaches, produce_raw
from .directory_support import COMPACTED, put
from .guide import block
from .outbox_support import arrived, records
from .plan_support import nodes
from .support import ORIGIN, SECONDS, connected, drained, enqueue, eventually, fetch, value

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).name

# Per page: the headings below which there is Python or SQL, and the tests that run it.
RUN_BY = {
    "README.md": {"The first five minutes": HERE},
    "docs/administration.md": {"In a few lines": "test_admin.py", "From SQL": "test_admin.py"},
    "docs/cdc-transactions.md": {"What goes out": HERE},
    "docs/cli.md": {"In a browser": "test_web.py"},
    "docs/consumer.md": {
        "": HERE,
        "A job for each message": "test_consumer_guide.py",
        "Lists": "test_consumer_guide.py",
        "With SQLAlchemy": "test_consumer_guide.py",
        "Several types in one topic": "test_consumer_guide.py",
        "Duplicates": "test_consumer_guide.py",
        "Going on from another place": "test_consumer_guide.py",
        "Back-pressure": "test_consumer_guide.py",
        "Stateless consumers": HERE,
        "Dead letters are brought back": "test_stateless.py",
        "A consumer of your own": HERE,
    },
    "docs/devstack.md": {"In your tests": HERE, "In Python": HERE},
    "docs/directories.md": {"": HERE, "Following": HERE, "A structure of your own": HERE},
    "docs/directory-tables.md": {
        "The table": "test_directory_tables.py",
        "Quickstart": "test_directory_tables.py",
        "Changing the table": "test_directory_tables.py",
        "Bulk loads": HERE,
        "Rights": "test_directory_tables.py",
    },
    "docs/enqueueing.md": {
        "": "test_ways_in.py",
        "In a service": "test_ways_in.py",
        "Many jobs in one transaction": "test_added_jobs.py",
        "Taking a delayed job back": "test_withdraw.py",
        "asyncpg": "test_ways_in.py",
        "psycopg 3": "test_ways_in.py",
        "psycopg 3, synchronous": "test_ways_in.py",
        "SQLAlchemy": "test_ways_in.py",
        "SQLAlchemy, synchronous": "test_ways_in.py",
        "Scoped sessions in handlers": "test_ways_in.py",
        "Django": "test_ways_in.py",
        "Which origin": "test_origins.py",
        "From SQL": "test_sql_enqueue.py",
        "Taking a delayed job back from SQL": "test_withdraw.py",
        "Rights": "test_sql_enqueue.py",
        "Where functions are not everybody's": "test_sql_enqueue.py",
        "From a trigger": "test_sql_enqueue.py",
        "Workflows": "test_workflow.py",
    },
    "docs/history.md": {"The archive": HERE},
    "docs/security.md": {"Postgres": "test_sql_enqueue.py", "Personal data": "test_sql_enqueue.py"},
    "docs/middleware.md": {"": "test_middleware.py", "An error reporter": "test_middleware.py"},
    "docs/observability.md": {
        "What travels": "test_context.py",
        "In every line of the log": "test_context.py",
        "While Kafka is away": "test_context.py",
    },
    "docs/operations.md": {
        "What is going on": HERE,
        "In a web server": HERE,
        "An endpoint": HERE,
        "Held jobs": HERE,
        "Postgres' clock was wrong": HERE,
        "A backup is restored": "test_dump_and_restore.py",
        "A copy, as for staging": HERE,
        "A schema under another name": "test_schema.py",
        "A consumed topic gets another name": "test_renamed_topics.py",
        "A published topic gets another name": "test_renamed_topics.py",
        "One service becomes two": "test_split_and_merged.py",
        "Two services become one": "test_split_and_merged.py",
        "Another Kafka": "test_another_kafka.py",
        "Migrations of your own": HERE,
        "A field is renamed": HERE,
    },
    "docs/outbox.md": {"": HERE, "Kafka first, or the outbox?": HERE},
    "docs/periodic.md": {"": "test_periodic.py", "What comes next": "test_periodic.py"},
    "docs/policies.md": {
        "": "test_policies_guide.py",
        "How the jobs of a group relate": "test_policies_guide.py",
        "Debounce": "test_policies_guide.py",
        "A job at most once at a time": "test_policies_guide.py",
        "Many jobs in one call": "test_policies_guide.py",
        "No more calls at once than another system takes": "test_policies_guide.py",
        "When a job has used up its attempts": "test_policies_guide.py",
        "Another job follows": "test_policies_guide.py",
    },
    "docs/testing.md": {
        "": "test_testing.py",
        "A handler alone": "test_testing.py",
        "A consumer's handler alone": "test_testing.py",
        "What was enqueued": "test_testing.py",
        "What was published": "test_testing.py",
        "Running the jobs": "test_testing.py",
        "A service of a module": "test_testing.py",
        "A home": "test_testing.py",
        "Time": "test_testing.py",
    },
}


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Heading, language and text of a page's code blocks. The heading "" is the page's own."""
    found: list[tuple[str, str, str]] = []
    heading, language, lines = "", None, list[str]()
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            if language is None:
                language, lines = line[3:], []
            else:
                found.append((heading, language, "\n".join(lines)))
                language = None
        elif language is not None:
            lines.append(line)
        elif line.startswith("##"):
            heading = line.lstrip("#").strip()
    return found


def test_each_block_of_python_and_sql_is_run_by_a_test() -> None:
    pages = {str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
    there = {
        name: headings
        for name, page in pages.items()
        if (headings := {heading for heading, language, _ in blocks(page) if language in ("python", "sql")})
    }
    assert there == {name: set(headings) for name, headings in RUN_BY.items()}
    for page, headings in RUN_BY.items():
        for heading, test in headings.items():
            text = (ROOT / "tests" / test).read_text().partition("\nRUN_BY")
            assert heading in text[0] + text[2].partition("\n}\n")[2], f"{page}, {heading}: not in {test}"
            assert Path(page).name in text[0] + text[2].partition("\n}\n")[2], f"{page}: not in {test}"


@pytest.mark.parametrize("page", ["enqueueing.md", "observability.md", "policies.md"])
def test_no_example_gives_all_groups_one_origin(page: str) -> None:
    """Whoever took that for theirs beside a consumer, whose messages have many, had each group in two origins, where
    its jobs run at once. A job without a group may be anywhere."""
    literal = [
        line
        for _, language, text in blocks(ROOT / "docs" / page)
        if language in ("python", "sql")
        for line in text.splitlines()
        if re.search(r"""origin ?=>? ?["']""", line) and "rebuild_index" not in line
    ]
    assert literal == []


def test_each_block_of_json_and_toml_can_be_read(tmp_path: Path) -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [(language, text) for page in pages for _, language, text in blocks(page)]
    for text in [text for language, text in found if language == "json"]:
        json.loads(text)
    config, primary_keys, kafka_options = [text for language, text in found if language == "toml"]
    (tmp_path / "config.toml").write_text(f"{config}\n{primary_keys}\n{kafka_options}")
    assert load(tmp_path / "config.toml").groups[1].primary_keys == {"CustomerNames": ("customer_id", "name_type")}


def replaced(text: str, *pairs: str) -> str:
    """With what a block leaves out, or only stands for, replaced: texts, each there once, and what comes for them."""
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert text.count(old) == 1, f"{old!r} stands there {text.count(old)} times"
        text = text.replace(old, new)
    return text


def execute(text: str, **names: Any) -> dict[str, Any]:
    """Run it at the top level of a module."""
    exec(compile(text, "the documentation", "exec", dont_inherit=True), names)
    return names


async def execute_awaiting(text: str, **names: Any) -> None:
    """Run what awaits outside of a function."""
    found = execute(f"async def main():\n{textwrap.indent(text, '    ')}", **names)
    await found["main"]()


class Position(BaseModel):
    transport_id: str


class SendEta(BaseModel):
    transport_id: str
    eta: datetime


class Eta(BaseModel):
    transport: str
    eta: datetime | None = None


class Carrier:
    def __init__(self) -> None:
        self.told: list[tuple[str, datetime]] = []

    async def post(self, transport: str, eta: datetime) -> None:
        self.told.append((transport, eta))


UPDATE = '"UPDATE transport SET moves = moves + 1 WHERE id = $1 RETURNING eta", message.value.transport_id'
POSITION = Position(transport_id="t-1").model_dump_json().encode()


@pytest.fixture
async def transports(database: str) -> str:
    async with connected(database) as connection:
        await connection.execute(
            "CREATE TABLE transport (id text PRIMARY KEY, moves int NOT NULL DEFAULT 0, eta timestamptz DEFAULT now())"
        )
        await connection.execute("INSERT INTO transport VALUES ('t-1')")
    return database


async def test_the_heart_of_the_readme(transports: str, topic: Any, sidings_kafka: str):
    positions, carrier = await topic(), Carrier()
    text = replaced(
        block("../README.md", "The first five minutes", "python"),
        *('"tracker"', '"test"'),
        *('"postgresql://localhost/tracker"', repr(transports)),
        *('"localhost:9092"', repr(sidings_kafka)),
        *('"positions"', repr(positions)),
        *('"UPDATE transport SET ... RETURNING eta", ...', UPDATE),
        *('if __name__ == "__main__":\n    asyncio.run(service.run())', ""),
    )
    service: Service = execute(text, Position=Position, SendEta=SendEta, carrier=carrier)["service"]
    await produce_raw(sidings_kafka, positions, POSITION)
    async with service:
        await eventually(lambda: carrier.told)
        await drained(transports)
    [row] = await fetch(transports, "SELECT moves, eta FROM transport")
    assert (row["moves"], carrier.told) == (1, [("t-1", row["eta"])])


async def test_the_consumer_at_the_top_of_its_page(transports: str, topic: Any, sidings_kafka: str):
    positions, service = await topic(), a_service(transports, sidings_kafka)
    told: list[str] = []

    @service.job(group="transport_id")
    async def send_eta(job: Job[Position]) -> None:
        told.append(job.payload.transport_id)

    text = replaced(
        block("consumer.md", "", "python"),
        *('"positions"', repr(positions)),
        *('"UPDATE transport SET ..."', UPDATE),
        *("SendEta(...)", "message.value"),
    )
    execute(text, service=service, send_eta=send_eta, Position=Position, Message=Message, Transaction=Transaction)
    await produce_raw(sidings_kafka, positions, POSITION)
    async with service:
        await eventually(lambda: told == ["t-1"])
    assert await value(transports, "SELECT moves FROM transport") == 1


async def test_a_stateless_consumer(topic: Any, sidings_kafka: str):
    positions, etas = await topic(), await topic()
    text = replaced(
        block("consumer.md", "Stateless consumers", "python"),
        *('"localhost:9092"', repr(sidings_kafka)),
        *('"positions"', repr(positions)),
        *('"positions.dlq"', repr(await topic())),
        *('"etas"', repr(etas)),
    )
    names = {"Service": Service, "Message": Message, "Position": Position}
    page = execute(text, eta=lambda position: Eta(transport=position.transport_id), **names)
    await produce_raw(sidings_kafka, positions, POSITION, key=b"t-1")
    async with page["service"]:

        async def sent() -> list[Any]:
            return await records(sidings_kafka, etas)

        [record] = await eventually(sent)
    assert (record.key, Eta.model_validate_json(record.value).transport) == (b"t-1", "t-1")


async def test_a_consumer_of_ones_own(database: str, topic: Any, sidings_kafka: str):
    positions, service = await topic(partitions=2), a_service(database)
    text = replaced(
        block("consumer.md", "A consumer of your own", "python"),
        *("AIOKafkaConsumer(...", f"AIOKafkaConsumer(bootstrap_servers={sidings_kafka!r}"),
        *('["positions"]', repr([positions])),
    )
    async with service:
        consumer = execute(text, AIOKafkaConsumer=AIOKafkaConsumer, service=service)["consumer"]
        await consumer.start()
        try:
            expected = {f"{positions}/0", f"{positions}/1"}
            held = "SELECT origin FROM sidings.origin WHERE lease_until > now()"

            async def origins() -> bool:
                return {row["origin"] for row in await fetch(database, held)} >= expected

            await eventually(origins)
        finally:
            await consumer.stop()


async def test_the_outbox_at_the_top_of_its_page(transports: str, topic: Any, sidings_kafka: str):
    etas = await topic()
    text = replaced(block("outbox.md", "", "python"), '"etas"', repr(etas))
    async with a_service(transports, sidings_kafka) as service:
        await execute_awaiting(text, service=service, id="t-1", eta=datetime(2030, 1, 2, tzinfo=UTC), Eta=Eta)
    [record] = await records(sidings_kafka, etas)
    assert (record.key, Eta.model_validate_json(record.value).transport) == (b"t-1", "t-1")


class Tenant(BaseModel):
    id: str
    email: str


async def test_kafka_first_takes_what_it_is_given_also_without_postgres(
    own_postgres: Any, topic: Any, sidings_kafka: str
):
    """And knows nothing of what is unique: both requests for an address are answered with success."""
    postgres, tenants = own_postgres(), await topic("tenants")
    await migrate(postgres.dsn, service="test")
    await fetch(postgres.dsn, "CREATE TABLE tenant (id text PRIMARY KEY, email text UNIQUE)")
    service = a_service(postgres.dsn, sidings_kafka)
    text = block("outbox.md", "Kafka first, or the outbox?", "python")
    text = text.replace('"tenants"', repr(tenants))
    page = execute(text, service=service, Tenant=Tenant, Message=Message, Transaction=Transaction)
    put_tenant = page["put_tenant"]

    async def stored(id: str, email: str) -> None:
        query = "SELECT count(*) FROM tenant WHERE id = $1 AND email = $2"
        await eventually(lambda: value(postgres.dsn, query, id, email))

    async with service:
        answer = await put_tenant(Tenant(id="t-1", email="a@example.org"))
        assert answer == Tenant(id="t-1", email="a@example.org")
        await stored("t-1", "a@example.org")
        await asyncio.to_thread(postgres.kill)
        await put_tenant(Tenant(id="t-1", email="b@example.org"))
        await put_tenant(Tenant(id="t-2", email="b@example.org"))
        await asyncio.to_thread(postgres.start)
        await stored("t-1", "b@example.org")
        parked = f"SELECT count(*) FROM sidings.job WHERE type = 'message:{tenants}'"
        await eventually(lambda: value(postgres.dsn, parked))
    assert await value(postgres.dsn, "SELECT count(*) FROM tenant") == 1


class Payment(BaseModel):
    terminal_id: str


async def a_directory_page(topic: Any, kafka: str, terminals: str, **names: Any) -> dict[str, Any]:
    """The service at the top of the page, whose consumer does what the text leaves out by `routed`."""
    text = replaced(
        block("directories.md", "", "python"),
        *('"localhost:9092"', repr(kafka)),
        *('"terminal-acquirer"', repr(terminals)),
        *('"payments"', repr(await topic())),
        *('"payments.dlq"', repr(await topic())),
        *("    ...\n", "    routed(acquirer)\n"),
    )
    names |= {"Service": Service, "BaseModel": BaseModel, "ConfigDict": ConfigDict, "to_camel": to_camel}
    return execute(text, Message=Message, Payment=Payment, **names)


async def test_a_directory_and_its_changes(topic: Any, sidings_kafka: str, caplog: pytest.LogCaptureFixture):
    terminals, routed = await topic(config=COMPACTED), list[str]()
    page = await a_directory_page(topic, sidings_kafka, terminals, routed=routed.append)
    log = logging.getLogger("docs")
    caplog.set_level(logging.INFO, "docs")
    execute(block("directories.md", "Following", "python"), Changed=Changed, log=log, **page)
    await put(sidings_kafka, terminals, {"T-1": b'{"terminalId": "T-1", "acquirerId": "a"}'})
    async with page["service"]:
        await page["terminals"].wait_ready()
        await page["route"](Message(Payment(terminal_id="T-1")))
        await put(sidings_kafka, terminals, {"T-1": b'{"terminalId": "T-1", "acquirerId": "b"}'})
        await eventually(lambda: "acquirer_id='b'" in caplog.text)
    assert routed == ["a"]


async def test_a_structure_that_is_built_of_a_directory(topic: Any, sidings_kafka: str):
    terminals, routed = await topic(config=COMPACTED), list[Any]()
    page = await a_directory_page(
        topic, sidings_kafka, terminals, routed=lambda acquirer: routed.append(set(page["terminals_of"][acquirer]))
    )
    text = block("directories.md", "A structure of your own", "python")
    page = execute(text, defaultdict=defaultdict, Changed=Changed, **page)
    rows = {"T-1": "a", "T-2": "a", "T-3": "b"}
    texts = {key: json.dumps({"terminalId": key, "acquirerId": acquirer}).encode() for key, acquirer in rows.items()}
    await put(sidings_kafka, terminals, texts)
    async with page["service"]:
        await page["terminals"].wait_ready()
        await page["route"](Message(Payment(terminal_id="T-1")))
        await put(sidings_kafka, terminals, {"T-2": texts["T-2"].replace(b'"a"', b'"b"'), "T-3": None})
        await page["terminals"].wait_until(timeout=SECONDS)
        await page["route"](Message(Payment(terminal_id="T-2")))
    assert routed == [{"T-1", "T-2"}, {"T-2"}]


async def test_a_directory_table_is_published_anew(database: str, topic: Any):
    terminals = await topic(config=COMPACTED)
    async with connected(database) as connection:
        await connection.execute(block("directory-tables.md", "The table", "sql"))
        await connection.execute("INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ('1', 'a')")
        setup = block("directory-tables.md", "Quickstart", "sql")
        await connection.execute(replaced(setup, "'terminal-acquirer'", f"'{terminals}'"))
        await connection.execute(block("directory-tables.md", "Bulk loads", "sql"))
    assert await value(database, "SELECT count(*) FROM sidings.outbox") == 2


async def test_what_operations_shows_in_sql(database: str):
    statements = block("operations.md", "What is going on", "sql").split(";\n")
    for statement in statements:
        await fetch(database, statement)
    enqueue = "SELECT sidings.enqueue('send_eta', '{}', origin => $1)"
    job = await value(database, enqueue, ORIGIN)
    [where] = [statement for statement in statements if "where the jobs of a group stand" in statement]
    await fetch(database, "UPDATE sidings.job SET \"group\" = 't-1'")
    assert [tuple(row) for row in await fetch(database, where)] == [(ORIGIN, 1)], "which nobody has ever held"
    await fetch(database, "UPDATE sidings.job SET held = 'no such carrier', position = NULL")
    await fetch(database, replaced(block("operations.md", "Held jobs", "sql"), "4711", str(job)))
    assert await value(database, "SELECT held FROM sidings.job") is None


async def test_the_query_for_groups_that_back_off_looks_at_each_once(database: str):
    """With tens of thousands, as where a carrier is away, it kept a core busy and its transaction open for many
    minutes: for each it looked for the cause in all days of the history."""
    await some_jobs(database, 1_000, "blocked", failures="5", error="'CarrierDown: it is away'")
    statements = block("operations.md", "What is going on", "sql").split(";\n")
    [query] = [statement for statement in statements if "groups that back off" in statement]
    plan = json.loads(await value(database, f"EXPLAIN (ANALYZE, FORMAT JSON) {query}"))[0]["Plan"]
    assert {node["Actual Loops"] for node in nodes(plan)} == {1}
    rows = await fetch(database, query)
    assert [(row["failures"], row["error"]) for row in rows] == [(5, "CarrierDown: it is away")] * 50


def an_application(topic: str, *pairs: str, **names: Any) -> dict[str, Any]:
    """The guide's web server and its endpoint, as they stand there, but for the names of the service and the topic."""
    text = block("operations.md", "In a web server", "python") + block("operations.md", "An endpoint", "python")
    return execute(replaced(text, '"tracker"', '"test"', '"positions"', repr(topic), *pairs), **names)


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """Each SIGTERM, which the lifespan sends where its block fails: it would end pytest without a word."""
    got = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(("written", "status"), [("await send_eta.enqueue", 200), ("send_eta.enqueue", 500)])
async def test_an_endpoint_answers_200_only_once_its_transaction_has_committed(
    transports: str, topic: Any, sidings_kafka: str, monkeypatch: pytest.MonkeyPatch, written: str, status: int
):
    """In a dependency with `yield`, as users of FastAPI are used to, the answer is sent before the commit. And the
    guide's service was in no topic: it knew no partitions, answered each request with 500, and would have run no job.
    """
    monkeypatch.setenv("SIDINGS_POSTGRES", transports)
    monkeypatch.setenv("SIDINGS_KAFKA", sidings_kafka)
    positions = await topic(partitions=3)
    application = an_application(positions, "await send_eta.enqueue", written)["application"]
    transport = httpx.ASGITransport(application, raise_app_exceptions=False)

    def known() -> str | None:
        with suppress(MissingOrigin):
            return application.state.service.origin_for("t-1", positions)

    async with (
        application.router.lifespan_context(application),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        origin = await eventually(known, "the topic's partitions are known")
        answer = await client.post("/transports/t-1/eta", params={"eta": "2030-01-02T00:00:00Z"})
        assert answer.status_code == status
        await drained(transports)
    committed = await value(transports, "SELECT eta = '2030-01-02T00:00:00Z' FROM transport")
    assert committed is (status == 200)
    ended = await fetch(transports, "SELECT type, origin, outcome FROM sidings.job_history")
    assert [tuple(row) for row in ended] == [("send_eta", origin, "succeeded")] * committed


async def test_a_service_in_the_lifespan_of_an_application(
    empty_database: str, topic: Any, sidings_kafka: str, monkeypatch: pytest.MonkeyPatch, signals: list[int]
):
    """With the `try` around the service, and one service for all starts, a second `TestClient` ended the process. And
    a consumer can be declared at each start, where the guide says."""
    monkeypatch.setenv("SIDINGS_POSTGRES", empty_database)
    monkeypatch.setenv("SIDINGS_KAFKA", sidings_kafka)
    positions, ran = await topic(), list[str]()
    declared = 'service.consumer("positions")(on_position)'
    assert declared in (ROOT / "docs" / "operations.md").read_text()
    start = "    async with service:\n"

    async def on_position(message: Message[Position], tx: Transaction) -> None:
        await move.enqueue(tx, message.value)

    names = an_application(
        positions,
        *(start, f"    {declared.replace('positions', positions)}\n{start}"),
        on_position=on_position,
    )
    application = names["application"]

    @names["jobs"].job()
    async def move(job: Job[Position]) -> None:
        ran.append(job.payload.transport_id)

    async def dying() -> None:
        [executor] = [task for task in asyncio.all_tasks() if task.get_name() == "sidings: the executor"]
        executor.cancel()
        await asyncio.sleep(30)

    with pytest.raises(SchemaMissing):
        async with application.router.lifespan_context(application):
            pass
    await application.state.service.migrate()
    for transport in ("first", "second"):
        await produce_raw(sidings_kafka, positions, Position(transport_id=transport).model_dump_json().encode())
        async with application.router.lifespan_context(application):
            await eventually(lambda transport=transport: transport in ran)
    assert signals == []
    with pytest.raises(RuntimeError, match="the executor has ended although nobody asked it to"):
        async with application.router.lifespan_context(application):
            await dying()
    assert signals == [signal.SIGTERM]


async def test_what_a_wrong_clock_has_left_is_mended_and_live_leases_go_on(database: str):
    """Also those of more than a minute, which a reader has put into the text: two executors would hold an origin."""
    await fetch(
        database,
        "INSERT INTO sidings.origin (origin, owner, epoch, lease_until) "
        "SELECT 'orders/' || n, gen_random_uuid(), 1, clock_timestamp() + n * interval '10 minutes' "
        "FROM generate_series(0, 2) n",
    )
    await fetch(
        database,
        "INSERT INTO sidings.outbox_relay (id, alive_until, host, pid) "
        "SELECT gen_random_uuid(), clock_timestamp() + n * interval '10 minutes', 'there', n "
        "FROM generate_series(1, 2) n",
    )
    text = block("operations.md", "Postgres' clock was wrong", "sql").replace("15 seconds", "10 minutes")
    for statement in text.split(";\n"):
        await fetch(database, statement)
    [live] = await fetch(database, "SELECT origin FROM sidings.origin WHERE lease_until > clock_timestamp()")
    assert live["origin"] == "orders/1"
    assert await value(database, "SELECT array_agg(pid) FROM sidings.outbox_relay") == [1]


async def test_a_copy_runs_and_sends_nothing_of_what_it_was_copied_from(database: str, topic: Any, sidings_kafka: str):
    positions, terminals, handled = await topic(), await topic(config={"cleanup.policy": "compact"}), []
    statement = block("operations.md", "A copy, as for staging", "sql")
    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.topic (topic, partitions) VALUES ($1, 4711)", positions)
        await connection.fetch("SELECT sidings.enqueue('send_eta', '{}', $1)", f"{positions}/0")
        await connection.fetch("SELECT sidings.publish($1, 'k', '{}')", positions)
        await connection.execute(
            "INSERT INTO sidings.consumer_offset (topic, partition, next_offset) VALUES ($1, 0, 4711)", positions
        )
        await connection.execute("CREATE TABLE terminal (id text PRIMARY KEY); INSERT INTO terminal VALUES ('1')")
        await connection.execute("SELECT sidings.directory_table('terminal', $1, '{id}')", terminals)
        await connection.execute(
            "INSERT INTO sidings.directory_doubt SELECT $1, '1', now() - interval '1 min', now()", terminals
        )
        await connection.execute(statement)
    await produce_raw(sidings_kafka, positions, POSITION, partition=0)
    service = a_service(database, sidings_kafka)

    @service.consumer(positions)
    async def on_position(message: Message[Position], tx: Transaction) -> None:
        handled.append(message.offset)
        await send_eta.enqueue(tx, Position(transport_id="t-1"))

    @service.job(group="transport_id", home=positions)
    async def send_eta(job: Job[Position]) -> None:
        handled.append(job.payload.transport_id)

    async with service:
        await eventually(lambda: "t-1" in handled)
        await asyncio.sleep(2)  # relays look after doubts once a second
    assert await arrived(sidings_kafka, terminals) == 0  # of what the table says production may know better
    assert set(handled) == {0, "t-1"}  # the first try may come before the topic's partitions are known
    assert await value(database, "SELECT count(*) FROM sidings.outbox") == 0


def test_migrations_of_another_tool_leave_the_schema_out():
    include_name = execute(block("operations.md", "Migrations of your own", "python"))["include_name"]
    assert [include_name(name, "schema", {}) for name in (None, "billing", "sidings")] == [True, True, False]
    assert include_name("job", "table", {"schema_name": None})


async def test_a_field_of_payloads_is_renamed_while_deployments_roll(database: str):
    """With the second step alone the release before ran the jobs of the new one with its default."""

    class Before(BaseModel):
        amount: int = 0

    names = execute(block("operations.md", "A field is renamed", "python"))
    releases = [(Before, "amount"), (names["Fee"], "amount"), (names["RenamedFee"], "cents")]
    told: list[int] = []

    def declare(jobs: Registry, model: Any, field: str) -> Any:
        async def charge(job: Job[Any]) -> None:
            told.append(getattr(job.payload, field))

        charge.__annotations__["job"] = Job[model]
        return jobs.job()(charge)

    for storing, running in [(0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (0, 2)]:
        model, field = releases[storing]
        await enqueue(database, declare(Registry(), model, field), [model(**{field: 12})])
        declare(jobs := Registry(), *releases[running])
        [attempt] = await drain(database, jobs)
        assert (attempt.outcome, told.pop()) == ("succeeded", 12)


async def test_retention_can_be_told_to_wait_for_the_archive(database: str):
    await fetch(database, block("history.md", "The archive", "sql"))
    assert await value(database, "SELECT archive_history FROM sidings.service")


class CustomerCreated(BaseModel):
    id: str


async def test_events_of_transactions_are_read_once(database: str, topic: Any, sidings_kafka: str):
    customers, service = await topic(), a_service(database, sidings_kafka)
    handled: list[str] = []
    text = replaced(
        block("cdc-transactions.md", "What goes out", "python"),
        *('"customers"', repr(customers)),
        *("-> None: ...", "-> None:\n    handled.append(message.value.id)"),
    )
    names = {"Message": Message, "Transaction": Transaction, "CustomerCreated": CustomerCreated}
    execute(text, service=service, handled=handled, **names)
    headers = [("type", b"CustomerCreated"), ("sidings-id", b"one")]
    for _ in range(2):
        await produce_raw(sidings_kafka, customers, b'{"id": "7"}', headers=headers)
    async with service:
        await eventually(offset_reaches(database, customers, 2))
    assert handled == ["7"]


async def test_the_devstack_in_tests(tmp_path: Path, sidings_postgres: str, sidings_kafka: str):
    [conftest, test] = [
        text
        for heading, language, text in blocks(ROOT / "docs" / "devstack.md")
        if (heading, language) == ("In your tests", "python")
    ]
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_tracker.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    environment = os.environ | {"SIDINGS_POSTGRES": sidings_postgres, "SIDINGS_KAFKA": sidings_kafka}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = await asyncio.to_thread(
        lambda: subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.chaos  # starts a second Postgres, and three brokers
@pytest.mark.timeout(240)
def test_the_devstack_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sidings_postgres: str, sidings_kafka: str
):
    monkeypatch.setenv("SIDINGS_POSTGRES", sidings_postgres)  # else the developer's own would be started, and left
    monkeypatch.setenv("SIDINGS_KAFKA", sidings_kafka)
    text = replaced(
        block("devstack.md", "In Python", "python"),
        *('"/tmp/second"', repr(str(tmp_path / "second"))),
        *('"/tmp/cluster"', repr(str(tmp_path / "cluster"))),
    )
    page: dict[str, Any] = {}
    try:
        exec(compile(text, "the documentation", "exec", dont_inherit=True), page)
        assert page["endpoints"].postgres == sidings_postgres
        assert page["kafka"].bootstrap.count(",") == 2
        assert page["kafka"].ca_file.exists()
    finally:
        for server in (page.get("second"), page.get("kafka")):
            if server is not None:
                server.remove()
