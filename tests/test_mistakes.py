"""What a new user gets wrong is refused where it stands, with the remedy; and what can only wait says that it does."""

import asyncio
import gc
import logging
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial, wraps
from secrets import token_hex
from traceback import format_exception
from typing import Annotated, Any, Generic, TypeVar, cast

import asyncpg
import pytest
from aiokafka.abc import AbstractTokenProvider
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, FutureDate, FutureDatetime, PastDatetime
from sidings import (
    Admin,
    ConfigurationError,
    Directory,
    DirectoryBehind,
    EnqueueError,
    ExecutorSettings,
    InvalidMessage,
    InvalidPayload,
    Job,
    KafkaSettings,
    Message,
    NotInTransaction,
    OutboxSettings,
    PostgresSettings,
    PostgresUnavailable,
    Registry,
    Retry,
    SchemaMissing,
    Service,
    Snooze,
    StaticAssignment,
    Tick,
    Transaction,
    migrate,
)
from sidings.devstack.topics import create_topic, delete_topics
from sidings.executor import Executor, connect
from sidings.executor.transactional import Transactional
from sidings.kafka.transactions import Transactions
from sidings.schema import connect_any
from sidings.schema.refusals import refused_option

from .cli_support import refused as refused_command
from .consumer_support import Number, a_service, offset_reaches, produce
from .support import ORIGIN, SECONDS, connected, eventually, fetch, refusing

POSTGRES, KAFKA = "postgresql://localhost/nowhere", "localhost:9092"


class Ride(BaseModel):
    id: str


def a_declaration() -> Any:
    """A service that is never started."""
    return Service("test", postgres=POSTGRES, kafka=KAFKA, prometheus=CollectorRegistry())


async def a_job(job: Job[Ride]) -> None: ...


async def a_batch(jobs: list[Job[Ride]]) -> None: ...


async def a_message(message: Message[Number], tx: Transaction) -> None: ...
async def a_lone_message(message: Message[Number]) -> None: ...


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dsn", "text"),
    [
        ("", "begins with no scheme: give postgresql://"),
        ("host=localhost dbname=x", "begins with no scheme"),
        ("mysql://me:secret@localhost/x", "begins with 'mysql://'"),
        ("postgresql+asyncpg://me:secret@localhost/x", r"begins with 'postgresql\+asyncpg://'"),
        ("postgresql://me:secret@localhost:70968/x", "a port in it is none: give 1 to 65535"),  # 5432, by its 16 bits
        ("postgresql://me:secret@one:5432,[::1]:0/x", "a port in it is none"),
        ("postgresql://me:secret@/x?host=one,two&port=5432,70968", "a port in it is none"),
    ],
)
def test_a_dsn_that_is_none_of_postgres_is_refused_without_showing_a_password(dsn, text):
    with pytest.raises(ConfigurationError, match=text) as refused:
        Service("test", postgres=dsn, prometheus=CollectorRegistry())
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"postgres": {"dsn": "secret"}}, "postgres= is a dict: give a DSN, or PostgresSettings"),
        ({"kafka": [KAFKA]}, "kafka= is a list: give 'host:port', or KafkaSettings"),
        ({"postgres": POSTGRES, "executor": {"concurrency": 3}}, "executor= is a dict: give ExecutorSettings"),
        ({"postgres": POSTGRES, "outbox": {"relay": False}}, "outbox= is a dict: give OutboxSettings"),
        ({"postgres": POSTGRES, "assignment": ["a/0"]}, r"assignment= is a list: give StaticAssignment\(\[...\]\)"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_named(options, text):
    with pytest.raises(ConfigurationError, match=text):
        Service("test", prometheus=CollectorRegistry(), **options)


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        (PostgresSettings, {"dsn": POSTGRES, "call_seconds": 1e9}),
        (PostgresSettings, {"dsn": POSTGRES, "call_seconds": math.inf}),
        (PostgresSettings, {"dsn": POSTGRES, "connect_seconds": math.inf}),
        (PostgresSettings, {"dsn": POSTGRES, "pool_size": 10**9}),
        (ExecutorSettings, {"lease_seconds": math.inf}),
        (ExecutorSettings, {"history_days": 10**9}),
        (OutboxSettings, {"lease_seconds": math.inf}),
        (OutboxSettings, {"max_message_bytes": 2**31}),
        (OutboxSettings, {"batch_bytes": 2**31}),
        (KafkaSettings, {"bootstrap": KAFKA, "session_seconds": 3e6}),
        (KafkaSettings, {"bootstrap": KAFKA, "request_seconds": 4e6, "rebalance_seconds": 3e6}),
        (KafkaSettings, {"bootstrap": KAFKA, "fetch_seconds": 3e6}),
    ],
)
def test_a_setting_that_postgres_or_kafka_cannot_take_is_named(settings: Any, given: dict[str, Any]):
    """The start failed with Python's errors, Postgres refused the executor for ever, or no group was joined."""
    with pytest.raises(ConfigurationError, match=list(given)[-1]):
        settings(**given)


@pytest.mark.parametrize("bootstrap", ["one:74628", "one:9092,two:0", "[::1]:74628"])
def test_a_port_that_kafka_cannot_have_is_refused(bootstrap: str):
    with pytest.raises(ConfigurationError, match=r"bootstrap=.*: give host:port, .* with ports from 1 to 65535"):
        Service("test", kafka=bootstrap, prometheus=CollectorRegistry())


def test_one_origin_is_not_taken_for_the_origins_that_are_its_letters():
    with pytest.raises(ConfigurationError, match=r"give a list of origins: \['orders/0'\]"):
        StaticAssignment("orders/0")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: migrate(cast(Any, PostgresSettings(dsn=POSTGRES)), service="test"),
            "dsn is a PostgresSettings: give p",
        ),
        (lambda: migrate(cast(Any, None), service="test"), "dsn is a NoneType: give postgresql://"),
        (lambda: migrate(POSTGRES, service="test", schema=cast(Any, None)), "schema=None is not usable"),
        (lambda: Admin(cast(Any, asyncpg.Pool), timeout=cast(Any, "5")), "timeout='5': give the seconds"),
    ],
)
async def test_what_a_migration_or_an_admin_cannot_use_is_named(call, told):
    """It was an AttributeError, or one of Python's about a comparison."""
    with pytest.raises(ConfigurationError, match=told):
        await call()


# -- handlers ---------------------------------------------------------------------------------------------------------


async def yields(job: Job[Ride]) -> Any:
    yield job


def yields_too(job: Job[Ride]) -> Any:
    yield job


async def takes_a_transaction(job: Job[Ride], tx: Transaction) -> None: ...


@pytest.mark.parametrize(
    ("handler", "options", "text"),
    [
        (yields, {}, "yields: the handler has a `yield`"),
        (yields_too, {}, "yields_too: the handler has a `yield`"),
        (takes_a_transaction, {}, "called with one argument.* missing a required argument: 'tx'"),
        (partial(takes_a_transaction, tx=None), {"name": "p"}, r"p: functools.partial\(.* give payload=YourModel"),
        (a_job, {"retry": 3}, r"a_job: retry=3: give Retry\(wait="),
        (a_job, {"group": 5}, "group=5: give the name of a field"),
    ],
)
def test_a_job_type_that_could_only_fail_is_refused(handler, options, text):
    with pytest.raises(ConfigurationError, match=text):
        Registry().job(**options)(handler)


async def a_tick(job: Job[Tick]) -> None: ...
async def many_messages(messages: list[Message[Number]], tx: Transaction) -> None: ...
async def many_lone_messages(messages: list[Message[Number]]) -> None: ...


STATELESS: dict[str, Any] = {"stateless": True, "dead_letter": "a.dlq"}


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda service: service.job()(a_batch), "a_batch: the handler takes a list of jobs: give batch="),
        (lambda service: service.job(payload=Ride)(a_batch), "takes a list of jobs: give batch="),
        (lambda service: service.job(payload=Ride, batch=9)(a_job), "with batch= the handler takes a list of jobs"),
        (lambda service: service.consumer("a")(many_messages), "a: the handler takes a list of messages: give batch="),
        (lambda service: service.consumer("a", model=Number)(many_messages), "a list of messages: give batch="),
        (lambda service: service.topic("a", type_field="t").on("b")(many_messages), "a list of messages: give batch="),
        (
            lambda service: service.consumer("a", **STATELESS)(many_lone_messages),
            "messages: annotate its first",
        ),
        (
            lambda service: service.consumer("a", batch=9, model=Number)(a_message),
            "with batch= the handler takes a list",
        ),
    ],
)
def test_a_handler_of_lists_without_a_batch_is_refused_and_one_of_a_single_job_with_it(declare, text):
    """Without the model in the decorator, the refusal asked for an annotation that was there; with it, each call
    failed."""
    with pytest.raises(ConfigurationError, match=text):
        declare(a_declaration())


class Carrier:
    """An object whose methods are to be handlers."""

    async def a_job(self, job: Job[Ride]) -> None: ...
    async def a_tick(self, job: Job[Tick]) -> None: ...
    async def a_message(self, message: Message[Number], tx: Transaction) -> None: ...
    async def an_odd_message(self, message: Any, tx: Any = None) -> None: ...
    async def a_lone_message(self, message: Message[Number]) -> None: ...


