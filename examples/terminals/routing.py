"""The service that decides which bank authorises a payment. It needs Kafka, and nothing else."""

from typing import NamedTuple

from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from sidings import Directory, KafkaSettings, Message, Service

__all__ = ["Authorization", "Payment", "Routing", "TerminalAcquirer", "Topics", "make_routing"]


class Topics(NamedTuple):
    """directory: compacted."""

    directory: str
    payments: str
    authorizations: str
    dead_letters: str


class TerminalAcquirer(BaseModel):
    """A row of the directory."""

    terminal_id: str
    acquirer_id: str


class Payment(BaseModel):
    """What comes in."""

    number: int
    terminal_id: str


class Authorization(BaseModel):
    """What goes out. acquirer_id: the bank to ask; None: there is none for this terminal, so it is declined.

    It may come twice for one `number`, and with different banks. The first one counts: ask no second bank. (Both have
    the terminal as their key, so they come in order.)
    """

    number: int
    acquirer_id: str | None


class Routing(NamedTuple):
    """The service, and its directory."""

    service: Service
    terminals: Directory[TerminalAcquirer]


def make_routing(kafka: str, topics: Topics) -> Routing:
    """The service, not started yet."""
    service = Service(
        "routing", kafka=KafkaSettings(bootstrap=kafka, session_seconds=3.0), prometheus=CollectorRegistry()
    )
    terminals = service.directory(topics.directory, model=TerminalAcquirer)

    @service.consumer(topics.payments, stateless=True, dead_letter=topics.dead_letters)
    async def route(message: Message[Payment]) -> None:
        """Decide. A payment that is delivered again, as after a kill, is decided again, by the directory as it is then:
        nothing here remembers the first decision."""
        terminal = terminals.get(message.value.terminal_id)
        decision = Authorization(
            number=message.value.number, acquirer_id=None if terminal is None else terminal.acquirer_id
        )
        await service.producer.send(topics.authorizations, key=message.key, value=decision)

    return Routing(service, terminals)
