"""Much to read and to send over a narrow network: what does not come through in time is followed by less."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from aiokafka.errors import RequestTimedOutError
from aiokafka.protocol.fetch import FetchRequest
from sidings import KafkaSettings, Message
from sidings.devstack.topics import create_topic
from sidings.kafka import membership

from .consumer_support import Number, a_service, producing
from .outbox_support import arrived, emptied, publish, publishing, records, relaying
from .support import SECONDS, eventually

BYTES, EACH, PARTITIONS = 16_000, 30, 8  # 3.8 MB
PIECE, PAUSE = 16_384, 0.05  # at most 330 kB/s
REQUEST_SECONDS = 6.0
IN_TIME = 60.0
VALUE = Number(n=1).model_dump_json().encode().ljust(BYTES)


class Narrow:
    """A network between a broker and its clients that is slow in both directions while `slow` is true. produce_seconds:
    so late is what clients send to topics."""

    def __init__(self) -> None:
        self.slow = False
        self.produce_seconds = 0.0
        self.port = self.broker = 0
        self._streams: list[asyncio.StreamWriter] = []

    async def serve(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        upward, server = await asyncio.open_connection("127.0.0.1", self.broker)
        self._streams.extend((target, server))
        await asyncio.gather(self._pump(source, server, True), self._pump(upward, target, False))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, target_is_broker: bool) -> None:
        with suppress(ConnectionError):
            while piece := await source.read(PIECE):
                if target_is_broker and piece[4:6] == b"\0\0":  # the length of a request, then its kind
                    await asyncio.sleep(self.produce_seconds)
                target.write(piece)
                await target.drain()
                await asyncio.sleep(PAUSE * len(piece) / PIECE if self.slow else 0)
        target.close()

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


@pytest.fixture
async def narrow(own_kafka: Any) -> AsyncIterator[Narrow]:
    """The way to a broker that is reached on no other."""
    network = Narrow()
    listener = await asyncio.start_server(network.serve, "127.0.0.1", 0)
    network.port = listener.sockets[0].getsockname()[1]
    settings = {"advertised.listeners": f"PLAINTEXT://127.0.0.1:{network.port}"}
    kafka = await asyncio.to_thread(lambda: own_kafka(settings=settings))
    network.broker = int(kafka.bootstrap.rpartition(":")[2])
    try:
        yield network
    finally:
        listener.close()
        network.close()


async def fill(bootstrap: str, topic: str, **options: Any) -> None:
    await create_topic(bootstrap, topic, partitions=PARTITIONS, **options)
    async with producing(bootstrap) as producer:
        for p in range(PARTITIONS):
            sent = [await producer.send(topic, VALUE, key=b"%d.%d" % (p, n), partition=p) for n in range(EACH)]
            await asyncio.gather(*sent)


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_what_is_fetched_fits_through_the_network(narrow: Narrow) -> None:
    """A fetch of a megabyte of each partition did not come in time, and the same was asked for again, for ever."""
    bootstrap = f"127.0.0.1:{narrow.port}"
    await fill(bootstrap, "much")
    await fill(bootstrap, "rows", config={"cleanup.policy": "compact"})
    kafka = KafkaSettings(bootstrap=bootstrap, request_seconds=REQUEST_SECONDS, rebalance_seconds=5.0)
    narrow.slow = True
    service = a_service(None, kafka)
    rows = service.directory("rows", model=Number)
    handled = set[tuple[int, int]]()

    @service.consumer("much", stateless=True, dead_letter="dead")
    async def handle(message: Message[Number]) -> None:
        handled.add((message.partition, message.offset))

    async def ready() -> bool:
        return rows.ready and len(handled) == EACH * PARTITIONS

    async with asyncio.timeout(2 * IN_TIME), service:
        await eventually(ready, lambda: (len(handled), rows.progress), seconds=IN_TIME)
        narrow.slow = False


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_a_fetch_that_one_broker_does_not_answer_says_nothing_of_the_others(own_kafka: Any) -> None:
    """Those from all others became smaller, too, and what these answered let more be asked for from that one again."""
    kafka = await asyncio.to_thread(lambda: own_kafka(brokers=2))
    await create_topic(kafka.bootstrap, "much", partitions=2)
    settings = KafkaSettings(bootstrap=kafka.broker(1).address, request_seconds=REQUEST_SECONDS, rebalance_seconds=5.0)
    consumer = membership.make_client(settings, "test")
    client: Any = consumer._client
    await membership.connect(consumer, asyncio.Event(), SECONDS)
    try:
        async with producing(kafka.bootstrap) as producer:
            for p in range(2):
                await asyncio.gather(*[await producer.send("much", VALUE, partition=p) for _ in range(400)])  # 6.4 MB
            cluster: Any = producer.client.cluster
            led = {node: next(p for t, p in cluster.partitions_for_broker(node) if t == "much") for node in (1, 2)}

        async def fetched(node: int) -> int:
            wanted = [("much", [(led[node], 0, 50_000_000)])]
            answer = await client.send(node, FetchRequest(100, 1, 50_000_000, 0, wanted, rack_id=""))
            return len(answer.topics[0][1][0][-1])

        assert [await client.ready(node) for node in (1, 2)] == [True, True]
        everything = await fetched(1)
        assert await fetched(2) == everything
        await asyncio.to_thread(kafka.broker(2).pause)
        with pytest.raises(RequestTimedOutError):
            await fetched(2)
        await asyncio.to_thread(kafka.resume)
        assert [await fetched(1) for _ in range(3)] == [everything] * 3
        assert await eventually(lambda: client.ready(2))
        assert await fetched(2) <= 50_000_000 / 16 < everything
    finally:
        await asyncio.to_thread(kafka.resume)
        await membership.close(consumer)


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_what_is_sent_fits_through_the_network(database: str, narrow: Narrow) -> None:
    """As much was tried again and again; nothing arrived, or all of it many times."""
    bootstrap = f"127.0.0.1:{narrow.port}"
    await create_topic(bootstrap, "much", partitions=PARTITIONS)
    count = EACH * PARTITIONS
    await publish(database, "much", [(f"k{n % 40}", b"%d" % n + VALUE) for n in range(count)])
    narrow.slow = True
    async with relaying(database, bootstrap, delivery_seconds=REQUEST_SECONDS):
        await emptied(database, seconds=IN_TIME)
        narrow.slow = False
    assert len({record.value for record in await records(bootstrap, "much")}) == count
    assert await arrived(bootstrap, "much") < 3 * count


@pytest.mark.chaos
@pytest.mark.timeout(180)
async def test_rounds_that_are_small_are_not_late_for_their_size(database: str, narrow: Narrow) -> None:
    """Of brokers that were overloaded, each round was of one message for as long as they took a while for any."""
    bootstrap = f"127.0.0.1:{narrow.port}"
    await create_topic(bootstrap, "much", partitions=PARTITIONS)
    patient = {"delivery_seconds": 2.0, "metadata_seconds": 3.0}
    async with relaying(database, bootstrap, **patient), publishing(database) as (outbox, _):

        async def failed_often() -> bool:
            return any(state.retries >= 5 for state in await outbox.failing())

        narrow.produce_seconds = 3.0
        await publish(database, "much", [(f"k{n % 40}", b"%d" % n) for n in range(400)])
        await eventually(failed_often, seconds=IN_TIME)
        narrow.produce_seconds = 0.7  # more than a quarter of `delivery_seconds`
        await emptied(database, seconds=IN_TIME)