@pytest.mark.parametrize(
    ("declare", "name"),
    [
        (lambda service, its: service.job()(its.a_job), "a_job"),
        (lambda service, its: service.job(payload=Ride)(its.a_job), "a_job"),
        (lambda service, its: service.periodic(every=60)(its.a_tick), "a_tick"),
        (lambda service, its: service.consumer("a")(its.a_message), "a_message"),
        (lambda service, its: service.consumer("a", model=Number)(its.an_odd_message), "an_odd_message"),
        (lambda service, its: service.topic("a", type_field="t").on("b")(its.a_message), "a_message"),
        (lambda service, its: service.consumer("a", **STATELESS)(its.a_lone_message), "a_lone_message"),
    ],
)
def test_a_method_is_refused_in_its_class_and_a_handler_of_its_object(declare, name):
    """The refusal asked for an annotation that was there. One with defaults was called with the message for itself."""
    with pytest.raises(ConfigurationError, match=rf"Carrier.{name} is a method, .*\(an_object.{name}\)"):
        declare(a_declaration(), Carrier)
    declare(a_declaration(), Carrier())


@pytest.mark.parametrize(
    "declare",
    [
        lambda service, given: service.job(name="a", payload=Ride)(given),
        lambda service, given: service.periodic(every=60, name="a")(given),
        lambda service, given: service.consumer("a")(given),
        lambda service, given: service.consumer("a", **STATELESS)(given),
    ],
)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (classmethod(Carrier.a_job), "a: Carrier.a_job is a method, .*(an_object.a_job)"),  # type: ignore[arg-type]
        (Registry().job()(a_job), r"a: JobType\('a_job'\) is a job type already: write a function of its own"),
    ],
)
def test_what_another_decorator_has_made_of_a_handler_is_told_by_its_name(declare, given, text):
    """The refusal asked for an `async def` where there was one, or was an error of `inspect`'s."""
    with pytest.raises(ConfigurationError, match=text):
        declare(a_declaration(), given)


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda service: service.periodic(every=math.inf)(a_tick), "a_tick: every=inf: give 0.1 seconds to 366 days"),
        (lambda service: service.periodic(every=math.nan)(a_tick), "a_tick: every=nan: give 0.1 seconds to 366 days"),
        (lambda service: service.job(policy=None)(a_job), "a_job: policy=None: give 'serial', 'latest' or 'parallel'"),
        (lambda service: service.job(payload=a_declaration())(a_job), "a_job: payload=.*: give a type that pydantic"),
        (lambda service: service.job(payload="a Ride")(a_job), "a_job: payload='a Ride': give a type that pydantic"),
        (lambda service: service.consumer("a", model="a Ride")(a_message), "a: model='a Ride': give a type that"),
        (lambda service: service.include(None), r"include\(None\): give a Registry"),
        (lambda _: Service("test", topics=None, prometheus=None), "topics=None: give a list of topics"),  # type: ignore[arg-type]
        (lambda service: service.job(batch="9")(a_batch), "a_batch: batch='9': give 2 to 500"),
        (lambda service: service.job(batch=2.5)(a_batch), "a_batch: batch=2.5: give 2 to 500"),
        (lambda service: service.periodic("0 6 * * *", timezone=2)(a_tick), "a_tick: timezone=2 is unknown"),
        (lambda _: Service("test", prometheus="9090"), "prometheus= is a str: give a CollectorRegistry"),  # type: ignore[arg-type]
        (lambda _: StaticAssignment(None), "give at least one origin"),  # type: ignore[arg-type]
        (lambda _: StaticAssignment([0]), "give at least one origin"),  # type: ignore[list-item]
        (
            lambda _: StaticAssignment(["a/0", "orders"]),
            r"StaticAssignment\(\['orders'\]\): give 'topic/partition', such",
        ),
        (lambda service: service.job(name="a\0b")(a_job), r"name='a\\x00b' holds a control character"),
        (lambda service: service.job(name="a\x1fb")(a_job), r"name='a\\x1fb' holds a control character"),
        (lambda service: service.job(name="a\ud800")(a_job), r"name='a\\ud800' holds half a character"),
        (lambda service: service.periodic(every=1, name="a\0b")(a_tick), r"name='a\\x00b' holds a control character"),
    ],
)
def test_what_a_declaration_cannot_use_is_named_there(declare, text):
    """Python's and pydantic's own errors told of it, or only those of Postgres, at the first enqueue."""
    with pytest.raises(ConfigurationError, match=text):
        declare(a_declaration())


T = TypeVar("T")
AnyRide = TypeVar("AnyRide", bound=Ride)


class Box(BaseModel, Generic[T]):
    held: T


async def a_job_of_any(job: Job[T]) -> None: ...
async def a_job_of_rides(job: Job[AnyRide]) -> None: ...
async def a_job_of_some(job: Job[list[T | None]]) -> None: ...
async def a_job_of_boxes(job: Job[dict[str, Box[AnyRide]]]) -> None: ...
async def a_batch_of_any(jobs: list[Job[AnyRide]]) -> None: ...
async def any_message(message: Message[T], tx: Transaction) -> None: ...
async def any_lone_message(message: Message[Annotated[AnyRide, "a ride"]]) -> None: ...


@pytest.mark.parametrize(
    ("declare", "text"),
    [
        (lambda service: service.job()(a_job_of_any), "a_job_of_any: payload=~T: .* TypeVar .*give payload=YourModel"),
        (lambda service: service.job()(a_job_of_rides), "a_job_of_rides: payload=~AnyRide: .*give payload=YourModel"),
        (lambda service: service.job()(a_job_of_some), "a_job_of_some: payload=list.*~T.*give payload=YourModel"),
        (lambda service: service.job()(a_job_of_boxes), "a_job_of_boxes: payload=dict.*give payload=YourModel"),
        (lambda service: service.job(batch=9)(a_batch_of_any), "a_batch_of_any: payload=~AnyRide: .*=YourModel"),
        (lambda service: service.consumer("a")(any_message), "a: model=~T: .*give model=YourModel"),
        (lambda service: service.consumer("a", **STATELESS)(any_lone_message), "a: model=.*~AnyRide.*=YourModel"),
        (lambda service: service.topic("a", type_field="t").on("b")(any_message), "a: model=~T: .*=YourModel"),
        (lambda service: service.directory("a", model=T), "'a': model=~T: .*give model=YourModel"),
    ],
)
def test_a_type_variable_is_no_model(declare, text):
    """To pydantic it is `Any`: the handler got a dict, or with a bound `enqueue` raised an AttributeError."""
    with pytest.raises(ConfigurationError, match=text):
        declare(a_declaration())


class Departure(BaseModel):
    at: list[FutureDatetime | None]


@dataclass
class Holiday:
    begins: FutureDate


@pytest.mark.parametrize("payload", [Departure, Holiday, FutureDatetime, dict[str, Departure]])
def test_a_payload_that_is_none_any_more_when_its_time_has_come_is_refused(payload: Any):
    """It is validated again when its job runs. The job was held for good, though `drain` had let it pass."""
    with pytest.raises(ConfigurationError, match=r"a_job: payload=.* is held if the time has come .*AwareDatetime"):
        Registry().job(payload=payload)(a_job)


def test_a_time_that_has_to_be_past_stays_so():
    past = Registry().job(payload=PastDatetime)(a_job)
    assert past.dump(datetime(2020, 1, 1, tzinfo=UTC)) == '"2020-01-01T00:00:00Z"'


def test_a_handler_of_any_model_can_be_declared_with_one():
    service = a_declaration()
    assert service.job(payload=Ride)(a_job_of_rides).load('{"id": "a"}') == Ride(id="a")
    assert service.job(payload=Box[Ride], name="b")(a_job_of_any).load('{"held": {"id": "a"}}').held == Ride(id="a")
    service.job(payload=Box, name="c")(a_job_of_any)  # of anything
    service.consumer("a", model=Ride)(any_message)


def test_partial_functions_are_handlers_and_without_a_model_they_are_refused_with_a_word():
    """They were, with an error of Python's `typing`; also for periodic jobs, which need no model."""

    async def handle(more: int, message: Any, tx: Transaction) -> None: ...

    service = Service("test", postgres=POSTGRES, kafka=KAFKA, prometheus=CollectorRegistry())
    handler: Any = partial(handle, 1)
    with pytest.raises(ConfigurationError, match=r"positions: functools.partial\(.* give model=YourModel"):
        service.consumer("positions")(handler)
    service.consumer("positions", model=Ride)(handler)
    service.periodic(every=60, name="tick")(partial(takes_a_transaction, tx=cast(Any, None)))


