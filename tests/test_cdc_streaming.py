"""The whole path: Kafka, Spark, Kafka. Micro-batches are slow, so much happens within one query."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import psutil
import pytest
from aiokafka import AIOKafkaProducer
from py4j.protocol import Py4JJavaError
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from sidings import ConfigurationError
from sidings.devstack.fixtures import OwnKafka, TopicFactory
from sidings.devstack.topics import create_topic, delete_topics
from sidings.spark_analytics.transactions import Config, combine
from sidings.spark_analytics.transactions.__main__ import run
from sidings.spark_analytics.transactions.progress import progress
from sidings.spark_analytics.transactions.topics import _tell_compacted, check_topics

from .cdc_support import (
    WAIT_SECONDS,
    Row,
    Sent,
    Until,
    config,
    debezium_rows,
    following,
    header_row,
    header_rows,
    produce,
    read,
    rows_of,
    some_rows,
    toml,
)
from .consumer_support import add_partitions, delete_records
from .guide import block
from .support import eventually

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.timeout(900)  # about 20 s each; many times that where others work on the machine
UPDATE = Row("Customers", "UPDATE", {"customer_id": 7})


@pytest.fixture
async def topics(topic: TopicFactory) -> Mapping[str, str]:
    """Where row changes, boundaries, events and alerts go."""
    partitions = {"cdc": 3, "boundaries": 1, "customers": 2, "addresses": 1, "alerts": 1}
    return {name: await topic(name, partitions=number) for name, number in partitions.items()}


def configured(topics: Mapping[str, str], kafka: str, folder: Path, **values: object) -> Config:
    given: dict[str, object] = {
        "kafka": kafka,
        "topics": (topics["cdc"],),
        "checkpoint": str(folder / "checkpoint"),
        "state_partitions": 2,
        "trigger_seconds": 0.1,
        **{name: topics[name] for name in ("customers", "addresses", "alerts")},
    }
    return config(**given | values)


@asynccontextmanager
async def running(spark: SparkSession, by: Config) -> AsyncIterator[tuple[StreamingQuery, Until]]:
    """A query, and what waits until that which was sent is enough, and returns it."""
    query = await asyncio.to_thread(combine, spark, by)

    def alive() -> None:
        if not query.isActive:
            query.awaitTermination()  # raises what ended it
            raise AssertionError("the query has ended")

    try:
        async with following(by, alive) as until:
            yield query, until
    finally:
        await asyncio.to_thread(query.stop)


@asynccontextmanager
async def occupied(spark: SparkSession, folder: Path) -> AsyncIterator[None]:
    """Both of Spark's threads are taken, as if there were no executor."""

    def hold(number: int) -> None:
        (folder / f"held-{number}").touch()
        while not (folder / "released").exists():
            time.sleep(0.01)

    holding = asyncio.create_task(asyncio.to_thread(spark.sparkContext.parallelize([0, 1], 2).foreach, hold))
    try:
        held = [folder / "held-0", folder / "held-1"]
        await eventually(lambda: all(file.exists() for file in held), "both threads", WAIT_SECONDS)
        yield
    finally:
        (folder / "released").touch()
        await holding


async def ended(spark: SparkSession, by: Config) -> int:
    """Take what is there, as the command does; its exit code."""
    return await asyncio.to_thread(run, spark, by, threading.Event(), available_now=True)


def left_open(spark: SparkSession) -> int:
    """How many connections Spark has not closed, though their other ends are."""
    jvm = cast(Any, spark.sparkContext)._jvm
    connections = psutil.Process(jvm.java.lang.ProcessHandle.current().pid()).net_connections("tcp")
    return sum(connection.status == psutil.CONN_CLOSE_WAIT for connection in connections)


def alerts(found: Sequence[Sent]) -> dict[str, Sent]:
    return {message.value["alert"]: message for message in found if "alert" in message.value}


