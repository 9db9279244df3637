"""The same without jobs, for comparison: the message handler calls the carrier itself.

Everything else is equal: the consumer (which sets a failing partition aside, so that the process's other partitions go
on), the timeout, the waits between retries.
"""

import os

from sidings import ExecutorSettings, KafkaSettings, Message, Retry, Service, Transaction
from tenacity import wait_exponential, wait_random

from .audit import Audit
from .carrier import Carrier
from .service import Position, arrival

audit: Audit | None = None  # the process that runs this service puts it here
carrier = Carrier(os.environ["TRACKER_CARRIER"])
service = Service(
    "tracker_inline",
    postgres=os.environ["TRACKER_POSTGRES"],
    kafka=KafkaSettings(bootstrap=os.environ["TRACKER_KAFKA"], session_seconds=6),
    executor=ExecutorSettings(lease_seconds=5),
)


@service.consumer(
    os.environ["TRACKER_TOPIC"], retry=Retry(wait=wait_exponential(0.5, max=4) + wait_random(0, 1)), timeout=2
)
async def on_position(message: Message[Position], tx: Transaction) -> None:
    """One message after the other; a call that fails holds up all that stand behind it in the partition."""
    assert audit is not None
    position = message.value
    eta = await arrival(position, tx)
    async with audit.run(position.transport_id, position.sequence, position.sent_at):
        await carrier.send_eta(position.transport_id, eta)