def test_handlers_may_take_more_that_has_been_given():
    """The stateless one was refused, as one that takes a transaction; the others without a model, with other words."""

    async def handle(message: Message[Ride], tx: Transaction, *, carrier: object) -> None: ...

    async def default(message: Message[Ride], tx: Transaction, carrier: object = None) -> None: ...

    async def stateless(message: Message[Ride], *, carrier: object) -> None: ...

    service = Service("test", postgres=POSTGRES, kafka=KAFKA, prometheus=CollectorRegistry())
    with pytest.raises(ConfigurationError, match=r"positions: functools.partial\(.* give model=YourModel"):
        service.consumer("positions")(partial(handle, carrier=1))
    service.consumer("positions", model=Ride)(partial(handle, carrier=1))
    service.consumer("etas")(default)
    service.consumer("rides", model=Ride, stateless=True, dead_letter="rides.dlq")(partial(stateless, carrier=1))
    with pytest.raises(ConfigurationError, match="must be `async def on_x"):
        service.consumer("more", model=Ride, stateless=True, dead_letter="rides.dlq")(stateless)


def supplied(handler: Any, count: int) -> Any:
    """A decorator that gives the handler a connection, say, as its last argument."""

    async def one(message: Any) -> None:
        await handler(message, None)

    async def two(message: Any, tx: Any) -> None:
        await handler(message, tx, None)

    return wraps(handler)(one if count == 1 else two)


def passed_on(handler: Any) -> Any:
    """One that takes whatever comes, as to log how long it has taken."""

    @wraps(handler)
    async def call(*given: Any, **named: Any) -> None:
        await handler(*given, **named)

    return call


def needing(handler: Any) -> Any:
    """One whose function takes more than the handler does."""

    @wraps(handler)
    async def call(*given: Any, carrier: object) -> None:
        await handler(*given)

    return call


async def takes_more(message: Message[Ride], tx: Transaction, carrier: object) -> None: ...


DECLARED: list[tuple[Any, Any, int, Any]] = [
    (lambda service: service.job(), takes_a_transaction, 1, a_job),
    (lambda service: service.periodic(every=60), lambda job, tx: None, 1, a_tick),
    (lambda service: service.consumer("a"), takes_more, 2, a_message),
    (lambda service: service.consumer("a", **STATELESS), a_message, 1, Carrier().a_lone_message),
    (lambda service: service.topic("a", type_field="t").on("b"), takes_more, 2, a_message),
]


@pytest.mark.parametrize(("declare", "takes_one_more", "count", "takes_enough"), DECLARED)
def test_a_decorated_handler_takes_what_its_decorator_takes(declare, takes_one_more, count, takes_enough):
    """It was asked for what the decorator gives it; and accepted where each call could only fail."""
    for wrong in (takes_one_more, passed_on(takes_one_more), passed_on(passed_on(takes_one_more))):
        with pytest.raises(ConfigurationError):
            declare(a_declaration())(wrong)
    declare(a_declaration())(supplied(takes_one_more, count))
    declare(a_declaration())(passed_on(takes_enough))
    with pytest.raises(ConfigurationError, match=r"required .*argument: 'carrier'|must be `async def on_x"):
        declare(a_declaration())(needing(takes_enough))


def test_a_decorator_that_may_give_the_rest_is_told_how_to_say_so():
    with pytest.raises(ConfigurationError, match="name the decorator's parameters instead of taking"):
        a_declaration().job()(passed_on(takes_a_transaction))
    with pytest.raises(ConfigurationError, match=r"there is no transaction: missing .* instead of taking"):
        a_declaration().consumer("a", **STATELESS)(passed_on(a_message))
    with pytest.raises(ConfigurationError, match=r"a message and a transaction: missing .* instead of taking"):
        a_declaration().consumer("a")(passed_on(takes_more))


def test_a_handler_is_refused_also_where_it_was_declared_with_a_transaction_before():
    service = a_declaration()
    with pytest.raises(ConfigurationError, match="with stateless=True there is no transaction"):
        service.consumer("b", **STATELESS)(service.consumer("a")(a_message))


def test_a_decorated_decoder_takes_what_its_decorator_takes():
    def supplied(function: Any) -> Any:
        return wraps(function)(lambda message: function(message, None))

    def decode(message: Message[bytes | None], carrier: object) -> object: ...

    with pytest.raises(ConfigurationError, match="it cannot be called with the message alone"):
        a_declaration().consumer("a", model=Ride, decoder=cast(Any, decode))(a_message)
    a_declaration().consumer("a", model=Ride, decoder=supplied(decode))(a_message)


@pytest.mark.parametrize("given", [a_job, "a_job", Ride])
def test_a_job_decorator_without_parentheses_is_refused_with_the_line_to_write(given):
    declare: Any = Registry().job
    with pytest.raises(ConfigurationError, match=r"job\(.*\): write @service.job\(\), .* by name, as in .*group="):
        declare(given)


@pytest.mark.parametrize("given", [a_job, 3600])
def test_a_periodic_decorator_without_a_schedule_is_refused(given):
    declare: Any = a_declaration().periodic
    with pytest.raises(ConfigurationError, match=r'periodic\(.*\): give .*"0 6 \* \* \*".* every='):
        declare(given)


@pytest.mark.parametrize("given", [a_message, Ride, 5])
def test_a_message_type_that_is_no_text_is_refused(given):
    declare: Any = a_declaration().topic("positions", type_field="type").on
    with pytest.raises(ConfigurationError, match=r"positions: on\(.*\): name the type, .*on\('SomeType'\)"):
        declare(given)


def test_a_consumer_without_a_topic_is_refused_by_its_name():
    declare: Any = a_declaration().consumer
    with pytest.raises(ConfigurationError, match=r"consumer\(a_message\): name one topic, .* such as 'positions'"):
        declare(a_message)


def test_a_plain_function_with_defaults_is_a_handler():
    def tell(job: Job[Ride], carrier: str = "one") -> None: ...

    assert Registry().job()(tell).name == "tell"


def test_a_periodic_job_for_another_payload_is_refused():
    with pytest.raises(ConfigurationError, match=r"a_job: the payload of a periodic job is a Tick.*Job\[Tick\]"):
        Registry().periodic(every=1)(a_job)

    async def by_annotation(job: Job[Tick]) -> None: ...
    async def without(job: Any) -> None: ...

    Registry().periodic(every=1)(by_annotation)
    Registry().periodic(every=1)(without)


@pytest.mark.parametrize("topic", ["", "positions/3", "a topic", "x" * 250, ["a", "b"], a_message])
def test_what_no_topic_can_be_called_is_refused(topic):
    service = a_declaration()
    for declare in (service.consumer, lambda name: service.topic(name, type_field="type"), service.directory):
        with pytest.raises(ConfigurationError, match="name one topic, of 1 to 249 letters"):
            declare(topic)


@pytest.mark.parametrize("topic", ["", "positions/3", "a topic", 5])
def test_a_topic_to_join_that_cannot_be_is_refused(topic: Any):
    with pytest.raises(ConfigurationError, match=r"topics\(.*\): name one topic, of 1 to 249 letters"):
        Service("test", kafka="localhost:9092", topics=["positions", topic], prometheus=CollectorRegistry())


async def test_a_home_that_cannot_be_a_topic_is_refused():
    service = a_declaration()
    service.job(group="id", home="Positions topic")(a_job)
    with pytest.raises(ConfigurationError, match=r"home\('Positions topic'\): name one topic"):
        await service.__aenter__()


def test_a_dead_letter_topic_that_cannot_be_is_refused():
    async def handle(message: Message[Number]) -> None: ...

    with pytest.raises(ConfigurationError, match=r"dead_letter\('a topic'\): name one topic"):
        a_declaration().consumer("positions", stateless=True, dead_letter="a topic")(handle)


def test_a_consumer_that_could_only_fail_is_refused():
    service = a_declaration()
    with pytest.raises(ConfigurationError, match=r"positions: retry=3: give Retry\("):
        service.consumer("positions", retry=3)(a_message)
    with pytest.raises(ConfigurationError, match="with batch= the handler takes a list of messages"):
        service.consumer("positions", batch=10)(a_message)


@pytest.mark.parametrize(
    ("settings", "given", "text"),
    [
        (ExecutorSettings, {"concurency": 3}, "concurency: there is no such field: is concurrency meant?"),
        (ExecutorSettings, {"poll_seconds": math.inf}, "poll_seconds: Input should be a finite number"),
        (OutboxSettings, {"batchsize": 3, "window": 0}, "window: .*; batchsize: there is no .* batch_size meant"),
        (OutboxSettings, {"routes": [("positions", "direct")]}, "routes: give a table of names and values"),
        (PostgresSettings, {"dsn": POSTGRES, "pool_size": 0}, "pool_size: Input should be greater than or equal to 1"),
        (PostgresSettings, {"dsn": POSTGRES, "password": ["geheim"]}, "password: give a text, or a plain function"),
        (PostgresSettings, {"dsm": "geheim", "password": "geheim"}, "dsn: is missing; dsm: there is no .*dsn meant"),
    ],
)
def test_all_settings_tell_what_is_wrong_by_its_field_and_show_no_value(settings, given, text):
    with pytest.raises(ConfigurationError, match=f"^{settings.__name__}: {text}") as told:
        settings(**given)
    assert "geheim" not in "".join(format_exception(told.value))