@pytest.mark.long
async def test_the_header_form_with_timers_snapshots_bad_records_and_a_restart(
    spark: SparkSession,
    sidings_kafka: str,
    topics: Mapping[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    before = left_open(spark)
    by = configured(topics, sidings_kafka, tmp_path, expire_seconds=3, snapshot_quiet_seconds=2, state_partitions=3)
    chance = random.Random(7)
    made = {f"t{number}": some_rows(chance) for number in range(40)}
    values: list[bytes | None] = [value for id, rows in made.items() for value in header_rows(id, rows)]
    values += [*chance.sample(values, 30), b"nonsense", None]
    name = Row("CustomerNames", "REFRESH", {"customer_id": 7, "name_type": "nick", "name": "Al"})
    values += [header_row(Row("Customers", "REFRESH", {"customer_id": 7})), header_row(name)]
    first, second, third = header_rows("lost", [UPDATE] * 3)
    chance.shuffle(values)
    await produce(sidings_kafka, topics["cdc"], [*values, first, third])
    expected = {(id, ordinal) for id, rows in made.items() for ordinal in range(1, len(rows) + 1)}

    async with running(spark, by) as (query, until):
        # From here on nothing comes: it is micro-batches without rows that make the timers go off.
        found = await until(
            lambda found: (
                rows_of(found) >= expected
                and {"incomplete", "bad-record"} <= alerts(found).keys()
                and any(message.headers["type"] == "CustomerSnapshot" for message in found)
            ),
            "all transactions, the alerts and the snapshot",
        )
        assert rows_of(found) == expected
        assert all(message.key == message.value["id"] for message in found if "group" in message.value)
        incomplete = alerts(found)["incomplete"]
        assert (incomplete.value["transaction"], incomplete.value["missing"]) == ("lost", [2])
        assert alerts(found)["bad-record"].value["place"].startswith(f"{topics['cdc']}/")
        (snapshot,) = [message for message in found if message.headers["type"] == "CustomerSnapshot"]
        assert [row["table"] for row in snapshot.value["rows"]] == ["Customers", "CustomerNames"]

        async with occupied(spark, tmp_path):
            monkeypatch.setattr("sidings.spark_analytics.transactions.progress.STATE_SECONDS", 0.1)
            async with asyncio.timeout(WAIT_SECONDS):
                stands = await asyncio.to_thread(progress, spark, query, by)
            monkeypatch.undo()
        assert "state not readable now" in str(stands)
        stands = await asyncio.to_thread(progress, spark, query, by)
        assert stands is not None
        assert stands.open == 1
        assert stands.oldest is not None
        assert stands.oldest >= 3
        assert query.lastProgress["stateOperators"][0]["numShufflePartitions"] == by.state_partitions
        # Of each task one would stay, until there is no port left; the start leaves one.
        await eventually(lambda: query.lastProgress["batchId"] >= 3, "some micro-batches", WAIT_SECONDS)
        assert left_open(spark) - before <= 1 + by.state_partitions
        # The settings are the query's own, and a micro-batch writes what it has changed, not all of the state.
        assert spark.conf.get("spark.sql.shuffle.partitions") != str(by.state_partitions)
        assert list((tmp_path / "checkpoint" / "state").rglob("*.changelog"))

    # From here on a second query goes on from the checkpoint of the first; topics have more partitions.
    await add_partitions(sidings_kafka, topics["cdc"], 5)
    await add_partitions(sidings_kafka, topics["customers"], 3)
    async with running(spark, by) as (query, until):
        # What was missing comes after all; duplicates of what is finished open nothing again; a table is loaded later.
        other = Row("CustomerNames", "REFRESH", {"customer_id": 7, "name_type": "full", "name": "Albert"})
        await produce(sidings_kafka, topics["cdc"], [*values[:20], second, header_row(other)])
        found = await until(
            lambda found: (
                ("lost", 2) in rows_of(found)
                and "completed-late" in alerts(found)
                and len([message for message in found if message.headers["type"] == "CustomerSnapshot"]) == 2
            ),
            "what was missing, and the second snapshot",
        )
        assert rows_of(found) == expected | {("lost", ordinal) for ordinal in (1, 2, 3)}
        assert [len(m.value["rows"]) for m in found if m.headers["type"] == "CustomerSnapshot"] == [2, 3]
        ids = [message.headers["sidings-id"] for message in found]
        assert len(ids) == len(set(ids))
        assert [m.value["transaction"] for m in found if m.headers["type"] == "incomplete"] == ["lost"]


@pytest.mark.long
async def test_debezium_with_its_boundaries_before_and_after_the_rows(
    spark: SparkSession, sidings_kafka: str, topics: Mapping[str, str], tmp_path: Path
):
    by = configured(
        topics,
        sidings_kafka,
        tmp_path,
        form="debezium",
        connector="postgresql",
        boundaries=topics["boundaries"],
        forget_seconds=5,
        kafka_options={"kafka.isolation.level": "read_committed"},
    )
    async with AIOKafkaProducer(bootstrap_servers=sidings_kafka, transactional_id=topics["cdc"]) as producer:
        await producer.begin_transaction()
        for name, sent in zip(("cdc", "boundaries"), debezium_rows("aborted", [UPDATE] * 3), strict=True):
            for value in sent:
                await producer.send_and_wait(topics[name], value)
        await producer.abort_transaction()
    chance = random.Random(11)
    made = {str(700 + number): some_rows(chance) for number in range(20)}
    built = [debezium_rows(id, rows, texts=number % 2 == 0, wrapped=number % 3 == 0)
             for number, (id, rows) in enumerate(made.items())]  # fmt: skip
    values = [value for rows, _ in built for value in rows]
    ends = [value for _, boundaries in built for value in boundaries]
    chance.shuffle(values)
    await produce(sidings_kafka, topics["boundaries"], ends[: len(ends) // 2])
    await produce(sidings_kafka, topics["cdc"], values[: len(values) // 2])
    expected = {(id, ordinal) for id, rows in made.items() for ordinal in range(1, len(rows) + 1)}
    async with running(spark, by) as (_, until):
        await until(bool, "the first event")
        await produce(sidings_kafka, topics["cdc"], [*values[len(values) // 2 :], None, *values[:5]])
        await produce(sidings_kafka, topics["boundaries"], ends[len(ends) // 2 :])
        found = await until(lambda found: rows_of(found) >= expected, "all transactions")
        assert rows_of(found) == expected
        assert not alerts(found)

        # One that comes again as a whole is left out, until it is forgotten.
        again, boundaries = built[0]

        async def send_again() -> None:
            while True:
                await produce(sidings_kafka, topics["cdc"], again)
                await produce(sidings_kafka, topics["boundaries"], boundaries)
                await asyncio.sleep(0.5)  # it is forgotten when time has gone by, and nothing tells when

        before = len(found)
        sending = asyncio.create_task(send_again())
        found = await until(lambda found: len(found) > before or sending.done(), "a transaction that was forgotten")
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert rows_of(found) == expected


@pytest.mark.long
async def test_it_is_stopped_after_its_micro_batch_and_says_how_much_is_open_and_not_read_yet(
    spark: SparkSession, sidings_kafka: str, topics: Mapping[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    by = configured(topics, sidings_kafka, tmp_path, max_rows_per_trigger=9, trigger_seconds=1_000_000)
    caplog.set_level("INFO", "sidings.cdc")

    await produce(sidings_kafka, topics["cdc"], [header_rows("older", [UPDATE] * 2)[0]])
    assert await ended(spark, by) == 0
    await produce(sidings_kafka, topics["cdc"], [header_rows("newer", [UPDATE] * 2)[0]] * 20)
    caplog.clear()
    stop = threading.Event()
    # One micro-batch at once; the next one were due in days.
    command = asyncio.create_task(asyncio.to_thread(run, spark, by, stop, available_now=False))
    await eventually((tmp_path / "checkpoint" / "offsets" / "1").exists, "the begin of a micro-batch", WAIT_SECONDS)
    stop.set()
    assert await command == 0
    assert (tmp_path / "checkpoint" / "commits" / "1").exists()
    line = caplog.records[-1]
    told = re.fullmatch(
        r"stopped: batch 1, (\d+) s ago: (\d) rows in ([\d.]+) s, (\d+) behind;"
        r" 2 open transactions, the oldest since (\d+) s",
        line.getMessage(),
    )
    assert told is not None, caplog.messages
    ago, rows, seconds, behind, oldest = map(float, told.groups())
    assert 0 < rows <= 9
    assert behind == 20 - rows

    def age(batch: int) -> float:
        _, facts, *_ = (tmp_path / "checkpoint" / "offsets" / str(batch)).read_text().splitlines()
        return line.created - json.loads(facts)["batchTimestampMs"] / 1000

    assert abs(oldest - age(0)) < abs(oldest - age(1))
    assert 0 < seconds <= ago + seconds <= age(1) + 1

    # It waits for its trigger, also where there is more to read.
    async with running(spark, by) as (query, _):
        await eventually(
            lambda: query.lastProgress is not None and not query.status["isTriggerActive"],
            "the end of a micro-batch",
            WAIT_SECONDS,
        )
        stands = await asyncio.to_thread(progress, spark, query, by)
        assert stands is not None
        assert stands.behind


@pytest.mark.long
async def test_options_reach_kafkas_source_and_sink(
    spark: SparkSession, sidings_kafka: str, topics: Mapping[str, str], tmp_path: Path
):
    """Each of these is looked at by one of them only, and ends the query."""
    await produce(sidings_kafka, topics["cdc"], header_rows("t", [UPDATE]))
    ends = {"kafka.isolation.level": "IsolationLevel.NONSENSE", "kafka.compression.type": "compression.type"}
    for number, (option, message) in enumerate(ends.items()):
        by = configured(topics, sidings_kafka, tmp_path / str(number), kafka_options={option: "nonsense"})
        with pytest.raises(StreamingQueryException, match=message):
            async with running(spark, by) as (_, until):
                await until(lambda found: False, f"the end of the query by {option}")


@pytest.mark.long
async def test_it_begins_where_it_is_told_to_and_passes_over_nothing_that_kafka_has_deleted(
    spark: SparkSession, sidings_kafka: str, topics: Mapping[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    by = configured(topics, sidings_kafka, tmp_path, start="latest")

    await produce(sidings_kafka, topics["cdc"], header_rows("before", [UPDATE] * 3))
    assert await ended(spark, by) == 0
    await produce(sidings_kafka, topics["cdc"], header_rows("after", [UPDATE] * 3))
    assert await ended(spark, by) == 0
    assert rows_of(await read(by)) == {("after", ordinal) for ordinal in (1, 2, 3)}

    await produce(sidings_kafka, topics["cdc"], header_rows("deleted", [UPDATE] * 3))
    await delete_records(sidings_kafka, topics["cdc"], -1, partitions=3)
    assert await ended(spark, by) == 1
    assert "failOnDataLoss" in caplog.messages[-1]
    await produce(sidings_kafka, topics["cdc"], header_rows("kept", [UPDATE] * 3))
    assert await ended(spark, by.model_copy(update={"kafka_options": {"failOnDataLoss": "false"}})) == 0
    assert rows_of(await read(by)) == {(id, ordinal) for id in ("after", "kept") for ordinal in (1, 2, 3)}

    # Made anew, it has more records than before: Spark itself would go on at the old offsets.
    await delete_topics(sidings_kafka, [topics["cdc"]])
    await create_topic(sidings_kafka, topics["cdc"], partitions=3)
    await produce(sidings_kafka, topics["cdc"], header_rows("anew", [UPDATE] * 30))
    with pytest.raises(ConfigurationError, match=f"'{topics['cdc']}' is another one than the checkpoint's"):
        await ended(spark, by)
    missing = by.model_copy(update={"topics": ("nothing",), "alerts": "nobody"})
    with pytest.raises(ConfigurationError, match=r"no such topic at .*: 'nothing', 'nobody'\. Create"):
        await ended(spark, missing)
    impatient = {"kafka.default.api.timeout.ms": "1000", "kafka.request.timeout.ms": "1000"}
    away = by.model_copy(update={"kafka": "127.0.0.1:1", "kafka_options": impatient})
    assert await ended(spark, away) == 1
    assert re.match(r"not started: .*\n.*TimeoutException", caplog.messages[-1])


@pytest.mark.long
async def test_a_new_checkpoint_whose_state_could_not_be_read_is_refused(
    spark: SparkSession, sidings_kafka: str, topics: Mapping[str, str], tmp_path: Path
):
    """Under a path with a space the log said "state not readable now", once a minute, for ever."""
    by = configured(topics, sidings_kafka, tmp_path)
    for name in ("with space", "50%", "a[1]"):
        spaced = by.model_copy(update={"checkpoint": str(tmp_path / name)})
        with pytest.raises(ConfigurationError, match=f"checkpoint '.*{re.escape(name)}'.*Give another path"):
            check_topics(spark, spaced)
    begun = tmp_path / "with space" / "sources" / "0" / "0"
    begun.parent.mkdir(parents=True)
    begun.touch()
    check_topics(spark, by.model_copy(update={"checkpoint": str(tmp_path / "with space")}))  # it goes on
    check_topics(spark, by.model_copy(update={"checkpoint": str(tmp_path / "über")}))


@pytest.mark.long
async def test_a_start_tells_of_topics_whose_rows_kafka_compacts(
    spark: SparkSession, sidings_kafka: str, topic: TopicFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Their transactions stayed incomplete, and were given up with the rows of all other roots."""
    topics = {name: await topic(name) for name in ("cdc", "customers", "addresses", "alerts")}
    check_topics(spark, configured(topics, sidings_kafka, tmp_path / "kept"))
    assert not caplog.messages
    for policy in ("compact", "compact,delete"):
        compacted = topics | {"cdc": await topic("cdc", config={"cleanup.policy": policy})}
        check_topics(spark, configured(compacted, sidings_kafka, tmp_path / policy))
        assert f"the topic {compacted['cdc']!r} has cleanup.policy={policy}: " in caplog.messages[-1]


def test_a_start_goes_on_where_kafka_does_not_tell_whether_it_compacts_a_topic(caplog: pytest.LogCaptureFixture):
    """Services that speak Kafka's protocol may refuse the question, each in its own way."""
    refused = Py4JJavaError("", SimpleNamespace(_target_id="o1"))
    compacted = SimpleNamespace(value=lambda: "compact")
    policies = {"refused": refused, "untold": None, "empty": SimpleNamespace(value=lambda: None), "rows": compacted}

    def policy_of(topic: str) -> Any:
        if isinstance(policy := policies[topic], Exception):
            raise policy
        return SimpleNamespace(get=lambda name: policy)

    jvm, admin = MagicMock(), MagicMock()
    jvm.org.apache.kafka.common.config.ConfigResource.side_effect = lambda kind, topic: topic
    futures = {topic: SimpleNamespace(get=lambda topic=topic: policy_of(topic)) for topic in policies}
    admin.describeConfigs.return_value.values.return_value = futures
    _tell_compacted(jvm, admin, list(policies))
    assert [line.split(":")[0] for line in caplog.messages] == ["the topic 'rows' has cleanup.policy=compact"]


@pytest.mark.long
async def test_a_start_that_fails_before_it_has_read_anything_binds_it_to_no_topic(
    spark: SparkSession, sidings_kafka: str, topics: Mapping[str, str], tmp_path: Path
):
    by = configured(topics, sidings_kafka, tmp_path)
    wrong = by.model_copy(update={"kafka_options": {"kafka.isolation.level": "nonsense"}})
    assert await ended(spark, wrong) == 1
    await delete_topics(sidings_kafka, [topics["cdc"]])
    await create_topic(sidings_kafka, topics["cdc"], partitions=3)
    await produce(sidings_kafka, topics["cdc"], header_rows("anew", [UPDATE] * 3))
    assert await ended(spark, by) == 0
    assert rows_of(await read(by)) == {("anew", ordinal) for ordinal in (1, 2, 3)}


@pytest.mark.chaos
async def test_a_secured_kafka_takes_the_documented_options_and_nothing_shows_the_password(
    spark: SparkSession,
    own_kafka: OwnKafka,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("INFO")
    kafka = await asyncio.to_thread(lambda: own_kafka(secure=True))
    names = {name: name for name in ("cdc", "customers", "addresses", "alerts")}
    for name in names:
        await create_topic(kafka.bootstrap, name, partitions=1)
    await produce(kafka.bootstrap, "cdc", header_rows("t", [UPDATE] * 3))

    def secured(password: str) -> Config:
        documented = block("cdc-transactions.md", "A secured Kafka", "toml")
        for text, ours in {
            "/etc/cdc/ca.pem": str(kafka.ca_file),
            'username="cdc"': f'username="{kafka.username}"',
            'password="…"': f'password="{password}"',
        }.items():
            assert documented.count(text) == 1
            documented = documented.replace(text, ours)
        options = tomllib.loads(documented)["kafka_options"]
        return configured(names, kafka.secure_bootstrap, tmp_path, kafka_options=options)

    assert await ended(spark, secured("a guess")) == 1
    assert "Authentication failed: Invalid username or password" in caplog.messages[-1]

    by = secured(kafka.password)
    query = await asyncio.to_thread(combine, spark, by, available_now=True)
    await asyncio.to_thread(query.awaitTermination)
    query.explain(extended=True)
    print(query.lastProgress, query.status, by, repr(by))
    assert rows_of(await read(configured(names, kafka.bootstrap, tmp_path))) == {("t", n) for n in (1, 2, 3)}
    said = capfd.readouterr()
    assert "MapInArrow" in said.out
    for text in (said.out, said.err, caplog.text):
        assert kafka.password not in text
        assert "a guess" not in text
    kept = [file.read_bytes() for file in Path(by.checkpoint).rglob("*") if file.is_file()]
    assert kept
    assert not any(kafka.password.encode() in content for content in kept)


@pytest.mark.chaos
async def test_kills_in_the_middle_of_micro_batches_lose_no_row(
    sidings_kafka: str, topics: Mapping[str, str], tmp_path: Path
):
    by = configured(topics, sidings_kafka, tmp_path, max_rows_per_trigger=40, report_seconds=1)
    file = tmp_path / "config.toml"
    file.write_text(toml(by))
    chance = random.Random(13)
    made = {f"t{number}": some_rows(chance) for number in range(100)}
    values: list[bytes | None] = [value for id, rows in made.items() for value in header_rows(id, rows)]
    chance.shuffle(values)  # so that nearly all transactions are open over many micro-batches
    await produce(sidings_kafka, topics["cdc"], values)
    expected = {(id, ordinal) for id, rows in made.items() for ordinal in range(1, len(rows) + 1)}
    log = tmp_path / "log"

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            command = [sys.executable, "-m", "tests.cdc_worker", str(file)]
            return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)

    def alive() -> None:
        assert process.poll() is None, log.read_text()[-4000:]

    def kill() -> None:
        os.killpg(process.pid, signal.SIGKILL)  # Python and its JVM
        process.wait()

    process = start()
    try:
        async with following(by, alive) as until:
            await until(bool, "the first event")
        kill()
        # When it has begun, when a part of the state is written, when it has ended.
        for moment in ("offsets/[0-9]*", "state/0/0/*.changelog", "commits/[0-9]*"):
            before = set(Path(by.checkpoint).glob(moment))
            process = start()
            await eventually(
                lambda moment=moment, before=before: (alive(), set(Path(by.checkpoint).glob(moment)) - before)[1],
                f"a new file {moment}",
                WAIT_SECONDS,
            )
            kill()
        assert not rows_of(await read(by)) >= expected, "it was killed too late to prove anything"
        process = start()
        async with following(by, alive) as until:
            found = await until(lambda found: rows_of(found) >= expected, "all transactions")
        assert rows_of(found) == expected
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait) == 0
    finally:
        if process.poll() is None:
            kill()
    text = log.read_text()
    assert "open transactions" in text
    assert "stopped: batch" in text
    rows = re.findall(r"batch \d+, \d+ s ago: (\d+) rows", text)
    assert rows
    assert all(int(number) <= 40 for number in rows)


@pytest.mark.chaos
def test_the_example_keeps_its_promises(sidings_postgres: str, sidings_kafka: str):
    command = [sys.executable, "-m", "examples.cdc", "--transactions", "60"]
    environment = os.environ | {"SIDINGS_POSTGRES": sidings_postgres, "SIDINGS_KAFKA": sidings_kafka}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "all is as it should be" in done.stdout
    assert "missing: [2]" in done.stdout
