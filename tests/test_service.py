"""The service: how the parts start, stop and fail together, and what it shows of itself."""

import asyncio
import json
import os
import resource
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, asynccontextmanager
from importlib.machinery import ModuleSpec
from socketserver import TCPServer
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.abc import AbstractTokenProvider
from prometheus_client import CollectorRegistry
from sidings import (
    ConfigurationError,
    ExecutorSettings,
    ForeignSchema,
    Job,
    KafkaSettings,
    Message,
    PostgresSettings,
    PostgresUnavailable,
    Registry,
    SchemaMissing,
    Service,
    StaticAssignment,
    Transaction,
    migrate,
)
from sidings.devstack.locations import free_port
from sidings.service import monitor as monitor_module
from sidings.service.monitor import Monitor, address_of
from sidings.waiting import done_unless_set

from .consumer_support import (
    Number,
    a_service,
    administering,
    effects_table,
    numbers,
    offset_reaches,
    produce,
    record,
    sample,
    stored_offsets,
)
from .support import ORIGIN, SECONDS, Ride, connected, drained, eventually, outcomes, value

HERE = StaticAssignment([ORIGIN])
TLS = ssl.create_default_context()


class Tokens(AbstractTokenProvider):
    async def token(self) -> Any:
        return "a token"


TOKENS: dict[str, Any] = {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": Tokens()}


async def get(service: Any, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body of a page."""
    host, port = service.http_address or ("", 0)

    def ask() -> tuple[int, str]:
        try:
            request = urllib.request.Request(f"http://{host}:{port}{path}", method=method)
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("setting", ["off", "local"])
async def test_a_start_tells_once_of_commits_that_do_not_wait_for_the_disk(database, caplog, setting):
    """Of transactions that a crash of Postgres loses then, jobs have run; only the guide said so."""
    async with connected(database) as connection:
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = {setting}')
    async with a_service(database, assignment=HERE):
        pass
    told = [r.levelname for r in caplog.records if "synchronous_commit is off in postgresql://" in r.getMessage()]
    assert told == ["WARNING"] * (setting == "off")


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": ""}, "service='': give the service's name"),
        ({"name": " tracker"}, "service=' tracker': give the service's name"),
        ({"name": "a\0b"}, r"service='a\\x00b': give the service's name"),
        ({"name": 3}, "service=3: give the service's name"),
        ({"kafka": "a:1", "assignment": HERE}, "exclude each other"),
        ({"topics": ["a"]}, "needs kafka="),
        ({"kafka": "a:1", "topics": "a"}, "give a list of topics"),
        ({"http": "somewhere"}, "give 'host:port' or a port"),
        ({"http": 65_536}, "give 'host:port' or a port"),
        ({"postgres": PostgresSettings(dsn="postgresql://x", schema_name="this"), "schema": "other"}, "contradicts"),
        ({"postgres": PostgresSettings(dsn="postgresql://x"), "schema": "No Good"}, "schema='No Good' is not usable"),
        ({"postgres": "postgresql://x", "schema": "No Good"}, "schema='No Good' is not usable"),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_the_remedy(options, text):
    with pytest.raises(ConfigurationError, match=text):
        Service(**{"name": "test", "prometheus": CollectorRegistry()} | options)


@pytest.mark.parametrize(
    ("given", "address"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), (8080, ("0.0.0.0", 8080)), (":0", ("0.0.0.0", 0)), ("[::1]:9", ("::1", 9))],
)
def test_the_http_address_is_a_host_and_a_port_or_a_port(given, address):
    assert address_of(given) == address


def test_the_monitor_starts_without_looking_up_the_name_of_its_host(monkeypatch: pytest.MonkeyPatch):
    """Where DNS does not answer, it takes half a minute, and the event loop stood still for as long."""
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", asked.append)
    monitor = Monitor("127.0.0.1:0", CollectorRegistry(), problems=list, not_ready=list)
    monitor.start()
    monitor.stop()
    assert asked == []


async def test_a_client_that_says_nothing_keeps_no_monitor_from_stopping_and_its_address_is_free_then():
    monitor = Monitor("127.0.0.1:0", CollectorRegistry(), problems=list, not_ready=lambda: ["not yet"])
    monitor.start()
    assert monitor.address is not None
    listening = SimpleNamespace(http_address=monitor.address)
    with socket.create_connection(monitor.address, timeout=SECONDS):
        assert await get(listening, "/health?verbose=1") == (200, '{"status": "ok"}')
        assert (await get(listening, "/ready"))[0] == 503
        assert await get(listening, "/health", "HEAD") == (200, "")  # as some probes ask
        assert await get(listening, "/ready", "HEAD") == (503, "")
        async with asyncio.timeout(5.0):  # it would hear of the client's silence after 10 s
            await asyncio.to_thread(monitor.stop)
    monitor.stop()
    host, port = listening.http_address
    another = Monitor(f"{host}:{port}", CollectorRegistry(), problems=list, not_ready=list)
    another.start()
    another.stop()


async def test_clients_that_never_end_their_requests_use_up_neither_threads_nor_files(monkeypatch, capfd, caplog):
    """Each kept a thread and a file, for as long as it sent a byte every 10 s; a process without a file left cannot
    connect to anything."""
    monkeypatch.setattr(monitor_module, "_MOST_CONNECTIONS", 3)
    registry = CollectorRegistry()
    monitor = Monitor("127.0.0.1:0", registry, problems=list, not_ready=list)
    monitor.start()
    assert monitor.address is not None
    listening = SimpleNamespace(http_address=monitor.address)

    def threads() -> int:
        return sum("process_request" in thread.name for thread in threading.enumerate())

    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(monitor.address, timeout=SECONDS)) for _ in range(8)]
        for client in slow:
            client.sendall(b"GET /health HTTP/1.1\r\nSlow: ")
        assert await asyncio.to_thread(slow[4].recv, 1) == b"", "the oldest make room"
        assert await get(listening, "/health") == (200, '{"status": "ok"}')
        await eventually(lambda: threads() == 2, threading.enumerate)
        slow[7].settimeout(0.0)
        with pytest.raises(BlockingIOError):  # not more of them than necessary
            slow[7].recv(1)
        slow[7].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await eventually(lambda: threads() == 0, threading.enumerate)
    monitor.stop()
    assert (capfd.readouterr().err, caplog.text) == ("", ""), "who hangs up writes no traceback"


async def test_while_no_file_is_left_a_probe_that_waits_takes_no_cpu_from_handlers(monkeypatch: pytest.MonkeyPatch):
    """The monitor tried to accept it again and again, without a pause, and the event loop got half of a core."""
    tries: list[float] = []
    accept = TCPServer.get_request

    def counted(server: TCPServer) -> Any:
        tries.append(time.monotonic())
        return accept(server)

    monkeypatch.setattr(TCPServer, "get_request", counted)
    monitor = Monitor("127.0.0.1:0", CollectorRegistry(), problems=list, not_ready=list)
    monitor.start()
    assert monitor.address is not None
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        probe.settimeout(SECONDS)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # which are open: not one more
            probe.connect(monitor.address)
            await eventually(lambda: len(tries) >= 4, lambda: tries)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert tries[3] - tries[0] >= 0.3, "after each that has failed it waits for a tenth of a second"
        probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await asyncio.to_thread(probe.recv, 100)).startswith(b"HTTP/1.0 200"), "it has kept its place"
    monitor.stop()


@pytest.mark.parametrize("http", ["[::1]:0", "[::]:0"])
async def test_the_pages_are_served_to_ipv6(http):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    monitor = Monitor(http, CollectorRegistry(), problems=list, not_ready=list)
    monitor.start()
    try:
        _, port = monitor.address or ("", 0)
        assert await get(SimpleNamespace(http_address=("[::1]", port)), "/health") == (200, '{"status": "ok"}')
    finally:
        monitor.stop()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bootstrap": ""}, "bootstrap"),
        ({"bootstrap": "a:9092,b:port"}, "bootstrap='a:9092,b:port': give host:port"),
        ({"bootstrap": " , "}, "bootstrap=' , ': give host:port"),
        ({"session_seconds": float("inf")}, "session_seconds: Input should be a finite number"),
        ({"batch_seconds": 31}, "batch_seconds: Input should be less than or equal to 30"),
        ({"fetch_bytes": 2**31}, "fetch_bytes: Input should be less than or equal to 2147483647"),
        ({"sesion_seconds": 3}, "sesion_seconds: there is no such field: is session_seconds meant?"),
        ({"session_seconds": "soon"}, "session_seconds"),
        ({"security_protocol": "SASL_SSL"}, "needs sasl_username= and sasl_password="),
        ({"security_protocol": "SASL_SSL", "sasl_username": "me"}, "needs sasl_username= and sasl_password="),
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}, "needs sasl_oauth_token_provider="),
        (
            {"sasl_username": "me", "sasl_password": "secret"},
            "^sasl_username= .*: give security_protocol='SASL_SSL' or 'SASL_PLAINTEXT', or leave it out",
        ),
        (TOKENS, "^sasl_oauth_token_provider= is given, .*'PLAINTEXT' .*: give security_protocol='SASL_SSL' or"),
        (
            {"sasl_mechanism": "GSSAPI"},
            "^sasl_mechanism= is given, .*'PLAINTEXT' .*: give security_protocol='SASL_SSL' or",
        ),
        ({"security_protocol": "SSL", **TOKENS}, "^sasl_oauth_token_provider= is given, .*: give security_protocol="),
        (
            {"security_protocol": "SASL_SSL", **TOKENS, "sasl_mechanism": "PLAIN"},
            "'PLAIN' does not use sasl_oauth_token_provider=: give sasl_mechanism='OAUTHBEARER'",
        ),
        (
            {"security_protocol": "SASL_SSL", **TOKENS, "sasl_username": "me"},
            "'OAUTHBEARER' does not use sasl_username=: give sasl_mechanism='PLAIN' or",
        ),
        (
            {"security_protocol": "SASL_SSL", "sasl_mechanism": "GSSAPI", "sasl_password": "secret"},
            "'GSSAPI' does not use sasl_password=: give sasl_mechanism='PLAIN' or",
        ),
        ({"cafile": "/dev/null"}, "^cafile= is given, .*: give security_protocol='SSL' or 'SASL_SSL', or leave it out"),
        ({"keyfile": "/dev/null"}, "^keyfile= is given, .*: give security_protocol='SSL' or"),
        ({"keyfile_password": "secret"}, "^keyfile_password= is given, .*: give security_protocol='SSL' or"),
        ({"ssl_context": TLS}, "^ssl_context= is given, .*: give security_protocol='SSL' or"),
        (
            {"security_protocol": "SSL", "cafile": "/dev/null", "keyfile": "/dev/null"},
            "^keyfile= is given without certfile=: give the certificate as well, or leave it out",
        ),
        (
            {"security_protocol": "SSL", "ssl_context": TLS, "certfile": "/dev/null"},
            "^ssl_context= is used as it is, without certfile=: load that into it",
        ),
        ({"security_protocol": "SSL", "cafile": "/no/such/file"}, "cafile='/no/such/file' is no file"),
        ({"rebalance_seconds": 50}, "must be longer than rebalance_seconds"),
    ],
)
def test_kafka_settings_that_cannot_work_are_refused_with_the_remedy(options, text):
    with pytest.raises(ConfigurationError, match=text):
        KafkaSettings(**{"bootstrap": "localhost:9092"} | options)


@pytest.mark.parametrize("there", [None, ModuleSpec("gssapi", None)])
def test_kerberos_without_its_library_is_refused(there, monkeypatch):
    """Each connection failed in an assertion of aiokafka's, as if Kafka were away."""
    monkeypatch.setattr("sidings.kafka.settings.find_spec", {"gssapi": there}.__getitem__)
    options: Any = {"bootstrap": "localhost:9092", "security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "GSSAPI"}
    if there is not None:
        assert KafkaSettings(**options)
        return
    with pytest.raises(ConfigurationError, match=r"needs the gssapi library: pip install 'aiokafka\[gssapi\]'"):
        KafkaSettings(**options)


def test_secrets_are_not_shown():
    login: Any = {"sasl_username": "me", "sasl_password": "geheim"}
    settings = KafkaSettings(bootstrap="a:1", security_protocol="SASL_PLAINTEXT", **login)
    assert "geheim" not in repr(settings)
    assert settings.client_options()["sasl_plain_password"] == "geheim"


def test_settings_come_from_the_environment_and_arguments_win(monkeypatch):
    for name, text in {
        "POSTGRES": "postgresql://db/tracker",
        "POSTGRES_POOL_SIZE": "3",
        "SCHEMA": "tracking",
        "KAFKA": "kafka:9092",
        "KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "KAFKA_SASL_USERNAME": "me",
        "KAFKA_SASL_PASSWORD": "secret",
        "EXECUTOR_CONCURRENCY": "7",
        "EXECUTOR_LEASE_SECONDS": "",
        "HTTP": ":0",
        "TOPICS": "a, b,",
    }.items():
        monkeypatch.setenv(f"SIDINGS_{name}", text)
    service: Any = Service.from_env("tracker", prometheus=CollectorRegistry(), topics=["c"])
    configuration = service._life._configuration
    assert configuration.postgres.model_dump(include={"dsn", "pool_size", "schema_name"}) == {
        "dsn": "postgresql://db/tracker",
        "pool_size": 3,
        "schema_name": "tracking",
    }
    assert configuration.kafka.bootstrap == "kafka:9092"
    assert configuration.kafka.sasl_username == "me"
    assert service.executor.settings.concurrency == 7
    assert service.executor.settings.lease_seconds == ExecutorSettings().lease_seconds
    assert configuration.topics == ("c",)
    assert Service.from_env("tracker", prometheus=CollectorRegistry())._life._configuration.topics == ("a", "b")
    assert service.registry.schema == "tracking"
    monkeypatch.setenv("SIDINGS_EXECUTOR_CONCURRENCY", "many")
    with pytest.raises(ConfigurationError, match="environment: SIDINGS_EXECUTOR_CONCURRENCY"):
        Service.from_env("tracker", prometheus=CollectorRegistry())
    monkeypatch.setenv("SIDINGS_KAFKA_PARTITIONERS", "crc32")
    with pytest.raises(ConfigurationError, match=r"^environment: SIDINGS_KAFKA_PARTITIONERS: give JSON$"):
        Service.from_env("tracker", prometheus=CollectorRegistry())


def test_the_schema_is_the_arguments_else_that_of_the_environment(monkeypatch):
    """The argument was refused, as if it contradicted something, and beside `postgres=` the variable had no effect."""
    dsn = "postgresql://db/tracker"

    def schema(**overrides: Any) -> str:
        service: Any = Service.from_env("tracker", prometheus=CollectorRegistry(), **overrides)
        assert service.registry.schema == service._life._configuration.postgres.schema_name
        return service.registry.schema

    monkeypatch.setenv("SIDINGS_POSTGRES", dsn)
    assert schema() == "sidings"
    assert schema(schema="tracking") == "tracking"
    monkeypatch.setenv("SIDINGS_SCHEMA", "tracking")
    assert schema() == "tracking"
    assert schema(schema="other") == "other"
    assert schema(postgres=dsn) == "tracking"
    assert schema(postgres=dsn, schema="other") == "other"
    assert schema(postgres=PostgresSettings(dsn=dsn)) == "tracking"
    assert schema(postgres=PostgresSettings(dsn=dsn), schema="other") == "other"
    assert schema(postgres=PostgresSettings(dsn=dsn, schema_name="own")) == "own"
    with pytest.raises(ConfigurationError, match="schema='other' contradicts"):
        schema(postgres=PostgresSettings(dsn=dsn, schema_name="own"), schema="other")
    with pytest.raises(ConfigurationError, match="schema='No Good' is not usable"):
        schema(schema="No Good")
    monkeypatch.delenv("SIDINGS_POSTGRES")
    assert schema(postgres=dsn) == "tracking"


async def test_what_needs_a_database_says_so():
    service = a_service(None)
    with pytest.raises(ConfigurationError, match="give postgres="):
        _ = service.executor
    with pytest.raises(ConfigurationError, match="give postgres="):
        async with service.transaction():
            pass
    with pytest.raises(ConfigurationError, match="give postgres="):
        await service.migrate()


# -- life -------------------------------------------------------------------------------------------------------------


async def test_included_registries_and_transactions_work_together(database):
    jobs = Registry()
    ran: list[int] = []

    @jobs.job(group="transport")
    async def ship(job: Job[Ride]) -> None:
        ran.append(job.payload.number)

    service = a_service(database, assignment=HERE, executor={"poll_seconds": 60.0})
    service.include(jobs)
    async with service:
        await service.executor.settled(SECONDS)
        async with service.transaction() as tx:
            await ship.enqueue(tx, Ride(transport="a", number=1), origin=ORIGIN)
        await eventually(lambda: ran == [1])  # woken by the commit: the poll comes in a minute
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with service.transaction() as tx:
                await ship.enqueue(tx, Ride(transport="a", number=2), origin=ORIGIN)
                raise ZeroDivisionError
        async with service.transaction() as tx:
            await ship.enqueue(tx, Ride(transport="a", number=3), origin=ORIGIN)
        await drained(database)
    assert ran == [1, 3]


async def test_migrate_makes_the_schema_of_the_services_choice(empty_database):
    service = a_service(empty_database, name="tracker", schema="tracking", assignment=HERE)
    assert await service.migrate()
    assert await service.migrate() == []
    assert await value(empty_database, "SELECT name FROM tracking.service") == "tracker"
    async with service:
        await service.executor.settled(SECONDS)


async def test_a_wrong_schema_ends_the_start_at_once(database, empty_database):
    with pytest.raises(ForeignSchema, match="belongs to the service 'test', not to 'other'"):
        await asyncio.wait_for(a_service(database, name="other", assignment=HERE).run(), SECONDS)
    with pytest.raises(SchemaMissing, match=r"service\.migrate"):
        await asyncio.wait_for(a_service(empty_database, assignment=HERE).run(), SECONDS)


async def test_a_failed_start_leaves_nothing_behind(empty_database):
    service = a_service(empty_database, assignment=HERE, http=f"127.0.0.1:{free_port()}")
    before = asyncio.all_tasks()
    with pytest.raises(SchemaMissing):
        async with service:
            pass
    assert asyncio.all_tasks() == before
    assert service.http_address is None
    assert sample(service, "sidings_running") == 0
    assert list(service.samples.collect()) == []


async def test_consumers_without_kafka_are_refused_at_the_start(database):
    service = a_service(database)
    service.consumer("positions", model=Number)(record)
    with pytest.raises(ConfigurationError, match=r"consumers of positions are declared: give kafka=.*SIDINGS_KAFKA"):
        async with service:
            pass


async def test_a_service_is_started_once(database):
    service = a_service(database, assignment=HERE)
    async with service:
        pass
    with pytest.raises(ConfigurationError, match="make another one"):
        async with service:
            pass


async def test_an_address_in_use_ends_the_start(database):
    async with a_service(database, assignment=HERE, http="127.0.0.1:0") as first:
        host, port = first.http_address
        with pytest.raises(ConfigurationError, match=r"cannot listen there: .*another worker .* a port of its own"):
            await a_service(database, http=f"{host}:{port}").run()


async def test_errors_of_the_body_come_out_as_they_are(database):
    with pytest.raises(ZeroDivisionError):
        async with a_service(database, assignment=HERE):
            raise ZeroDivisionError


@pytest.mark.parametrize("kind", [lambda: ValueError("a bug"), lambda: ExceptionGroup("of two", [ValueError("a bug")])])
async def test_errors_of_the_body_keep_their_cause_and_groups_of_one_stay_groups(database, kind):
    error, cause = kind(), KeyError("why")
    with pytest.raises((ValueError, ExceptionGroup)) as raised:
        async with a_service(database, assignment=HERE):
            raise error from cause
    assert raised.value is error
    assert error.__cause__ is cause


async def test_a_part_that_dies_brings_the_service_down_loudly(database, topic, sidings_kafka, caplog, monkeypatch):
    service = a_service(database, sidings_kafka)
    service.consumer(await topic(), model=Number)(record)
    running = asyncio.create_task(service.run())
    await eventually(lambda: service.executor.held)

    async def broken(_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("sidings.kafka.topic_loop.TopicLoop._next_batch", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(running, SECONDS)
    assert "the consumer has ended unexpectedly" in caplog.text
    assert await value(database, "SELECT count(*) FROM sidings.origin WHERE owner IS NOT NULL") == 0  # in good order


async def test_a_part_that_is_cancelled_by_others_brings_the_service_down_too(database):
    service = a_service(database, assignment=HERE)
    running = asyncio.create_task(service.run())
    await eventually(lambda: service.executor.held)
    service.executor._main.cancel()
    with pytest.raises(RuntimeError, match="the executor has ended although nobody asked it to"):
        await asyncio.wait_for(running, SECONDS)


async def test_a_stop_lets_running_handlers_and_the_current_batch_end(database, topic, sidings_kafka):
    await effects_table(database)
    name = await topic()
    service = a_service(database, sidings_kafka)
    begun, go_on, job_begun = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @service.job()
    async def slow(job: Job[Ride]) -> None:
        job_begun.set()
        await go_on.wait()

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 0:
            await slow.enqueue(tx, Ride())
        if message.value.n == 1:
            begun.set()
            await go_on.wait()
        await record(message, tx)

    await produce(sidings_kafka, name, [0])
    running = asyncio.create_task(service.run())
    await asyncio.wait_for(job_begun.wait(), SECONDS)
    await produce(sidings_kafka, name, range(1, 4))
    await asyncio.wait_for(begun.wait(), SECONDS)
    service.stop()
    await eventually(service._life.consumer._stopping.is_set)
    assert not running.done()
    go_on.set()
    await asyncio.wait_for(running, SECONDS)
    assert await numbers(database) == [0, 1]  # the message at work was committed, and the next ones not taken up
    assert await stored_offsets(database) == {(name, 0): 2}
    assert await outcomes(database) == ["succeeded"]
    assert await value(database, "SELECT count(*) FROM sidings.origin WHERE owner IS NOT NULL") == 0


async def members(kafka: str, group: str) -> int:
    """How many members the broker knows of."""
    async with administering(kafka) as admin:
        [answer] = await admin.describe_consumer_groups([group])
    [found] = answer.to_object()["groups"]
    return len(found["members"])


async def test_a_stop_leaves_the_group_at_once(database, topic, sidings_kafka, monkeypatch):
    """A member that only falls silent keeps its partitions from others until its session is over."""
    monkeypatch.setattr("sidings.service.life._LEAVE_SECONDS", 3_600.0)
    name = await topic()
    service = a_service(database, sidings_kafka, settings={"fetch_seconds": 0.05, "group": name})
    service.consumer(name, model=Number)(record)
    async with asyncio.timeout(SECONDS):
        async with service:
            await eventually(lambda: service._life.consumer.joined)
            assert await members(sidings_kafka, name) == 1
        assert await members(sidings_kafka, name) == 0


async def test_signals_stop_gracefully_and_then_firmly(database, topic, sidings_kafka):
    name = await topic()
    service = a_service(database, sidings_kafka, executor={"shutdown_seconds": 600.0})
    begun = asyncio.Event()
    meeting = asyncio.Barrier(3)  # of both handlers and the test: it takes place only while both still run

    async def meet_for_ever() -> None:
        while True:
            await asyncio.sleep(0.01)
            await meeting.wait()

    @service.job()
    async def endless(job: Job[Ride]) -> None:
        begun.set()
        await meet_for_ever()

    @service.consumer(name, timeout=None)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        if message.value.n == 0:
            await endless.enqueue(tx, Ride())
            return
        await meet_for_ever()

    await produce(sidings_kafka, name, [0])
    running = asyncio.create_task(service.run())
    await asyncio.wait_for(begun.wait(), SECONDS)
    await produce(sidings_kafka, name, [1])
    await asyncio.wait_for(meeting.wait(), SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    await eventually(service._life.consumer._stopping.is_set)
    for _ in range(5):
        await asyncio.wait_for(meeting.wait(), SECONDS)
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, SECONDS)
    assert await value(database, "SELECT next_offset FROM sidings.consumer_offset") == 1  # undone, and not lost
    assert await value(database, "SELECT count(*) FROM sidings.job") == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_a_signal_ends_a_start_that_waits_for_a_postgres_that_hangs(own_postgres):
    """It accepts connections and says nothing; each part waited for it in turn."""
    postgres = own_postgres()
    await asyncio.to_thread(postgres.pause)
    service = a_service(PostgresSettings(dsn=postgres.dsn, connect_seconds=3_600.0), "127.0.0.1:1", http="127.0.0.1:0")
    running = asyncio.create_task(service.run())
    await eventually(lambda: service.http_address)
    address = service.http_address
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, SECONDS)
    assert service.http_address is None
    assert not list(service.samples.collect())  # nothing is left of it
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


async def test_a_start_that_runs_into_a_timeout_of_its_own_has_failed_and_was_not_stopped():
    async def work() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await done_unless_set(asyncio.Event(), work())


# -- without servers --------------------------------------------------------------------------------------------------


async def test_it_starts_without_kafka_and_without_postgres_and_waits_for_them(own_postgres, topic, sidings_kafka):
    postgres = own_postgres()
    await migrate(postgres.dsn, service="test")
    await effects_table(postgres.dsn)
    await asyncio.to_thread(postgres.stop)
    name = await topic()
    await produce(sidings_kafka, name, range(5))
    door = free_port()  # behind it, nobody answers yet
    service = a_service(postgres.dsn, f"127.0.0.1:{door}", http="127.0.0.1:0")
    service.consumer(name, model=Number)(record)
    async with service:
        assert (await get(service, "/ready"))[0] == 503
        with pytest.raises(PostgresUnavailable, match="no connection to Postgres"):
            async with service.transaction():
                pass
        async with relay(door, sidings_kafka):
            await eventually(lambda: service._life.consumer.joined)
        await asyncio.to_thread(postgres.start)

        async def all_done() -> bool:
            return len(await numbers(postgres.dsn)) == 5

        await eventually(all_done)
        await eventually(lambda: service._life.not_ready() == [], service._life.not_ready)
        assert (await get(service, "/ready"))[0] == 200
    assert await numbers(postgres.dsn) == list(range(5))


@asynccontextmanager
async def relay(port: int, target: str):
    """Passes on what comes to `port`."""
    host, _, number = target.partition(",")[0].rpartition(":")
    pumps: list[asyncio.Task[None]] = []

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            sink.write(data)
        sink.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(number))
        pumps.extend([asyncio.create_task(pump(reader, back)), asyncio.create_task(pump(there, writer))])

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def test_a_foreign_schema_that_appears_after_the_start_ends_the_service(own_postgres):
    postgres = own_postgres()
    await migrate(postgres.dsn, service="somebody else")
    await asyncio.to_thread(postgres.stop)
    service = a_service(postgres.dsn, assignment=HERE)
    running = asyncio.create_task(service.run())
    await eventually(lambda: running.done() or service._life.running)
    assert not running.done()  # it has started without Postgres
    await asyncio.to_thread(postgres.start)
    with pytest.raises(ForeignSchema):
        await asyncio.wait_for(running, SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("why", ["takes no connections", "has a table locked"])
async def test_it_starts_while_postgres_refuses_it_for_the_time_being(sidings_postgres, database, why):
    """As during a migration, or where its disk is full. The start ended with an error of asyncpg's own."""
    service, name = a_service(database, assignment=HERE), database.rpartition("/")[2]
    async with connected(sidings_postgres) as elsewhere, connected(database) as locking:
        if why == "has a table locked":
            await locking.execute("BEGIN; LOCK TABLE sidings.service")
        else:
            await elsewhere.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        running = asyncio.create_task(service.run())
        try:
            await eventually(lambda: running.done() or service._life.running)
            assert not running.done()
            assert any("the executor has not reached Postgres yet" in problem for problem in service.problems())
            await locking.execute("ROLLBACK")
        finally:
            await elsewhere.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        await eventually(lambda: service.executor.held)
        service.stop()
        await asyncio.wait_for(running, SECONDS)


# -- what it shows ----------------------------------------------------------------------------------------------------


async def test_metrics_and_health_are_served(database, topic, sidings_kafka):
    await effects_table(database)
    name = await topic()
    service = a_service(database, sidings_kafka, http="127.0.0.1:0")
    service.consumer(name, model=Number)(record)
    await produce(sidings_kafka, name, range(3))
    async with service:
        await eventually(offset_reaches(database, name, 3))
        await eventually(lambda: not service._life.not_ready())
        assert (await get(service, "/health")) == (200, '{"status": "ok"}')
        assert (await get(service, "/ready")) == (200, '{"status": "ok"}')
        handled = f'sidings_consumer_messages_total{{result="handled",service="test",topic="{name}"}} 3.0'
        status, text = 0, ""

        async def counted() -> bool:  # a moment after the commit
            nonlocal status, text
            status, text = await get(service, "/metrics")
            return handled in text

        await eventually(counted, lambda: text)
        assert status == 200
        assert 'sidings_held_origins{service="test"} 1.0' in text
        assert (await get(service, "/other"))[0] == 404


SEVERAL_PROCESSES = """
import asyncio, logging, sys
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from sidings import Service

logging.basicConfig()

async def main():
    http = 0 if "http" in sys.argv else None
    async with Service("tracker", postgres="postgresql://somebody@127.0.0.1:1/nowhere", http=http):
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=sys.argv[1])
        print(generate_latest(registry).decode())

asyncio.run(main())
"""


@pytest.mark.parametrize(("variable", "http", "warns"), [(True, [], 1), (True, ["http"], 0), (False, [], 0)])
def test_metrics_that_prometheus_client_puts_together_without_the_gauges_are_warned_of(tmp_path, variable, http, warns):
    """`SidingsServiceIsGone` came for no service that was gone, and all seemed well: nothing in Sidings said a word."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)} if variable else None
    command = [sys.executable, "-c", SEVERAL_PROCESSES, tmp_path, *http]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert ("sidings_database_errors_total" in done.stdout) == variable
    assert "sidings_problems" not in done.stdout
    assert done.stderr.count("PROMETHEUS_MULTIPROC_DIR is set, and http= is not") == warns


async def test_health_answers_and_turns_bad_while_the_event_loop_hangs(database):
    import threading
    import time

    settings = {"stall_warn_seconds": 0.2}
    async with a_service(database, assignment=HERE, http="127.0.0.1:0", executor=settings) as service:
        await service.executor.settled(SECONDS)
        host, port = service.http_address
        answers: list[tuple[int, str]] = []

        def ask_until_it_is_bad() -> None:
            deadline = time.monotonic() + SECONDS
            while not answers and time.monotonic() < deadline:
                try:
                    urllib.request.urlopen(f"http://{host}:{port}/health", timeout=5).close()
                    time.sleep(0.02)
                except urllib.error.HTTPError as error:
                    answers.append((error.code, error.read().decode()))

        asking = threading.Thread(target=ask_until_it_is_bad)
        asking.start()
        asking.join()  # this is the hanging event loop
        ((status, body),) = answers
        assert status == 503
        assert "the event loop has not answered" in json.loads(body)["problems"][0]
        await eventually(lambda: service.problems() == [])


async def test_health_turns_bad_when_a_consumer_is_stuck(database, topic, sidings_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.vitals._STUCK_SECONDS", 0.5)
    name = await topic()
    service = a_service(database, sidings_kafka)
    go_on = asyncio.Event()

    @service.consumer(name, timeout=None)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await go_on.wait()

    await produce(sidings_kafka, name, [0])
    async with service:
        await eventually(lambda: any(f"the consumer of '{name}' is stuck" in p for p in service.problems()))
        go_on.set()
        await eventually(lambda: service.problems() == [])