def test_an_environment_variable_that_is_wrong_is_named_as_it_is_written(monkeypatch):
    monkeypatch.setenv("SIDINGS_POSTGRES", POSTGRES)
    monkeypatch.setenv("SIDINGS_POSTGRES_POOL_SIZE", "many")
    with pytest.raises(ConfigurationError, match=r"^environment: SIDINGS_POSTGRES_POOL_SIZE: Input should be"):
        Service.from_env("test", prometheus=CollectorRegistry())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"KAFKA": "a:1,"}, "SIDINGS_KAFKA: bootstrap='a:1,': give host:port"),
        (
            {"KAFKA": KAFKA, "KAFKA_CAFILE": "/nowhere"},
            "SIDINGS_KAFKA_SECURITY_PROTOCOL, SIDINGS_KAFKA_CAFILE: cafile= ",
        ),
        (
            {"KAFKA": KAFKA, "KAFKA_SECURITY_PROTOCOL": "SSL", "KAFKA_CAFILE": "/nowhere"},
            "SIDINGS_KAFKA_CAFILE: cafile='/nowhere' is no file",
        ),
        (
            {"KAFKA": KAFKA, "KAFKA_SECURITY_PROTOCOL": "SASL_SSL"},
            "SIDINGS_KAFKA_SECURITY_PROTOCOL, SIDINGS_KAFKA_SASL_MECHANISM, SIDINGS_KAFKA_SASL_USERNAME, ",
        ),
        (
            {"KAFKA": KAFKA, "KAFKA_SECURITY_PROTOCOL": "SASL_SSL", "KAFKA_SASL_MECHANISM": "OAUTHBEARER"},
            (
                "SIDINGS_KAFKA_SASL_MECHANISM: sasl_mechanism='OAUTHBEARER' needs sasl_oauth_token_provider=, which "
                "only code can give: kafka=KafkaSettings(..., sasl_oauth_token_provider=...)"
            ),
        ),
        (
            {"KAFKA": KAFKA, "KAFKA_REQUEST_SECONDS": "10"},
            "SIDINGS_KAFKA_REBALANCE_SECONDS, SIDINGS_KAFKA_REQUEST_SECONDS: request_seconds=",
        ),
        ({"POSTGRES": "localhost/x"}, "SIDINGS_POSTGRES: PostgresSettings: dsn: it begins with no scheme"),
        ({"POSTGRES": "postgresql://a:b@c:0/d"}, "SIDINGS_POSTGRES: PostgresSettings: dsn: a port in it is none"),
        ({"POSTGRES": POSTGRES, "SCHEMA": "My-Schema"}, "SIDINGS_SCHEMA: schema='My-Schema' is not usable"),
        ({"SCHEMA": "My-Schema"}, "SIDINGS_SCHEMA: schema='My-Schema' is not usable"),
        ({"HTTP": "80a"}, "SIDINGS_HTTP: http='80a': give 'host:port'"),
        ({"KAFKA": KAFKA, "TOPICS": "a b"}, "SIDINGS_TOPICS: topics('a b'): name one topic"),
        ({"KAFKA": KAFKA, "TOPICS": "a,outbox"}, "SIDINGS_TOPICS: topics('outbox'): relays lease outbox/0"),
        ({"TOPICS": "a"}, "SIDINGS_TOPICS: topics= needs kafka=: "),
    ],
)
def test_what_only_the_whole_finds_wrong_is_told_by_the_variable_too(given, text, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(f"SIDINGS_{name}", value)
    in_code = {} if "POSTGRES" in given else {"postgres": POSTGRES}
    with pytest.raises(ConfigurationError, match=f"^environment: {re.escape(text)}"):
        Service.from_env("test", prometheus=CollectorRegistry(), **in_code)


@pytest.mark.parametrize("lines", [2, 30])  # the second is too long for a file's name
@pytest.mark.parametrize("name", ["CAFILE", "CERTFILE", "KEYFILE"])
def test_a_key_in_place_of_its_files_name_is_shown_by_no_error(name, lines, monkeypatch, tmp_path):
    (tmp_path / "pem").touch()
    secret = "geheim/" + "x" * 57
    key = "\n".join(["-----BEGIN PRIVATE KEY-----", *[secret] * lines, "-----END PRIVATE KEY-----\n"])
    monkeypatch.setenv("SIDINGS_KAFKA", KAFKA)
    monkeypatch.setenv("SIDINGS_KAFKA_SECURITY_PROTOCOL", "SSL")
    monkeypatch.setenv("SIDINGS_KAFKA_CERTFILE", str(tmp_path / "pem"))
    for value, text in (
        (key, "holds a certificate or key itself: give the path of a file with it"),
        ("geheim" * 50, "cannot be looked at as a file: File name too long"),
    ):
        monkeypatch.setenv(f"SIDINGS_KAFKA_{name}", value)
        told_text = f"^environment: SIDINGS_KAFKA_{name}: {name.lower()}= {text}$"
        with pytest.raises(ConfigurationError, match=told_text) as told:
            Service.from_env("test", postgres=POSTGRES, prometheus=CollectorRegistry())
        error: BaseException | None = told.value
        while error is not None:
            assert "geheim" not in "".join(format_exception(error))
            error = error.__context__


def test_an_argument_that_wins_over_the_environment_is_not_called_a_variable(monkeypatch):
    monkeypatch.setenv("SIDINGS_HTTP", "80a")
    monkeypatch.setenv("SIDINGS_KAFKA", KAFKA)
    Service.from_env("test", http=0, prometheus=CollectorRegistry())
    with pytest.raises(ConfigurationError, match=r"^http='90b': give"):
        Service.from_env("test", http="90b", prometheus=CollectorRegistry())
    with pytest.raises(ConfigurationError, match=r"^environment: SIDINGS_KAFKA: kafka= and assignment= exclude"):
        Service.from_env("test", assignment=StaticAssignment([ORIGIN]), http=0, prometheus=CollectorRegistry())


def test_an_environment_variable_that_is_almost_a_setting_is_told_of(monkeypatch, caplog):
    for name in ("SIDINGS_EXECUTOR_CONCURENCY", "SIDINGS_KAFKA_VERSION", "SIDINGS_KAFKA_SERVICE_PORT"):
        monkeypatch.setenv(name, "3")  # the last as Kubernetes sets it for a service
    Service.from_env("test", postgres=POSTGRES, prometheus=CollectorRegistry())
    assert [record.getMessage() for record in caplog.records] == [
        "SIDINGS_EXECUTOR_CONCURENCY is no setting and has no effect: is SIDINGS_EXECUTOR_CONCURRENCY meant?"
    ]


def test_a_variable_by_the_long_name_of_one_that_is_shorter_is_told_of(monkeypatch, caplog):
    for name in ("KAFKA_BOOTSTRAP", "POSTGRES_DSN", "POSTGRES_SCHEMA_NAME"):
        monkeypatch.setenv(f"SIDINGS_{name}", "x")
    Service.from_env("test", postgres=POSTGRES, prometheus=CollectorRegistry())
    assert [record.getMessage() for record in caplog.records] == [
        "SIDINGS_KAFKA_BOOTSTRAP is no setting and has no effect: is SIDINGS_KAFKA meant?",
        "SIDINGS_POSTGRES_DSN is no setting and has no effect: is SIDINGS_POSTGRES meant?",
        "SIDINGS_POSTGRES_SCHEMA_NAME is no setting and has no effect: is SIDINGS_SCHEMA meant?",
    ]


LIKELY = {
    "KAFKA_BOOTSTRAP_SERVERS": "KAFKA",  # Kafka's own word
    "KAFKA_BOOTSTRAP_SERVER": "KAFKA",
    "KAFKA_SERVERS": "KAFKA",
    "KAFKA_BROKERS": "KAFKA",
    "KAFKA_URL": "KAFKA",
    "BOOTSTRAP": "KAFKA",
    "KAFKA_PASSWORD": "KAFKA_SASL_PASSWORD",
    "KAFKA_GROUP_ID": "KAFKA_GROUP",
    "GROUP": "KAFKA_GROUP",
    "DSN": "POSTGRES",
    "DATABASE_URL": "POSTGRES",
    "POSTGRES_URI": "POSTGRES",
    "POSTGRES_SCHEMA": "SCHEMA",
    "PASSWORD": "POSTGRES_PASSWORD",
    "POOL_SIZE": "POSTGRES_POOL_SIZE",
    "CONCURRENCY": "EXECUTOR_CONCURRENCY",
    "CONCURENCY": "EXECUTOR_CONCURRENCY",
    "LEASE_SECONDS": "EXECUTOR_LEASE_SECONDS",
}


@pytest.mark.parametrize("name", LIKELY)
def test_a_variable_by_a_word_of_others_or_without_its_prefix_is_told_of(name, monkeypatch, caplog):
    """With SIDINGS_KAFKA_BOOTSTRAP_SERVERS a service was one without Kafka, without a word."""
    monkeypatch.setenv(f"SIDINGS_{name}", "x")
    Service.from_env("test", postgres=POSTGRES, prometheus=CollectorRegistry())
    assert [record.getMessage() for record in caplog.records] == [
        f"SIDINGS_{name} is no setting and has no effect: is SIDINGS_{LIKELY[name]} meant?"
    ]


def test_no_variable_of_somebody_elses_is_told_of(monkeypatch, caplog):
    """As Kubernetes sets them in each pod for services that are called `sidings`, or so with something behind, as an
    operator of Kafka or Postgres calls them; and as our own tools know them."""
    links = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_TCP_CLIENTS", "PORT"]
    links += [f"PORT_5432_TCP{part}" for part in ("", "_PROTO", "_PORT", "_ADDR")]
    services = ("", "KAFKA_", "KAFKA_BOOTSTRAP_", "KAFKA_BROKERS_", "POSTGRES_", "POSTGRES_RW_", "EXECUTOR_", "GROUP_")
    tools = ("KAFKA_VERSION", "SPARK_JARS", "DEVSTACK_HOME", "CHAOS_SECONDS", "BY")
    for name in (*(f"{service}{link}" for service in services for link in links), *tools, "LOG_LEVEL", "KAFKA_TOPIC"):
        monkeypatch.setenv(f"SIDINGS_{name}", "tcp://10.0.0.11:5432")
    Service.from_env("test", postgres=POSTGRES, prometheus=CollectorRegistry())
    assert [record.getMessage() for record in caplog.records] == []


def test_a_variable_of_a_table_that_is_not_read_is_told_of(monkeypatch, caplog):
    """Beside `kafka=` in code TLS and password in the environment meant plain text, without a word."""

    def told(**overrides: Any) -> list[str]:
        caplog.clear()
        Service.from_env("test", prometheus=CollectorRegistry(), **overrides)
        return [record.getMessage() for record in caplog.records]

    monkeypatch.setenv("SIDINGS_SCHEMA", "tracking")  # which counts beside postgres= as well
    for name, value in {"SECURITY_PROTOCOL": "SASL_SSL", "SASL_USERNAME": "me", "SASL_PASSWORD": "geheim"}.items():
        monkeypatch.setenv(f"SIDINGS_KAFKA_{name}", value)
    monkeypatch.setenv("SIDINGS_KAFKA_GROUP", "")
    for name in ("SSL_CONTEXT", "SASL_OAUTH_TOKEN_PROVIDER"):  # no settings: no text can say them
        monkeypatch.setenv(f"SIDINGS_KAFKA_{name}", "somebody's")
    kafka = "SIDINGS_KAFKA_SASL_PASSWORD, SIDINGS_KAFKA_SASL_USERNAME, SIDINGS_KAFKA_SECURITY_PROTOCOL"
    none = "not set (kafka=None in code says that there is to be none)"
    assert told(postgres=POSTGRES) == [f"{kafka}: not read by from_env, as SIDINGS_KAFKA is {none}"]
    in_code = [f"{kafka}: not read by from_env, as kafka= is given in code"]
    assert told(postgres=POSTGRES, kafka=KAFKA) == in_code
    assert told(postgres=POSTGRES, kafka=None) == []
    for name in ("SSL_CONTEXT", "SASL_OAUTH_TOKEN_PROVIDER"):
        monkeypatch.delenv(f"SIDINGS_KAFKA_{name}")
    monkeypatch.setenv("SIDINGS_KAFKA", KAFKA)
    assert told(postgres=POSTGRES) == []
    assert told(postgres=POSTGRES, kafka=KAFKA) == in_code
    monkeypatch.setenv("SIDINGS_POSTGRES_POOL_SIZE", "3")
    monkeypatch.setenv("SIDINGS_EXECUTOR_NOTIFY", "true")
    assert told(postgres=POSTGRES, executor=ExecutorSettings()) == [
        "SIDINGS_POSTGRES_POOL_SIZE: not read by from_env, as postgres= is given in code",
        "SIDINGS_EXECUTOR_NOTIFY: not read by from_env, as executor= is given in code",
    ]
    none = none.replace("kafka", "postgres")
    assert told(kafka=None) == [f"SIDINGS_POSTGRES_POOL_SIZE: not read by from_env, as SIDINGS_POSTGRES is {none}"]
    monkeypatch.setenv("SIDINGS_POSTGRES", POSTGRES)
    assert told() == []


def test_what_is_wrong_in_a_table_that_is_not_read_ends_no_start(monkeypatch, caplog):
    """The error asked for a token provider in code, and came again once there was one."""

    def start(**overrides: Any) -> list[str]:
        caplog.clear()
        Service.from_env("test", prometheus=CollectorRegistry(), **overrides)
        return [record.getMessage() for record in caplog.records]

    class Tokens(AbstractTokenProvider):
        async def token(self) -> Any:
            return "a token"

    given = {"bootstrap": KAFKA, "security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}
    in_code = KafkaSettings.model_validate({**given, "sasl_oauth_token_provider": Tokens()})
    monkeypatch.setenv("SIDINGS_POSTGRES", POSTGRES)
    monkeypatch.setenv("SIDINGS_KAFKA", KAFKA)
    for name in ("security_protocol", "sasl_mechanism"):
        monkeypatch.setenv(f"SIDINGS_KAFKA_{name.upper()}", given[name])
    [told] = start(kafka=in_code)
    assert told.startswith("SIDINGS_KAFKA_SASL_MECHANISM, SIDINGS_KAFKA_SECURITY_PROTOCOL: ")
    monkeypatch.delenv("SIDINGS_KAFKA_SECURITY_PROTOCOL")
    monkeypatch.setenv("SIDINGS_KAFKA_SASL_MECHANISM", "GSSAPI")
    assert start(kafka=None) == []
    assert len(start(kafka=KAFKA)) == 1
    monkeypatch.setenv("SIDINGS_POSTGRES_POOL_SIZE", "many")
    monkeypatch.setenv("SIDINGS_EXECUTOR_CONCURRENCY", "many")
    assert len(start(kafka=None, postgres=POSTGRES, executor=ExecutorSettings())) == 2


# -- enqueueing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"delay": "5"}, "delay='5': give seconds between"),
        ({"delay": -5}, "delay=-5: give seconds between"),
        ({"group": 5}, "group=5 is no text: give a str"),
        ({"origin": 5}, "origin=5 is no text: give a str"),
        *(
            ({"origin": wrong}, f"origin='{wrong}': give 'topic/partition', as of service.origin_for.key, 'positions'.")
            for wrong in ("positions", "positions/", "positions/x", "positions/-1", "positions/01", "positions/²", "/3")
        ),
        ({"origin": " positions/3"}, "origin=' positions/3': give 'topic/partition'"),
        ({"origin": "positions/3\n"}, r"origin='positions/3\\n': give 'topic/partition'"),
        ({"unique_key": 5}, "unique_key=5 is no text: give a str"),
        ({"priority": "1"}, "priority='1': give a whole number"),
        ({"headers": {"a": 1}}, "headers: 'a'=1: give texts"),
        ({"headers": ["a"]}, r"headers=\['a'\]: give a dict of texts"),
    ],
)
async def test_what_cannot_be_stored_is_named_and_leaves_the_transaction_usable(database, options, text):
    job_type = Registry().job()(a_job)
    async with connected(database) as connection, connection.transaction():
        with pytest.raises(EnqueueError, match=text):
            await job_type.enqueue(connection, Ride(id="t"), **{"origin": ORIGIN} | options)
        await job_type.enqueue(connection, Ride(id="t"), origin=ORIGIN)
    assert len(await fetch(database, "SELECT FROM sidings.job")) == 1


