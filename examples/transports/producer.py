"""The lorries' telematics: every lorry reports its position every few seconds, through Kafka, keyed by its name.

A process of its own: ``python -m examples.transports.producer --transports 1000 --rate 200 --seconds 35``. When it has
stopped, it writes what Kafka has acknowledged to the table `produced`, for the proof.
"""

import argparse
import asyncio
import json
import random
import time
from datetime import UTC, datetime

import asyncpg
from aiokafka import AIOKafkaProducer
from aiokafka.structs import RecordMetadata

from .children import unless_orphaned
from .flaky import Fault, fault_of
from .routes import Route, routes
from .settings import Address

__all__ = ["main"]

TICK_SECONDS = 0.02
Sent = tuple[str, int, "asyncio.Future[RecordMetadata]", datetime]


async def drive(producer: AIOKafkaProducer, topic: str, fleet: list[Route], rate: float, seconds: float) -> list[Sent]:
    """Send `rate` reports a second, round after round, the lorries in another order each round."""
    sent: list[Sent] = []
    last_report = dict.fromkeys((route.transport_id for route in fleet), 0.0)
    sequence = dict.fromkeys(last_report, 0)
    waiting: list[Route] = []
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds:
        for _ in range(int(elapsed * rate) - len(sent)):
            if not waiting:
                waiting = random.sample(fleet, len(fleet))
            route = waiting.pop()
            name = route.transport_id
            route.drive(elapsed - last_report[name])
            last_report[name] = elapsed
            sequence[name] += 1
            now = datetime.now(UTC)
            value = report(route, sequence[name], now)
            sent.append((name, sequence[name], await producer.send(topic, value, key=name.encode()), now))
        await asyncio.sleep(TICK_SECONDS)
    await producer.flush()
    return sent


def report(route: Route, sequence: int, now: datetime) -> bytes:
    """One message."""
    position = route.position()
    return json.dumps(
        {
            "transport_id": route.transport_id,
            "sequence": sequence,
            "latitude": position.latitude,
            "longitude": position.longitude,
            "speed_kmh": round(route.speed_kmh, 1),
            "sent_at": now.isoformat(),
        }
    ).encode()


async def main() -> None:
    """Send for the given time, then record what was acknowledged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="messages a second")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    address = Address.from_environment()
    producer = AIOKafkaProducer(
        bootstrap_servers=address.kafka, acks="all", enable_idempotence=True, linger_ms=5, client_id="lorries"
    )
    await producer.start()
    try:
        sent = await drive(producer, address.topic, routes(options.transports), options.rate, options.seconds)
        rows = [
            (name, sequence, (await acknowledged).partition, at, fault_of(name) is Fault.NONE)
            for name, sequence, acknowledged, at in sent
        ]
    finally:
        await producer.stop()
    connection = await asyncpg.connect(address.postgres)
    try:
        await connection.copy_records_to_table("produced", records=rows)
    finally:
        await connection.close()


if __name__ == "__main__":
    asyncio.run(unless_orphaned(main()))
