"""What every client does about a broker that is neither up nor down: that takes connections perhaps, and says nothing.
And about one that throttles it, for a quota, or of which a disk has failed.

aiokafka 0.14 asks one broker after another, in any order, waits for each as long as any request may take, and makes one
connection at a time. So a single broker that hangs kept its clients from all others, again and again
(docs/decisions/0028-hanging-brokers.md).

A broker that throttles answers at once, says for how long it reads nothing more of the connection, and expects nothing.
aiokafka does not heed it: what it sends stands in the broker's buffer, and is done when the time has come, be the
connection closed long since, and the message sent again by somebody else.

A broker of whose disks one has failed goes on, and answers a fetch of what was on it with an error that aiokafka does
not expect: it asks again at once, and not who leads these partitions now.

A broker that does not coordinate a group, or not yet, says so where aiokafka does not look when it asks for the group's
offsets: it found none.
"""

import asyncio
import logging
import random
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast

import aiokafka.client
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.cluster import ClusterMetadata
from aiokafka.conn import CloseReason
from aiokafka.errors import (
    GroupCoordinatorNotAvailableError,
    KafkaConnectionError,
    KafkaError,
    NodeNotReadyError,
    NoError,
    NotCoordinatorForGroupError,
    NotLeaderForPartitionError,
    OffsetOutOfRangeError,
    RequestTimedOutError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import HeartbeatRequest, SyncGroupRequest
from aiokafka.protocol.metadata import MetadataRequest

from ..outage import Outage

__all__ = ["go_around_hanging_brokers", "throttling", "unreached"]

log = logging.getLogger("sidings.kafka")

T = TypeVar("T")

_NEXT_SECONDS = 1.0  # without an answer, before another broker is asked, too
_LATE_SECONDS = 3.0  # for an answer; then others are asked who leads what, and are preferred
_CONNECT_SECONDS = 5.0  # for a first try to connect, authentication included; twice as long for each further one
_LATELY_SECONDS = 60.0  # what is in the way of anything is tried again within them; a try may take most of that
_LEAST_MS = 3_000  # the share of an address, be there ever so many
_LEAST_BYTES = 64 * 1024  # of a fetch, however slow the network is; Kafka sends a larger first batch all the same
_AGAIN_SECONDS = 0.1  # before the next question who leads what, or for what a broker lets nobody read
_UNSEEN_SECONDS = 1.0  # the same where there is no right to see a topic: aiokafka logs an error each time
_LESS = 16  # so many times smaller is the fetch after one that was not answered in time
_EXPECTED = {  # by aiokafka, as what becomes of a partition in a fetch
    error.errno
    for error in (
        *(NoError, OffsetOutOfRangeError, UnknownTopicOrPartitionError, NotLeaderForPartitionError),
        TopicAuthorizationFailedError,
    )
}
_OF_A_CONNECTION = (
    *("client_id", "ssl_context", "security_protocol", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password"),
    *("sasl_kerberos_service_name", "sasl_kerberos_domain_name", "sasl_oauth_token_provider"),
)


def go_around_hanging_brokers(
    client: Any,
    *,
    session_seconds: float | None = None,
    wanted: Callable[[], Collection[str]] = frozenset,
    seen: dict[str, Any] | None = None,
) -> None:
    """Let `client`, one of aiokafka's own inner ones that has not connected yet, do so. session_seconds: without an
    answer to a heartbeat for so long, the group's coordinator is looked for anew. wanted: the topics that brokers make
    where they are not there, if they make those that are asked for; of no others, as one that somebody has deleted.
    seen: what was told of the topics, kept here, counts for those that there is no right to see any more."""
    client.__class__ = _Client
    client.begin(session_seconds=session_seconds, wanted=wanted, seen=seen)


def unreached(client: Any, nodes: Collection[Any] | None = None) -> str:
    """Brokers to which the last try to connect has just failed, where, and why: the end of a sentence, or nothing. The
    addresses are not those that the client was given, and aiokafka tells them nowhere. nodes: of these alone. Any
    thread may ask."""
    since, known = time.monotonic() - _LATELY_SECONDS, dict[Any, Any]()
    for place, at in list(client.failed_at.items()):
        if at > since and (nodes is None or place[0] in nodes) and (one := client.cluster.broker_metadata(place[0])):
            known[place] = one
    if not known:
        return ""
    some = ", ".join(f"broker {one.nodeId} at {one.host}:{one.port}" for one in dict.fromkeys(known.values()))
    why = "; ".join(dict.fromkeys(client.errors[place] for place in known))
    return f": no connection to {some}, as brokers tell their clients (advertised.listeners): {why}"


def throttling(client: Any) -> str:
    """Why a broker says nothing, where it throttles the client: the end of a sentence, or nothing. Any thread may
    ask."""
    return ": it throttles this client (a quota)" if client.throttled else ""


_refusal: ContextVar[str] = ContextVar("sidings_refusal")  # of the connection that was tried last


class _Connecting:
    """Around each connection that aiokafka makes, as its lock: it logs why one cannot be made, and tells nobody."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        _refusal.set(repr(error))


class _Client(AIOKafkaClient):
    """One that goes around brokers that hang. It was made as aiokafka's, and `begin` has given it what that lacks."""

    def begin(
        self,
        *,
        session_seconds: float | None,
        wanted: Callable[[], Collection[str]],
        seen: dict[str, Any] | None,
    ) -> None:
        """In place of an `__init__`: that of aiokafka has run. Arguments are those of `go_around_hanging_brokers`."""
        cast(Any, self)._get_conn_lock_value = _Connecting()  # a lock for each connection stands in its place
        self.session_seconds = session_seconds
        self.wanted = wanted
        self.seen = seen
        # By connection: the broker, and which of aiokafka's connections to it.
        self.locks = defaultdict[Any, asyncio.Lock](asyncio.Lock)
        self.connecting = dict[Any, float]()  # since when
        self.failed_at = dict[Any, float]()  # the last try, where it has failed
        self.errors = dict[Any, str]()  # why it has
        self.throttled_until = dict[Any, float]()  # nothing is sent before (`time.monotonic`)
        # By broker.
        self.patience = defaultdict[Any, float](lambda: _CONNECT_SECONDS)  # of the next try to connect
        self.late = defaultdict[Any, int](int)  # requests that have been without an answer for long
        self.fetch_bytes = dict[Any, int]()  # most of one fetch, where the network is too narrow for what is asked for
        self.refusals = dict[Any, Outage]()  # of those that let nothing be read of some partitions
        # Of them all.
        self.unconnected = Outage(log, "no connection could be made")  # by errors that aiokafka does not expect
        self.unanswered = Outage(log, "no broker could be asked who leads what")
        self.updated_at = 0.0  # when it was last told who leads what
        self.updated_of: frozenset[str] | None = None  # of which topics
        self.new = set[str]()  # topics that it is to learn of
        self.learning = asyncio.Lock()
        self.heard_at: float | None = None  # when the group's coordinator has last answered a member

    @property
    def _milliseconds(self) -> int:
        return cast(Any, self)._request_timeout_ms

    async def bootstrap(self) -> None:
        """As aiokafka's, but each address has its share of the time: the first one may be that of a broker that hangs.
        And the error tells what came of each: that the password is wrong stood in aiokafka's own log alone. Whatever it
        is: GSSAPI raises errors of its own, as where a ticket has run out, and a thread may not be had."""
        own, whole = cast(Any, self), self._milliseconds
        addresses = cast(list[tuple[str, int, Any]], self.hosts)
        own._request_timeout_ms = max(whole // len(addresses), min(whole, _LEAST_MS))
        failed = list[str]()
        try:
            for host, port, _ in addresses:
                try:
                    await self._begin_with(host, port)
                except Exception as error:  # noqa: BLE001 - whatever it is, the next address may do
                    failed.append(f"{host}:{port}: {error!r}")
                else:
                    break
            else:
                raise KafkaConnectionError("; ".join(failed))
        finally:
            own._request_timeout_ms = whole
        if own._sync_task is None:
            own._sync_task = asyncio.create_task(own._md_synchronizer())

    async def _begin_with(self, host: str, port: int) -> None:
        own = cast(Any, self)
        connection: Any = await aiokafka.client.create_conn(
            host,
            port,
            request_timeout_ms=own._request_timeout_ms,
            max_idle_ms=own._connections_max_idle_ms,
            **{name: getattr(own, f"_{name}") for name in _OF_A_CONNECTION},
        )
        try:
            self.cluster.update_metadata(await connection.send(MetadataRequest([])))
        except BaseException:
            connection.close()
            raise
        if self.cluster.brokers():
            connection.close()
        else:  # as of a cluster without topics: kept for the next question
            own._conns["bootstrap", ConnectionGroup.DEFAULT] = connection

    async def _get_conn(self, node_id: Any, *, group: Any = ConnectionGroup.DEFAULT, no_hint: bool = False) -> Any:
        if self._connected(node_id, group):
            return cast(Any, self)._conns[node_id, group]
        place, asked_at = (node_id, group), time.monotonic()
        async with self.locks[place]:
            if self.failed_at.get(place, 0.0) > asked_at:
                return None  # so would this try: it has waited for one that has failed
            began = self.connecting[place] = time.monotonic()
            seconds = min(self.patience[node_id], self._milliseconds / 1000)
            connection: Any = None
            _refusal.set("")
            try:
                async with asyncio.timeout(seconds):
                    connection = cast(Any, await super()._get_conn(node_id, group=group, no_hint=no_hint))
            except TimeoutError:
                log.warning("broker %s: no connection within %.1f s", node_id, seconds)
                _refusal.set(f"not within {seconds:.1f} s")
                self.patience[node_id] = 2 * seconds  # it may be slow, and no more
                self.force_metadata_update()
            except Exception as error:  # noqa: BLE001 - aiokafka ends its tasks over what it does not expect
                self.unconnected.failed(f"broker {node_id}: {error!r}")
                self.force_metadata_update()
                _refusal.set(repr(error))
            else:
                if connection is not None:
                    self.unconnected.over()
                self.patience[node_id] = max(_CONNECT_SECONDS, 2 * (time.monotonic() - began))
            finally:
                del self.connecting[place]
            if connection is None:
                self.errors[place] = _refusal.get()
                self.failed_at[place] = time.monotonic()
            else:
                self.failed_at.pop(place, None)
            return connection

    async def send(self, node_id: Any, request: Any, *, group: Any = ConnectionGroup.DEFAULT) -> Any:
        """As `AIOKafkaClient.send`."""
        if isinstance(request, FetchRequest):
            return await self._fetch(node_id, request, group)
        if isinstance(request, OffsetCommitRequest) and (task := asyncio.current_task()) is not None:
            # A task of its own: aiokafka goes on with a commit that was given up, and nobody asks how it has ended.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            # Put out of the group it sends -1, which an empty group takes from anybody, and 0 from no such member.
            own = cast(Any, request)
            own._consumer_group_generation_id = max(0, own._consumer_group_generation_id)
        answer = await self._send(node_id, request, group)
        if isinstance(request, OffsetFetchRequest):
            _pass_refusal(request, answer)
        return answer

    async def _send(self, node_id: Any, request: Any, group: Any) -> Any:
        await self._let_through(node_id, group)
        seconds = self.session_seconds if isinstance(request, HeartbeatRequest) else None
        limit = asyncio.timeout(seconds)
        try:
            async with self._awaited(node_id), limit:
                answer = cast(Any, await super().send(node_id, request, group=group))
            self._heed(node_id, group, answer)
            if isinstance(request, HeartbeatRequest | SyncGroupRequest):
                self.heard_at = time.monotonic()
            return answer
        except NodeNotReadyError:
            raise NodeNotReadyError(f"no request can be sent to broker {node_id}{unreached(self)}") from None
        except TimeoutError:
            if not limit.expired():
                raise
            if self._connected(node_id, group):
                cast(Any, self)._conns[node_id, group].close(reason=CloseReason.CONNECTION_TIMEOUT)
            raise RequestTimedOutError from None

    async def _fetch(self, node_id: Any, request: Any, group: Any) -> Any:
        """An answer that has not come through in time would not the next time, either. So less is asked for then, and
        more again where there is time enough for it."""
        wanted, limit, began = request._max_bytes, self.fetch_bytes.get(node_id), time.monotonic()
        if limit is not None:
            request._max_bytes = min(wanted, limit)
        try:
            answer = await self._send(node_id, request, group)
        except RequestTimedOutError:
            less = self.fetch_bytes[node_id] = max(_LEAST_BYTES, request._max_bytes // _LESS)
            log.warning("broker %s: a fetch was not answered in time, the next is of %s bytes", node_id, less)
            raise
        if limit is not None and 4 * (time.monotonic() - began) < self._milliseconds / 1000:
            size = sum(len(partition[-1] or b"") for _, partitions in answer.topics for partition in partitions)
            if 2 * size > limit == self.fetch_bytes.get(node_id):
                self.fetch_bytes[node_id] = 2 * limit
                if 2 * limit >= wanted:
                    del self.fetch_bytes[node_id]
        await self._pass_refusals(node_id, answer)
        return answer

    async def _pass_refusals(self, node_id: Any, answer: Any) -> None:
        """Errors that aiokafka does not expect become the one by which it asks who leads the partition now: another
        broker does, where a disk has failed."""
        refused = dict[str, str]()
        for topic, partitions in answer.topics:
            for index, one in enumerate(partitions):
                if one[1] not in _EXPECTED:
                    refused[f"{topic}/{one[0]}"] = f"[Error {one[1]}] {for_code(one[1]).__name__}"
                    partitions[index] = (one[0], NotLeaderForPartitionError.errno, *one[2:])
        if refused:
            what = f"broker {node_id} lets nothing be read of some partitions"
            some = ", ".join(f"{origin} ({error})" for origin, error in list(refused.items())[:5])
            self.refusals.setdefault(node_id, Outage(log, what)).failed(some)
            await asyncio.sleep(_AGAIN_SECONDS)
        elif self.refusals.pop(node_id, None) is not None:  # it may be asked for less
            log.warning("broker %s lets all be read that it is asked for; the rest may have no leader now", node_id)

    @property
    def throttled(self) -> bool:
        """Whether some broker wants nothing of us for now. Any thread may ask."""
        return any(self._throttled(node, group) for node, group in list(self.throttled_until))

    def _throttled(self, node_id: Any, group: Any = ConnectionGroup.DEFAULT) -> bool:
        return self.throttled_until.get((node_id, group), 0.0) > time.monotonic()

    async def _let_through(self, node_id: Any, group: Any = ConnectionGroup.DEFAULT) -> None:
        while self._throttled(node_id, group):
            await asyncio.sleep(self.throttled_until[node_id, group] - time.monotonic())

    def _heed(self, node_id: Any, group: Any, answer: Any) -> None:
        seconds = (getattr(answer, "throttle_time_ms", None) or 0) / 1000
        if seconds > 0:
            self.throttled_until[node_id, group] = time.monotonic() + seconds
        if seconds > _LATE_SECONDS:
            log.warning("broker %s throttles this client (a quota): it is sent nothing for %.1f s", node_id, seconds)

    @asynccontextmanager
    async def _awaited(self, node_id: Any) -> AsyncGenerator[None]:
        """An answer that takes long may be of a broker that leads nothing any more, and coordinates nothing."""
        loop = asyncio.get_running_loop()
        was_late = False

        def is_late() -> None:
            nonlocal timer, was_late
            self.late[node_id] += not was_late
            was_late = True
            self.force_metadata_update()
            timer = loop.call_later(_LATE_SECONDS, is_late)

        timer = loop.call_later(_LATE_SECONDS, is_late)
        try:
            yield
        finally:
            timer.cancel()
            self.late[node_id] -= was_late

    def _silent(self, node_id: Any) -> bool:
        since = self.connecting.get((node_id, ConnectionGroup.DEFAULT))
        return self.late[node_id] > 0 or (since is not None and time.monotonic() - since > _NEXT_SECONDS)

    def _connected(self, node_id: Any, group: Any = ConnectionGroup.DEFAULT) -> bool:
        connection = cast(Any, self)._conns.get((node_id, group))
        return connection is not None and connection.connected()

    def _nodes(self) -> list[Any]:
        """All that are known; in any order, those that do not answer last, and before them those that throttle."""
        nodes = [broker.nodeId for broker in cast(Any, self).cluster.brokers()]
        random.shuffle(nodes)
        return sorted(nodes, key=lambda node: (self._silent(node), self._throttled(node), not self._connected(node)))

    def get_random_node(self) -> Any:
        """One that answers, as far as is known."""
        return next(iter(self._nodes()), None)

    async def coordinator_lookup(self, coordinator_type: Any, coordinator_key: Any) -> Any:
        """As aiokafka's, of the next broker where one does not answer. An error that one tells is an answer."""
        request = FindCoordinatorRequest(coordinator_key, coordinator_type)
        answer = await _first([partial(self.send, node, request) for node in self._nodes()])
        if (error := for_code(answer.error_code)) is not NoError:
            raise error()
        return answer.coordinator_id

    async def _metadata_update(self, cluster_metadata: Any, topics: Any) -> bool:
        """As aiokafka's, which asks without a pause for as long as nobody leads a partition. Of other topics than the
        last time it is asked at once: a relay comes to hundreds, one after the other."""
        if self.updated_of == (these := frozenset(topics or ())):
            seconds = _UNSEEN_SECONDS if cluster_metadata.unauthorized_topics else _AGAIN_SECONDS
            await asyncio.sleep(max(0.0, self.updated_at + seconds - time.monotonic()))
        self.updated_of = these
        try:
            return await self._update_metadata(cluster_metadata, topics)
        finally:
            self.updated_at = time.monotonic()

    async def _update_metadata(self, cluster_metadata: Any, topics: Any) -> bool:
        """As aiokafka's `_metadata_update`, which waits for one broker before it asks the next one, always lets
        brokers make topics, and asks for all of the cluster's where a client has none."""
        nodes = self._nodes()
        if ("bootstrap", ConnectionGroup.DEFAULT) in self._conns or not nodes:
            await self._let_through(next(iter(nodes), None))
            return await super()._metadata_update(cluster_metadata, topics)

        try:
            metadata = await self._ask_any(nodes, None if topics is None else list(topics), make=False)
            missing = {topic for code, topic, *_ in metadata.topics if code == UnknownTopicOrPartitionError.errno}
            if new := missing.intersection(self.wanted()):  # alone, or all that are missing were made
                made = await self._ask_any(nodes, list(new), make=True)
                # Who may not make them is refused as one who may not see them; that they are missing counts then.
                told = {one[1]: one for one in made.topics if one[0] != TopicAuthorizationFailedError.errno}
                metadata.topics = [told.get(one[1], one) for one in metadata.topics]
        except (KafkaError, TimeoutError) as error:
            self.unanswered.failed(f"{error!r}, of brokers {nodes}")
            cluster_metadata.failed_update(None)
            return False
        self.unanswered.over()
        if not metadata.brokers:
            return False
        if self.seen is not None and topics:
            self._remember(self.seen, metadata.topics)
        cluster_metadata.update_metadata(metadata)
        return True

    async def learn(self, topic: str) -> None:
        """Ask for a topic that is not known, and for others that are to be learnt of by then; aiokafka would ask for
        all that are in use, which may be thousands. What is not told of now is left to that: it asks next where a topic
        is still missing, lets brokers make it, and tells of errors."""
        self.new.add(topic)
        async with self.learning:
            if topic not in self.new or not (nodes := self._nodes()):
                return
            these, self.new = self.new, set[str]()
            try:
                told = await self._ask_any(nodes, list(these), make=False)
            except Exception:  # noqa: BLE001 - whatever it is, aiokafka's question meets it, too
                return
            except asyncio.CancelledError:
                # Not always for us: who makes a connection for a producer that is ended meanwhile is cancelled.
                current = asyncio.current_task()
                if current is None or current.cancelling():
                    raise
                return
            told.topics = [one for one in told.topics if one[0] == NoError.errno]
            learnt = ClusterMetadata()
            learnt.update_metadata(told)
            # aiokafka 0.14 has no way to add topics to what is known. What it knows already may be newer than this.
            known: dict[str, Any] = cast(Any, self.cluster)._partitions
            for name, partitions in cast(dict[str, Any], cast(Any, learnt)._partitions).items():
                known.setdefault(name, partitions)

    def _remember(self, seen: dict[str, Any], told: list[Any]) -> None:
        """A topic that may not be seen any more looks to aiokafka as if it had been deleted, whose partitions go back.
        What was told of it before is added, so that it counts as one without that right, and has its partitions."""
        for code, topic, *_ in tuple(told):
            if code == TopicAuthorizationFailedError.errno and topic in seen:
                told.append(seen[topic])
            elif code == UnknownTopicOrPartitionError.errno:
                seen.pop(topic, None)
        seen.update((one[1], one) for one in told if one[0] == NoError.errno)

    async def _ask_any(self, nodes: Collection[Any], topics: list[str] | None, *, make: bool) -> Any:
        return await _first([partial(self._ask, node, MetadataRequest(topics, make)) for node in nodes])

    async def _ask(self, node_id: Any, request: Any) -> Any:
        await self._let_through(node_id)
        connection = await self._get_conn(node_id)
        if connection is None:
            raise NodeNotReadyError(f"no request can be sent to broker {node_id}{unreached(self)}")
        return await connection.send(request)


def _pass_refusal(request: Any, answer: Any) -> None:
    """A coordinator that moves, loads or refuses the group says so once for all partitions, and names none. aiokafka
    looks beside each, where it also knows what to do, but for a coordinator that is not available."""
    if code := getattr(answer, "error_code", 0):  # as of the second version of the answer
        if code == GroupCoordinatorNotAvailableError.errno:
            code = NotCoordinatorForGroupError.errno
        answer.topics = [(topic, [(index, -1, "", code) for index in asked]) for topic, asked in request._partitions]


async def _first(asks: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> T:
    """The first answer. The next one is asked when one has failed, or has said nothing for a moment."""
    asked, running = list[asyncio.Task[T]](), set[asyncio.Task[T]]()
    failed: BaseException | None = None
    try:
        while running or len(asked) < len(asks):
            if more := len(asked) < len(asks):
                asked.append(asyncio.create_task(asks[len(asked)]()))
                running.add(asked[-1])
            seconds = _NEXT_SECONDS if more else None
            done, running = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled() or (failed := task.exception()) is None:
                    return task.result()
        assert failed is not None
        raise failed
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