@pytest.mark.parametrize("payloads", ["t-1", b"t-1", Ride(id="t-1"), None, aiter])
async def test_a_single_payload_is_not_taken_for_those_that_are_its_letters(database, payloads):
    """Of a text three jobs were stored, without a word."""
    types = Registry()
    async with connected(database) as connection, connection.transaction():
        for name, model in (("texts", str), ("numbers", int), ("all", Any)):
            job_type = types.job(name=name, payload=model)(a_job)
            with pytest.raises(InvalidPayload, match=f"payloads= of '{name}' is a .*: give a list of payloads, or a "):
                await job_type.enqueue_many(connection, payloads, origin=ORIGIN)
    assert await fetch(database, "SELECT FROM sidings.job") == []


async def test_what_cannot_be_published_is_named_and_leaves_the_transaction_usable(database):
    """It was told as a tuple that cannot be unpacked, of which nobody had heard."""
    outbox = Service("test", postgres=database, prometheus=CollectorRegistry()).outbox
    wrong: Any = [
        (lambda tx: outbox.publish_many(tx, "etas", 5), "messages= is a int: give a list of pairs of key and value"),
        (lambda tx: outbox.publish_many(tx, "etas", {"t-1": b"x"}), r"etas: messages\[0\] is no pair of key and"),
        (lambda tx: outbox.publish_many(tx, "etas", [b"x"]), r"etas: messages\[0\] is no pair of key and value"),
        (lambda tx: outbox.publish(tx, "etas", value=b"x", headers=5), "headers=5: give a dict, or pairs of name"),
        (lambda tx: outbox.publish(tx, "etas", value=b"x", headers=["a"]), r"headers=\['a'\]: give a dict, or pairs"),
    ]
    async with connected(database) as connection, connection.transaction():
        for call, told in wrong:
            with pytest.raises(InvalidMessage, match=told):
                await call(connection)
        receipt = await outbox.publish_many(connection, "etas", (pair for pair in [("t-1", b"x")]))
    with pytest.raises(ConfigurationError, match=r"published\(None\): give the Receipt that `await publish"):
        await outbox.published(cast(Any, None))
    assert [row["id"] for row in await fetch(database, "SELECT id FROM sidings.outbox")] == list(receipt.ids)


