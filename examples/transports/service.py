"""The service: what you would write yourself. A message updates its transport's row and enqueues a job that tells the
carrier the new time of arrival; both are committed together with the message's offset, or not at all."""

import os
from datetime import datetime, timedelta

from pydantic import BaseModel
from sidings import Discard, ExecutorSettings, Job, KafkaSettings, Message, Retry, Service, Transaction
from tenacity import wait_exponential, wait_random

from .carrier import Carrier
from .routes import Place, distance_km

LEAST_KMH = 5.0

carrier = Carrier(os.environ["TRACKER_CARRIER"])
service = Service(
    "tracker",
    postgres=os.environ["TRACKER_POSTGRES"],
    # Short, so that a takeover is seen within a minute's demo; the defaults are 10 and 15 seconds.
    kafka=KafkaSettings(bootstrap=os.environ["TRACKER_KAFKA"], session_seconds=6),
    executor=ExecutorSettings(lease_seconds=5),
)


class Position(BaseModel):
    """A message of the topic `positions`; its key is the transport's id."""

    transport_id: str
    sequence: int
    latitude: float
    longitude: float
    speed_kmh: float
    sent_at: datetime


class SendEta(BaseModel):
    """The payload of the job."""

    transport_id: str
    sequence: int
    sent_at: datetime
    eta: datetime


@service.job(group="transport_id", retry=Retry(wait=wait_exponential(0.5, max=4) + wait_random(0, 1)), timeout=2)
async def send_eta(job: Job[SendEta]) -> None:
    """A transport's calls run one at a time, in order. One that fails is retried, and delays no other transport."""
    await carrier.send_eta(job.payload.transport_id, job.payload.eta)


@service.consumer(os.environ["TRACKER_TOPIC"])
async def on_position(message: Message[Position], tx: Transaction) -> None:
    """The main line: quick, whatever the carriers do."""
    position = message.value
    eta = await arrival(position, tx)
    about = position.model_dump(include={"transport_id", "sequence", "sent_at"})
    await send_eta.enqueue(tx, SendEta(eta=eta, **about))


async def arrival(position: Position, tx: Transaction) -> datetime:
    """Update the transport's row; when will it arrive?"""
    destination = await tx.fetchrow(
        """
        UPDATE transport
        SET latitude = $2, longitude = $3, speed_kmh = $4, last_sequence = $5, reported_at = $6,
            messages_seen = messages_seen + 1
        WHERE id = $1
        RETURNING destination_latitude, destination_longitude
        """,
        *(position.transport_id, position.latitude, position.longitude, position.speed_kmh, position.sequence),
        position.sent_at,
    )
    if destination is None:  # no later attempt would find it either
        raise Discard(f"{position.transport_id} is unknown")
    remaining_km = distance_km(Place(position.latitude, position.longitude), Place(*destination))
    # Many a position is of a lorry that stands: it will go on.
    return position.sent_at + timedelta(hours=remaining_km / max(LEAST_KMH, position.speed_kmh))
