"""What a client does about brokers that are slow, say nothing, throttle it, or cannot be connected to."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import aiokafka.client
import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.cluster import ClusterMetadata
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    KafkaConnectionError,
    NodeNotReadyError,
    RequestTimedOutError,
)
from aiokafka.protocol.commit import OffsetCommitRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import HeartbeatRequest, SyncGroupRequest
from aiokafka.structs import BrokerMetadata
from sidings.kafka import brokers, membership
from sidings.kafka.brokers import go_around_hanging_brokers, unreached
from sidings.kafka.membership import Contact

from .support import eventually

MIB = 1024 * 1024
WANTED = 50 * MIB


@pytest.fixture
async def client() -> Any:
    """One that has met two brokers, and connected to none."""
    client: Any = AIOKafkaClient(bootstrap_servers="127.0.0.1:1")
    go_around_hanging_brokers(client, session_seconds=0.01)
    met = [BrokerMetadata(node, "kafka", 9090 + node, None) for node in (1, 2)]
    client.cluster = SimpleNamespace(
        brokers=lambda: met, broker_metadata=lambda node: met[node - 1], unauthorized_topics=set()
    )
    client.asked_anew = 0

    def ask_anew() -> None:
        client.asked_anew += 1

    client.force_metadata_update = ask_anew
    return client


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The time as the client sees it."""
    clock = SimpleNamespace(now=1000.0)
    for module in (brokers, membership):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Address:
    """A connection to one of the addresses that a client is given."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.closed = error, False

    async def send(self, _: object) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("topics", [True, False])
async def test_each_address_has_its_share_of_the_time_and_leaves_no_connection(monkeypatch, topics):
    """But of a cluster without topics, which tells of no brokers: it is asked again over the one that there is."""
    client: Any = AIOKafkaClient(bootstrap_servers=["a:1", "b:1", "c:1"], request_timeout_ms=30_000)
    go_around_hanging_brokers(client)
    known = [1] if topics else list[int]()
    client.cluster = SimpleNamespace(brokers=lambda: known, update_metadata=lambda _: None)
    client._md_synchronizer = asyncio.Event().wait
    made, shares = list[Address](), list[int]()
    failures: list[Exception | None] = [OSError("refused"), KafkaConnectionError("the password is wrong"), None]

    async def create(*_: Any, request_timeout_ms: int, **__: Any) -> Address:
        shares.append(request_timeout_ms)
        failure = failures.pop(0)
        if isinstance(failure, OSError):
            raise failure
        made.append(Address(failure))
        return made[-1]

    monkeypatch.setattr(aiokafka.client, "create_conn", create)
    await client.bootstrap()
    client._sync_task.cancel()
    assert shares == [10_000] * 3
    assert client._request_timeout_ms == 30_000
    assert [address.closed for address in made] == [True, topics]
    assert list(client._conns.values()) == ([] if topics else made[1:])
    failures = [OSError("refused"), KafkaConnectionError("the password is wrong"), TimeoutError()]
    with pytest.raises(KafkaConnectionError, match=r"refused.*; .*the password is wrong.*; .*TimeoutError"):
        await client.bootstrap()


async def test_a_fetch_that_was_not_answered_in_time_asks_for_less_and_later_for_more_again(client, clock, monkeypatch):
    answers, asked = list[Any](), list[int]()

    async def send(_: Any, __: int, request: Any, **___: Any) -> Any:
        asked.append(request._max_bytes)
        size, seconds = answers.pop(0)
        clock.now += seconds
        if size is None:
            raise RequestTimedOutError
        return SimpleNamespace(topics=[("t", [(0, 0, 0, 0, None, bytes(size))])])

    async def fetch(size: int | None, seconds: float = 0) -> int:
        answers.append((size, seconds))
        request = FetchRequest(0, 0, WANTED, 0, [])
        if size is None:
            with pytest.raises(RequestTimedOutError):
                await client.send(1, request)
        else:
            await client.send(1, request)
        return asked[-1]

    monkeypatch.setattr(AIOKafkaClient, "send", send)
    assert await fetch(10) == WANTED
    assert [await fetch(None) for _ in range(4)] == [WANTED, WANTED // 16, WANTED // 256, 64 * 1024]
    assert await fetch(64 * 1024, seconds=client._request_timeout_ms / 2000) == 64 * 1024
    assert await fetch(32 * 1024) == 64 * 1024, "it had just come through"
    assert await fetch(64 * 1024) == 64 * 1024, "so little says nothing of more"
    assert await fetch(128 * 1024) == 128 * 1024
    for _ in range(9):
        last = await fetch(client.fetch_bytes.get(1, 0))
    assert last == WANTED
    assert client.fetch_bytes == {}


async def test_a_broker_that_is_not_connected_to_in_time_is_tried_once_for_all_who_wait(client, clock, monkeypatch):
    monkeypatch.setattr(brokers, "_CONNECT_SECONDS", 0.01)
    tried, connected = list[int](), asyncio.Event()

    async def connect(_: Any, node: int, **__: Any) -> Any:
        tried.append(node)
        try:
            await connected.wait()
        finally:
            clock.now += 1
        return SimpleNamespace(connected=lambda: True)

    monkeypatch.setattr(AIOKafkaClient, "_get_conn", connect)
    assert await asyncio.gather(*(client._get_conn(1) for _ in range(5))) == [None] * 5
    assert tried == [1]
    assert client.asked_anew == 1
    assert client.patience[1] == 0.02, "it may be slow, and no more"
    assert ": no connection to broker 1 at kafka:9091," in unreached(client)
    with pytest.raises(NodeNotReadyError, match="broker 1: no connection to broker 1 at kafka:9091"):
        await client._ask(1, None)
    connected.set()
    assert await client._get_conn(1) is not None
    assert client.patience[1] == 2.0, "twice the second that it took"
    assert unreached(client) == ""
    assert client.connecting == {}


async def test_a_broker_that_could_not_be_connected_to_long_ago_is_blamed_for_nothing(client, clock, monkeypatch):
    """Nobody has wanted to connect to it since, as where its partitions are led by others: no success ends it."""

    async def connect(_: Any, node: int, *, group: int, **__: Any) -> Any:
        return None if group else SimpleNamespace(connected=lambda: True)

    monkeypatch.setattr(AIOKafkaClient, "_get_conn", connect)
    assert await client._get_conn(1, group=1) is None
    assert await client._get_conn(1) is not None
    clock.now += 50
    assert "broker 1 at kafka:9091" in unreached(client), "a try that hangs takes most of a minute"
    clock.now += 50
    assert unreached(client) == ""
    assert await client._get_conn(1, group=1) is None
    assert "broker 1 at kafka:9091" in unreached(client), "it was tried again"


async def test_who_answers_is_asked_before_who_throttles_and_who_says_nothing_last(client, clock):
    client._conns = {(2, 0): SimpleNamespace(connected=lambda: True)}
    order = [client._nodes() for _ in range(20)]
    assert order == [[2, 1]] * 20, "no connection has to be made to it"
    client.throttled_until[2, 0] = clock.now + 1
    assert client._nodes() == [1, 2]
    assert client.throttled
    client.late[1] = 1
    assert client._nodes() == [2, 1]
    client.late[1] = 0
    clock.now += 2
    assert not client.throttled
    client.connecting[2, 0] = clock.now
    assert client._nodes() == [2, 1]
    clock.now += 1.5
    assert client._nodes() == [1, 2], "it does not take a connection"


async def test_brokers_are_let_make_what_is_wanted_and_nothing_that_is_asked_for_beside_it(client):
    """Each refresh asked for all topics with leave to make them, so that those came back that somebody had deleted."""
    asked, told, there = list[Any](), list[Any](), {"old"}

    async def send(request: Any) -> Any:
        asked.append((sorted(request._topics), request._allow_auto_topic_creation))
        answer = [(0 if name in there else 3, name, False, []) for name in request._topics]
        there.update(request._topics if request._allow_auto_topic_creation else ())
        return SimpleNamespace(brokers=[1], topics=answer)

    async def refresh() -> list[tuple[str, int]]:
        asked.clear()
        assert await client._metadata_update(client.cluster, {"old", "deleted", "new"})
        return sorted((name, code) for code, name, *_ in told.pop().topics)

    client._conns = {(1, 0): SimpleNamespace(connected=lambda: True, send=send)}
    client.cluster.update_metadata = told.append
    client.wanted = lambda: ["old", "new", "another"]
    assert await refresh() == [("deleted", 3), ("new", 3), ("old", 0)]
    assert asked == [(["deleted", "new", "old"], False), (["new"], True)]
    assert await refresh() == [("deleted", 3), ("new", 0), ("old", 0)]
    there.discard("old")
    client.wanted = frozenset
    assert await refresh() == [("deleted", 3), ("new", 0), ("old", 3)]
    assert asked == [(["deleted", "new", "old"], False)]


async def test_a_topic_that_may_not_be_seen_any_more_keeps_its_partitions_unless_it_was_deleted_before(
    client, monkeypatch
):
    monkeypatch.setattr(brokers, "_UNSEEN_SECONDS", 0.0)
    codes = list[int]()

    async def send(request: Any) -> Any:
        code = codes.pop(0)
        partitions = [] if code else [(0, number, 1, [1], [1]) for number in range(3)]
        met = [(1, "kafka", 9091, None)]
        return SimpleNamespace(
            API_VERSION=1, brokers=met, controller_id=1, topics=[(code, name, False, partitions) for name in topics]
        )

    client._conns = {(1, 0): SimpleNamespace(connected=lambda: True, send=send)}
    topics, client.seen = {"positions"}, {}
    for code, count in ((29, 0), (0, 3), (29, 3), (29, 3), (3, 0), (29, 0)):
        codes.append(code)
        assert await client._metadata_update(cluster := ClusterMetadata(), topics)
        assert len(cluster.partitions_for_topic("positions") or ()) == count
        assert cluster.unauthorized_topics == (topics if code == 29 else set())


async def test_a_broker_whose_answer_is_late_is_known_for_it_until_it_has_come(client, monkeypatch):
    monkeypatch.setattr(brokers, "_LATE_SECONDS", 0.01)
    answered = asyncio.Event()

    async def send(*_: Any, **__: Any) -> Any:
        await answered.wait()
        return SimpleNamespace()

    monkeypatch.setattr(AIOKafkaClient, "send", send)
    sending = [asyncio.create_task(client.send(1, SimpleNamespace())) for _ in range(2)]
    await eventually(lambda: client.asked_anew >= 6)
    assert client.late[1] == 2, "as often as there are requests"
    answered.set()
    await asyncio.gather(*sending)
    assert client.late[1] == 0
    asked = client.asked_anew
    await asyncio.sleep(0.05)
    assert client.asked_anew == asked, "a timer is left"


@pytest.mark.parametrize("way", ["send", "ask"])
async def test_a_broker_that_throttles_is_sent_nothing_until_its_time_is_over(client, clock, monkeypatch, way):
    """What is sent meanwhile stands in its buffer, and is done later, whoever has sent it again by then."""
    sent = list[object]()

    async def send(*arguments: Any, **_: Any) -> Any:
        sent.append(arguments)
        return SimpleNamespace(throttle_time_ms=20)

    monkeypatch.setattr(AIOKafkaClient, "send", send)
    client._conns = {(1, 0): SimpleNamespace(connected=lambda: True, send=send)}
    await client.send(1, SimpleNamespace())
    waiting = asyncio.create_task(client.send(1, SimpleNamespace()) if way == "send" else client._ask(1, None))
    await asyncio.sleep(0.1)  # by the client's clock none has passed
    assert len(sent) == 1
    clock.now += 1
    await waiting
    assert len(sent) == 2


@pytest.mark.parametrize("of_its_own", [True, False])
async def test_a_coordinator_that_hangs_is_looked_for_anew_within_the_session(client, monkeypatch, of_its_own):
    closed = list[object]()

    async def send(*_: Any, **__: Any) -> Any:
        if of_its_own:
            raise TimeoutError
        await asyncio.Event().wait()

    monkeypatch.setattr(AIOKafkaClient, "send", send)
    client._conns = {(1, 0): SimpleNamespace(connected=lambda: True, close=lambda reason: closed.append(reason))}
    with pytest.raises(TimeoutError if of_its_own else RequestTimedOutError):
        await asyncio.wait_for(client.send(1, HeartbeatRequest("test", 1, "a")), 10)
    assert bool(closed) != of_its_own


async def test_that_the_coordinator_has_answered_a_member_is_noted(client, clock, monkeypatch):
    """And no other answer: the group knows of its members by these alone."""
    ends: list[Exception | None] = [None, None, RequestTimedOutError(), None]

    async def send(*_: Any, **__: Any) -> Any:
        if end := ends.pop(0):
            raise end
        return SimpleNamespace()

    monkeypatch.setattr(AIOKafkaClient, "send", send)
    contact = Contact(cast(Any, SimpleNamespace(_client=client)))
    client.session_seconds = 10.0
    assert contact.unheard() == 0.0, "it is no member"
    await client.send(1, SyncGroupRequest("test", 1, "a", None, []))
    clock.now += 9
    assert contact.unheard() == 0.0, "its session lasts"
    clock.now += 2
    await client.send(1, SimpleNamespace())
    with pytest.raises(RequestTimedOutError):
        await client.send(1, HeartbeatRequest("test", 1, "a"))
    assert contact.unheard() == 11.0
    await client.send(1, HeartbeatRequest("test", 1, "a"))
    assert contact.unheard() == 0.0


async def test_who_was_put_out_of_its_group_commits_nothing(client, monkeypatch):
    """A group that is empty takes what says to be of none, from anybody, also a process that has stood still."""
    sent = list[int]()

    async def send(_: Any, __: int, request: Any, **___: Any) -> Any:
        sent.append(request._consumer_group_generation_id)

    monkeypatch.setattr(AIOKafkaClient, "send", send)
    for generation in (-1, 7):
        await client.send(1, OffsetCommitRequest("test", generation, "", -1, []))
    assert sent == [0, 7]


async def test_a_coordinator_that_refuses_the_group_is_none(client, monkeypatch):
    async def send(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(error_code=GroupAuthorizationFailedError.errno, coordinator_id=-1)

    monkeypatch.setattr(AIOKafkaClient, "send", send)
    with pytest.raises(GroupAuthorizationFailedError):
        await client.coordinator_lookup(0, "test")


async def test_the_next_broker_is_asked_where_one_says_nothing_and_nobody_is_waited_for_then(monkeypatch):
    monkeypatch.setattr(brokers, "_NEXT_SECONDS", 0.01)
    cancelled = list[str]()

    async def hang() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("hanging")
            raise
        return ""

    async def fail() -> str:
        raise KafkaConnectionError("away")

    async def answer() -> str:
        return "answer"

    assert await asyncio.wait_for(brokers._first([fail, hang, answer]), 10) == "answer"
    assert cancelled == ["hanging"]
    with pytest.raises(KafkaConnectionError, match="away"):
        await brokers._first([fail, fail])