class Scan(BaseModel):
    image: bytes


async def test_bytes_that_are_no_text_are_refused_with_the_setting_that_lets_them_arrive(database):
    """It named a byte. Bytes that are texts, as a test has them, go through all the same."""
    job_type = Registry().job(payload=Scan)(a_job)
    outbox = Service("test", postgres=database, prometheus=CollectorRegistry()).outbox
    told = r"holds bytes that are no UTF-8, .* ConfigDict\(ser_json_bytes='base64', val_json_bytes='base64'\)"
    async with connected(database) as connection, connection.transaction():
        await job_type.enqueue(connection, Scan(image=b"a text"), origin=ORIGIN)
        with pytest.raises(InvalidPayload, match=told):
            await job_type.enqueue(connection, Scan(image=b"\xff"), origin=ORIGIN)
        with pytest.raises(InvalidMessage, match=told):
            await outbox.publish(connection, "scans", key="k", value=Scan(image=b"\xff"))


async def test_types_that_are_declared_behind_an_include_are_the_services_and_stored_in_its_schema(empty_database):
    """However deep: a type without a handler waits for ever, and another schema is another service's."""
    modules, jobs = Registry(), Registry()
    service = Service(
        "test",
        postgres=empty_database,
        schema="rides",
        assignment=StaticAssignment([ORIGIN]),
        prometheus=CollectorRegistry(),
    )
    modules.include(jobs)
    service.include(modules)
    job_type = jobs.job()(a_job)
    assert list(service.registry) == [job_type]
    await service.migrate()
    async with connected(empty_database) as connection, connection.transaction():
        id = await job_type.enqueue(connection, Ride(id="t"), origin=ORIGIN)
        assert await connection.fetchval("SELECT id FROM rides.job") == id


async def test_a_transaction_that_is_over_is_told_of(database, sidings_kafka):
    job_type = Registry().job()(a_job)
    async with a_service(database, sidings_kafka) as service:
        async with service.transaction() as tx:
            pass
        with pytest.raises(NotInTransaction, match=r"this transaction is over: .* `async with`"):
            await job_type.enqueue(tx, Ride(id="t"), origin=ORIGIN)
        with pytest.raises(NotInTransaction, match=r"this transaction is over: .* `async with`"):
            await service.outbox.publish(tx, "etas", value=b"x")


# -- the life ---------------------------------------------------------------------------------------------------------


async def test_what_does_not_run_is_ended_without_a_word_as_often_as_you_like(empty_database):
    """As a fixture does whose start has failed: an empty AssertionError took that error's place."""
    service = Service("test", postgres=empty_database, prometheus=CollectorRegistry())
    for _ in range(2):
        await service.__aexit__(None, None, None)
    with pytest.raises(SchemaMissing):
        await service.__aenter__()
    await service.__aexit__(None, None, None)
    await Directory("terminals", kafka=KAFKA, model=Ride).__aexit__(None, None, None)


@pytest.mark.parametrize(
    "asked",
    [
        {"offset": {"0": 1}},  # as JSON gives back what `end_offsets` gave
        {"offset": 5, "partition": "0"},
        {"offset": "5"},
        {"offset": [5]},
    ],
)
async def test_a_position_that_no_directory_can_reach_is_not_waited_for(asked):
    """For ever, where no timeout is given; some were AttributeErrors."""
    terminals = a_declaration().directory("terminals", model=Ride)
    with pytest.raises(
        ConfigurationError, match=r"'terminals': wait_until\(.*: give an offset, a number, or positions"
    ):
        await asyncio.wait_for(terminals.wait_until(**asked), SECONDS)


@pytest.mark.parametrize("function", [5, None, lambda: None])
def test_what_cannot_be_told_of_a_change_is_refused(function):
    """It was counted, and logged, with each change."""
    terminals = a_declaration().directory("terminals", model=Ride)
    with pytest.raises(ConfigurationError, match="'terminals': on_change"):
        terminals.on_change(function)
    with pytest.raises(ConfigurationError, match="'terminals': on_change"):
        terminals.on_change(load=True)(function)
    terminals.on_change({}.update)  # of which Python does not know what it takes
    with pytest.raises(ConfigurationError, match=r"'terminals': on_change\(load='yes'\): give True or False"):
        terminals.on_change(load="yes")


async def test_a_directory_that_is_entered_twice_still_ends(topic, sidings_kafka):
    """Its end raised the second start's error, and left the first's task behind."""
    name = await topic(config={"cleanup.policy": "compact"})
    terminals = Directory(name, kafka=sidings_kafka, model=Ride, prometheus=CollectorRegistry())
    async with terminals:
        with pytest.raises(ConfigurationError, match="has been started before: make another one"):
            await terminals.__aenter__()
        with pytest.raises(ConfigurationError, match=r"on_change\(load=True\) comes after its start: declare"):
            terminals.on_change(load=True)
        await terminals.wait_until(timeout=SECONDS)
    assert [task for task in asyncio.all_tasks() if name in task.get_name()] == []


async def test_a_directory_that_has_not_been_started_says_so():
    """It was told that its end offsets are not known yet, and nothing of where its metrics would not go."""
    terminals = a_declaration().directory("terminals", model=Ride)
    with pytest.raises(DirectoryBehind, match=r"is not there after 0.01 s: it has not been started"):
        await terminals.wait_until(timeout=0.01)
    with pytest.raises(ConfigurationError, match="'terminals': prometheus=None: give a CollectorRegistry"):
        Directory("terminals", kafka=KAFKA, model=Ride, prometheus=cast(Any, None))


# -- the start --------------------------------------------------------------------------------------------------------


async def test_a_service_that_could_do_nothing_does_not_start(sidings_kafka):
    with pytest.raises(ConfigurationError, match=r"neither Postgres nor Kafka.*SIDINGS_POSTGRES.*SIDINGS_KAFKA"):
        async with Service("test", prometheus=CollectorRegistry()):
            pass
    service = Service("test", kafka=sidings_kafka, prometheus=CollectorRegistry())
    service.job()(a_job)
    with pytest.raises(ConfigurationError, match=r"job types are declared \(a_job\), and there is no Postgres"):
        async with service:
            pass


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 has brought them")
@pytest.mark.parametrize("stateless", [False, True])
async def test_a_consumer_in_an_event_loop_that_begins_tasks_at_once_is_refused(stateless: bool):
    """aiokafka failed there again and again; it was told as a connection to Kafka that fails."""
    service = a_declaration()
    if stateless:
        service.consumer("positions", model=Number, stateless=True, dead_letter="positions.dlq")(a_lone_message)
    else:
        service.consumer("positions")(a_message)
    loop = asyncio.get_running_loop()
    loop.set_task_factory(cast(Any, asyncio).eager_task_factory)
    try:
        with pytest.raises(ConfigurationError, match=r"eager_task_factory.*: leave that factory out"):
            async with asyncio.timeout(SECONDS), service:
                pass
    finally:
        loop.set_task_factory(None)


async def test_a_database_without_the_schema_is_the_only_complaint(empty_database, sidings_kafka, caplog):
    for arguments in ({"kafka": sidings_kafka}, {"assignment": StaticAssignment([ORIGIN])}):
        metrics = CollectorRegistry()
        with pytest.raises(SchemaMissing, match=r"call `await service.migrate\(\)` once"):
            async with Service("test", postgres=empty_database, prometheus=metrics, **arguments):
                pass
        assert list(metrics.collect()) == []  # nothing of it is left
    assert [r.getMessage() for r in caplog.records if r.name.startswith("sidings")] == []


@pytest.mark.parametrize(
    ("part", "text"), [("password", "password authentication failed"), ("database", "does not exist")]
)
async def test_a_dsn_that_the_server_refuses_is_named_without_its_password(database, sidings_kafka, part, text, caplog):
    dsn = f"{database}x" if part == "database" else database.replace("@", "secret@")
    with pytest.raises(
        ConfigurationError, match=rf"^postgres=: .*127.0.0.1:\d+/\S+ refuses.*{text}.*SIDINGS_POSTGRES"
    ) as refused:
        async with Service("test", postgres=dsn, kafka=sidings_kafka, prometheus=CollectorRegistry()):
            pass
    assert "secret" not in str(refused.value)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("sidings")] == []


UNREADABLE = {
    "postgresql://me:se/cret@localhost/x": "cannot be read: .* percent-encoded",
    "postgresql://me:secret@localhost/x?sslmode=strict": "`sslmode` parameter must be one of",
}


@pytest.mark.parametrize("dsn", UNREADABLE)
async def test_a_dsn_that_cannot_be_read_ends_the_start_without_showing_a_password(dsn):
    with pytest.raises(ConfigurationError, match=f"^postgres=: .*{UNREADABLE[dsn]}") as started:
        async with Service("test", postgres=dsn, kafka="127.0.0.1:1", prometheus=CollectorRegistry()):
            pass
    with pytest.raises(ConfigurationError, match=f"^postgres=: .*{UNREADABLE[dsn]}") as migrated:
        await Service("test", postgres=dsn, prometheus=CollectorRegistry()).migrate()
    for refused in (started, migrated):
        assert "'se" not in "".join(format_exception(refused.value))


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("channel_binding=require", r"channel_binding .*unrecognized.*: leave it out"),
        ("gssencmode=disable", r"gssencmode .*unrecognized.*: leave it out"),
        ("connect_timeout=10", r"connect_timeout .*: leave it out.*PostgresSettings\(connect_seconds=\)"),
        ("lock_timeout=3000&work_mem=much", r"option work_mem .*invalid value"),
        ("options=-c%20idle_timeout=5", r"option idle_timeout .*unrecognized"),
        ("max_connections=5", r"max_connections .*cannot be changed"),  # passed for an outage
    ],
)
async def test_an_option_of_the_dsn_that_the_server_refuses_is_named(database, option, told):
    """The start ended with the bare `UndefinedObjectError`; asyncpg hands to the server what it does not know."""
    dsn = f"{database}?{option}"
    service = Service("test", postgres=dsn, prometheus=CollectorRegistry())
    for attempt in (
        service.__aenter__,
        service.migrate,
        Executor("test", Registry(), PostgresSettings(dsn=dsn), prometheus=CollectorRegistry()).start,
        lambda: connect(PostgresSettings(dsn=dsn), for_handlers=True),
    ):
        with pytest.raises(ConfigurationError, match=rf"^postgres=: the server at \S+/\S+ refuses .*{told}"):
            await attempt()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("08P01", "unsupported startup parameter: jit"),
        ("0A000", "Feature not supported: RDS Proxy currently doesn\u2019t support the option jit."),
    ],
    ids=["PgBouncer", "RDS Proxy"],
)
async def test_a_pooler_that_takes_no_settings_is_told_of_with_the_remedy(code, text):
    """The start ended with the bare `FeatureNotSupportedError` of a proxy other than PgBouncer."""
    remedy = rf"leads to PgBouncer or another proxy \({re.escape(text)}\): give .*pgbouncer=True.*SIDINGS_POSTGRES_PGB"
    async with refusing(code, text) as (dsn, _):
        settings = PostgresSettings(dsn=dsn)
        for attempt in (
            Service("test", postgres=dsn, prometheus=CollectorRegistry()).__aenter__,
            Executor("test", Registry(), settings, prometheus=CollectorRegistry()).start,
            lambda: connect(settings, for_handlers=True),
        ):
            with pytest.raises(ConfigurationError, match=remedy):
                await attempt()
        transactions = Transactions(settings, lambda _: None)
        await transactions.start()
        with pytest.raises(PostgresUnavailable, match=remedy):  # as where it has come between later
            async with transactions.open():
                raise AssertionError
        await transactions.stop()
        assert re.search(remedy, await refused_command(dsn, "jobs", "counts", exit_code=2))
        command = (sys.executable, "-m", "sidings.kafka.outbox", "--service", "test", "--postgres", dsn)
        relay = await asyncio.create_subprocess_exec(*command, "--kafka", KAFKA, stderr=asyncio.subprocess.PIPE)
        _, told = await asyncio.wait_for(relay.communicate(), SECONDS)
        assert relay.returncode == 1
        assert re.search(f"^error: .*{remedy}", told.decode(), re.MULTILINE)


async def test_an_option_of_the_dsn_that_a_proxy_refuses_is_named():
    """With `pgbouncer=True`, which would have been the remedy else."""
    text = "Feature not supported: RDS Proxy currently doesn\u2019t support command-line options."
    async with refusing("0A000", text) as (dsn, _):
        settings = PostgresSettings(dsn=f"{dsn}&options=-c%20work_mem=1MB", pgbouncer=True)
        with pytest.raises(ConfigurationError, match=r"refuses the DSN's option options \(.*: leave it out"):
            await connect(settings)


async def test_what_a_server_says_of_no_option_of_the_dsn_is_no_mistake_in_it(database):
    with pytest.raises(asyncpg.UndefinedObjectError):
        await connect_any(f"{database}?application_name=a", timeout=5, server_settings={"app_name": "b"})
    error = asyncpg.ProtocolViolationError("no such user")  # PgBouncer's
    assert refused_option(f"{database}?user=me", error) is None


async def test_an_option_that_another_server_refuses_later_is_no_failure_of_a_handlers(database):
    """As after a failover: the start, which would have told of it, is over."""
    settings = PostgresSettings(dsn=f"{database}?channel_binding=require")
    transactions = Transactions(settings, lambda _: None)
    await transactions.start()
    with pytest.raises(PostgresUnavailable, match=r"refuses the DSN.*option channel_binding"):
        async with transactions.open():
            pass
    await transactions.stop()
    transactional = Transactional(settings, lambda _: None, lambda _: None)
    with pytest.raises(PostgresUnavailable, match=r"refuses the DSN.*option channel_binding"):
        await transactional.connections.take()


async def test_a_migration_without_postgres_says_where_nobody_answers(database):
    for dsn, kind, text in (
        ("postgresql://me:secret@127.0.0.1:1/x", PostgresUnavailable, "no connection to postgresql://127.0.0.1:1/x: "),
        (
            "postgresql://127.0.0.1:1/x?user=me@us&password=secret",
            PostgresUnavailable,
            "no connection to postgresql://",
        ),
        ("postgresql://127.0.0.1:1/x?password=a@secret", PostgresUnavailable, "no connection to postgresql://"),
        (f"{database}x", ConfigurationError, r"^postgres=: \S+ refuses: database .* does not exist: correct the DSN"),
    ):
        with pytest.raises(kind, match=text) as refused:
            await Service("test", postgres=dsn, prometheus=CollectorRegistry()).migrate()
        assert "secret" not in str(refused.value)


async def test_a_service_that_does_not_reach_postgres_says_which(caplog):
    """Of a host without an address, or one that is silent, the log said "Name or service not known" alone."""
    service = Service("test", postgres="postgresql://me:secret@nowhere.invalid/x", prometheus=CollectorRegistry())
    async with service:
        [problem] = await eventually(lambda: [each for each in service.problems() if "no connection" in each])
    for told in (problem, caplog.text):
        assert "no connection to postgresql://nowhere.invalid/x: gaierror" in told
        assert "secret" not in told


async def test_a_handler_that_ends_its_own_service_is_told_so_at_once(database, sidings_kafka, topic):
    """Each waited for the other, until the time for a stop was over; then the origins were not given back."""
    name, refused = await topic(), list[str]()
    service = a_service(database, sidings_kafka)

    async def end() -> None:
        with pytest.raises(RuntimeError, match=r"cannot end its own service.*call service.stop\(\)") as raised:
            await service.__aexit__(None, None, None)
        refused.append(str(raised.value))

    @service.job()
    async def later(job: Job[Number]) -> None:
        await end()

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await end()
        await later.enqueue(tx, message.value)

    await produce(sidings_kafka, name, [0])
    async with service:
        await eventually(lambda: len(refused) == 2)
        assert service.problems() == []


async def test_a_declaration_after_the_start_is_refused(database, sidings_kafka):
    async with a_service(database, sidings_kafka) as service:

        async def around(call, call_next) -> None:
            await call_next()

        for declare in (
            lambda: service.consumer("late")(a_message),
            lambda: service.topic("late", type_field="type"),
            lambda: service.directory("late", model=Number),
            lambda: service.middleware(around),
        ):
            with pytest.raises(ConfigurationError, match="declared too late, the service has started"):
                declare()


@pytest.mark.parametrize(
    ("declare", "told"),
    [
        (lambda: Registry().job(timeout="30")(a_job), "timeout='30': give a positive number of seconds"),
        (lambda: Registry().job(name=5)(a_job), "name=5: give a text"),
        (lambda: Registry().job(group=str, home=5)(a_job), "home=5 needs a topic's name"),
        (lambda: Registry().job(transactional="yes")(a_job), "transactional='yes': give True or False"),
        (lambda: Registry().job(history=None)(a_job), "history=None: give True or False"),
        (lambda: Registry().periodic(every="5")(a_job), "every='5': give seconds"),
        (lambda: Snooze("60"), r"Snooze\('60'\): give seconds"),
        (lambda: Retry.after("30"), r"Retry.after\('30'\): give seconds"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(declare: Any, told: str):
    with pytest.raises(ConfigurationError, match=told):
        declare()


# -- what can only wait says so ---------------------------------------------------------------------------------------


@pytest.mark.long
async def test_a_topic_that_does_not_exist_is_told_of_and_taken_up_when_it_is_there(
    database, sidings_kafka, monkeypatch, caplog
):
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.2)
    name = f"late-{token_hex(4)}"
    service = a_service(database, sidings_kafka, settings={"fetch_seconds": 0.05, "metadata_seconds": 0.5})
    service.consumer(name)(a_message)
    missing = f"there is no topic {name}: create it"
    async with service:
        await eventually(lambda: service.problems() == [missing])
        await eventually(lambda: f"{missing}; taken up within" in caplog.text)
        await create_topic(sidings_kafka, name, partitions=1)
        try:
            await produce(sidings_kafka, name, [1])
            await eventually(offset_reaches(database, name, 1))
            await eventually(lambda: service.problems() == [])
        finally:
            await delete_topics(sidings_kafka, [name])


async def test_jobs_of_a_type_that_nobody_handles_are_told_of_once(database, caplog):
    service = a_service(database, assignment=StaticAssignment([ORIGIN]))
    async with connected(database) as connection:
        for group in ("a", "a", "b", None):
            await connection.execute(
                "SELECT sidings.enqueue('nobody', '{}', origin => $1, \"group\" => $2)", ORIGIN, group
            )
    async with service:
        await eventually(lambda: service.executor.scheduler.unknown.get("nobody", 0) == 3)
    assert caplog.text.count("jobs of the type 'nobody' wait, since this process has no handler for it") == 1
    assert "end them, where no release has one any more (`sidings jobs discard --type nobody`)" in caplog.text


async def test_of_stored_messages_it_is_told_that_a_stateless_consumer_runs_none(database, caplog):
    """`declare it` was said to who had made the topic's consumer stateless, while some were parked."""
    service = a_service(database, assignment=StaticAssignment([ORIGIN]))
    async with connected(database) as connection:
        await connection.execute("SELECT sidings.enqueue('message:positions', '{}', origin => $1)", ORIGIN)
    async with service:
        await eventually(lambda: service.executor.scheduler.unknown)
    assert "declare the topic's consumer, which stateless=True must not be, or end them, where" in caplog.text


@pytest.mark.parametrize("assigned", [False, True])
async def test_a_service_to_which_nothing_assigns_an_origin_says_that_it_runs_no_jobs(
    database, monkeypatch, caplog, assigned
):
    """It started, was healthy, and ran none, without a word."""
    monkeypatch.setattr("sidings.service.life._IDLE_SECONDS", 0.5)
    service = a_service(database, **({"assignment": StaticAssignment([ORIGIN])} if assigned else {}))
    service.job()(a_job)
    async with service:
        if assigned:
            await eventually(lambda: service.executor.held)
            await asyncio.sleep(0.6)
        else:
            await eventually(lambda: "none of their jobs runs here" in caplog.text)
            assert "there is no kafka= (Service.from_env: SIDINGS_KAFKA): give it" in caplog.text
    assert ("none of their jobs runs here" in caplog.text) is not assigned


async def test_where_there_is_kafka_the_remedy_is_a_topic(database, sidings_kafka, monkeypatch, caplog):
    monkeypatch.setattr("sidings.service.life._IDLE_SECONDS", 0.5)
    service = a_service(database, sidings_kafka)
    service.job()(a_job)
    async with service:
        await eventually(lambda: "nothing assigns an origin: consume a topic, name one in topics=, or" in caplog.text)


@pytest.mark.parametrize("assigned", [False, True])
async def test_a_service_without_kafka_whose_types_have_a_home_says_at_once_that_it_runs_no_jobs(
    database, caplog, assigned
):
    """With a wrong variable, say. After half a minute it asked for a topic, which the type has."""
    service = a_service(database, **({"assignment": StaticAssignment([ORIGIN])} if assigned else {}))
    service.job(name="alone")(a_job)
    service.job(name="homely", group="id", home="positions")(a_job)
    async with service:
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if assigned:
        assert told == []
    else:
        [text] = told
        assert text.startswith(
            "there is no kafka= (Service.from_env: SIDINGS_KAFKA), so nothing assigns the origins of "
        )
        assert "have a home (homely): none of their jobs runs here, and no message leaves the outbox from" in text


async def test_a_stop_while_directories_wait_is_silent(database, sidings_kafka, caplog):
    # What nobody has retrieved is complained of when it is collected.
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    service = a_service(database, sidings_kafka)
    service.directory(f"late-{token_hex(4)}", model=Number)
    service.consumer(f"late-{token_hex(4)}")(a_message)
    async with service:
        await eventually(lambda: "create it, with cleanup.policy=compact" in caplog.text)
    gc.collect()
    await asyncio.sleep(0)
    assert errors == []


async def test_a_stop_without_kafka_leaves_the_outbox_in_good_order(database, caplog):
    caplog.set_level(logging.WARNING, "sidings.outbox")
    async with a_service(PostgresSettings(dsn=database), "127.0.0.1:1"):
        await eventually(lambda: "the relay's producer could not be connected" in caplog.text)
        await eventually(lambda: fetch(database, "SELECT FROM sidings.executor"))
    assert "stopped without releasing" not in caplog.text
    assert "could not be looked at" not in caplog.text


async def test_a_role_without_rights_is_told_of(database):
    async with connected(database) as connection:
        role = f"reader_{token_hex(4)}"
        await connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
        await connection.execute(f"GRANT USAGE ON SCHEMA sidings TO {role}")
        await connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA sidings TO {role}")
        try:
            account = database.partition("://")[2].partition("@")[0]
            reader = database.replace(account, f"{role}:x")
            async with a_service(reader, assignment=StaticAssignment([ORIGIN])) as service:
                refused = ["Postgres refuses the executor: permission denied for table executor"]
                await eventually(lambda: service.problems() == refused)
        finally:
            await connection.execute(f"DROP OWNED BY {role}")
            await connection.execute(f"DROP ROLE {role}")


async def test_an_executor_whose_row_somebody_elses_trigger_refuses_says_so(database):
    """It was taken for a row that is there already; without it the executor began anew again and again."""
    async with connected(database) as connection:
        await connection.execute("""
            CREATE TABLE seen (host text CONSTRAINT once UNIQUE);
            CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
                BEGIN INSERT INTO seen VALUES (''); RETURN NULL; END $$;
            CREATE TRIGGER noted AFTER INSERT ON sidings.executor FOR EACH ROW EXECUTE FUNCTION note();
            INSERT INTO seen VALUES ('')""")
        async with a_service(database, assignment=StaticAssignment([ORIGIN])) as service:
            refused = 'Postgres refuses the executor: duplicate key value violates unique constraint "once"'
            await eventually(lambda: refused in "".join(service.problems()), service.problems)
            await connection.execute("DROP TRIGGER noted ON sidings.executor")
            await eventually(lambda: service.problems() == [], service.problems)


@pytest.mark.parametrize(
    ("module", "missing", "told"),
    [
        ("devstack", "psutil", "the devstack needs psutil: pip install 'sidings[devstack]'"),
        ("spark_analytics.history", "pyspark", "this needs Spark: pip install 'sidings[spark]'"),
        ("spark_analytics.transactions", "pyspark", "this needs Spark: pip install 'sidings[spark]'"),
        ("spark_analytics.history", "pyarrow", "this needs Spark: pip install 'sidings[spark]'"),
        ("spark_analytics.transactions", "pyarrow", "this needs Spark: pip install 'sidings[spark]'"),
        ("cli.pages", "jinja2", "the pages need jinja2: pip install 'sidings[web]'"),
    ],
)
def test_what_needs_an_extra_names_it(module: str, missing: str, told: str):
    script = f"import sys; sys.modules['{missing}'] = None; import sidings.{module}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert told in done.stderr


def test_an_async_function_for_the_group_is_refused() -> None:
    """Its coroutine, as text, was another group for each job: the order was lost without a word."""

    async def key(payload: Number) -> str:
        return str(payload.number)

    registry = Registry()
    with pytest.raises(ConfigurationError, match="give a plain function of the payload"):

        @registry.job(group=key)  # pyright: ignore[reportArgumentType]
        async def send(job: Job[Number]) -> None: ...


def test_registries_that_include_each_other_are_refused_with_a_word():
    """It was a RecursionError, also of each type that was declared behind it."""
    first, second, third = Registry(), Registry(), Registry()
    first.include(second)
    second.include(third)
    for outer, inner in ((third, first), (second, first), (first, first)):
        with pytest.raises(ConfigurationError, match="include"):
            outer.include(inner)
    first.include(third)  # in two ways, and twice
    first.include(third)

    @third.job()
    async def late(job: Job[int]) -> None: ...

    assert list(first) == list(second) == [late]


FORGOTTEN = """
import asyncio, sys
from sidings import Service

async def main():
    service = Service("test", postgres=sys.argv[1], kafka=sys.argv[2], topics=[sys.argv[3]])
    await service.__aenter__()
    while not service.executor.held:
        await asyncio.sleep(0.01)

asyncio.run(main())
print("ended")
"""


@pytest.mark.long
async def test_a_program_that_ends_before_its_service_ends(database, sidings_kafka, topic):
    """`asyncio.run` cancels all tasks, once, and waits for them: the consumer connected anew, and the program hung."""
    command = [sys.executable, "-c", FORGOTTEN, database, sidings_kafka, await topic("positions")]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ended\n", done.stderr
