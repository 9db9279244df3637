"""What a service consists of: the parts, made and connected to each other, but not started."""

from dataclasses import dataclass

from ..errors import ConfigurationError
from ..executor import PostgresSettings
from ..jobs import Registry
from ..kafka import (
    Consumer,
    DeadLetters,
    KafkaExecutor,
    KafkaSettings,
    Outbox,
    Producer,
    Relay,
    Topics,
    Transactions,
    check_topic,
)
from .configuration import Configuration
from .subscriptions import Subscriptions

__all__ = ["Database", "Messaging", "Parts"]

_MOST_BYTES = 2**31 - 1  # of a message, as the protocol counts them


@dataclass(frozen=True, slots=True)
class Messaging:
    """The parts that need Kafka. group: of the consumer."""

    settings: KafkaSettings
    group: str
    producer: Producer
    dead_letters: DeadLetters


@dataclass(frozen=True, slots=True)
class Database:
    """The parts that need Postgres. relay: only with Kafka, and if this process is to send what waits in the outbox."""

    settings: PostgresSettings
    executor: KafkaExecutor
    transactions: Transactions
    topics: Topics
    outbox: Outbox
    relay: Relay | None


class Parts:
    """All that the configuration asks for. The consumer is made last, when everything has been declared."""

    def __init__(self, configuration: Configuration, registry: Registry) -> None:
        self.messaging = _messaging(configuration)
        self.database = _database(configuration, registry, self.messaging)
        self._configuration = configuration
        self._registry = registry

    def make_consumer(self, subscriptions: Subscriptions) -> Consumer | None:
        """None: there is nothing to consume, and no topic to join for its jobs. Raises `ConfigurationError`."""
        messaging, database = self.messaging, self.database
        if messaging is None:
            if declared := subscriptions.topics:
                raise ConfigurationError(
                    f"consumers of {', '.join(declared)} are declared: give kafka=... (Service.from_env: SIDINGS_KAFKA)"
                )
            return None
        for subscription in subscriptions.stored.values():
            subscription.check()
        homes = {job_type.home for job_type in self._registry if job_type.home is not None}
        for home in homes:
            check_topic(home, "home")
        joined = {*self._configuration.topics, *homes}  # with no member for its topic, nobody would run these jobs
        if not (subscriptions.topics or (joined and database is not None)):
            return None
        consumer = Consumer(
            self._configuration.name,
            messaging.settings,
            subscriptions.stored,
            joined,
            None if database is None else database.transactions,
            None if database is None else database.executor.rebalance_listener,
            stateless=subscriptions.stateless,
            dead_letters=messaging.dead_letters,
            topic_table=None if database is None else database.topics,
            prometheus=self._configuration.prometheus,
        )
        if database is not None:
            database.executor.on_replaced.append(consumer.renew)
        return consumer


def _messaging(configuration: Configuration) -> Messaging | None:
    kafka = configuration.kafka
    if kafka is None:
        return None
    group = kafka.group or configuration.name
    # Others have sent what goes to the dead letters: how large it may be, the brokers say alone.
    unlimited = configuration.outbox.model_copy(update={"max_message_bytes": _MOST_BYTES})
    return Messaging(
        settings=kafka,
        group=group,
        producer=Producer(kafka, configuration.outbox),
        dead_letters=DeadLetters(group, Producer(kafka, unlimited)),
    )


def _database(configuration: Configuration, registry: Registry, messaging: Messaging | None) -> Database | None:
    name, postgres, prometheus = configuration.name, configuration.postgres, configuration.prometheus
    if postgres is None:
        return None
    executor = KafkaExecutor(name, registry, postgres, configuration.executor, prometheus=prometheus)
    transactions = Transactions(postgres, executor.committed)
    executor.on_replaced.append(transactions.renew)
    topics = Topics(postgres, {} if messaging is None else messaging.settings.partitioners)
    registry.has_grown = topics.has_grown
    relay, wake = None, None
    if messaging is not None and configuration.outbox.relay:
        relay = Relay(name, postgres, messaging.settings, configuration.outbox, prometheus=prometheus)
        wake = relay.wake
    direct = None if messaging is None else messaging.producer
    outbox = Outbox(postgres, configuration.outbox, direct=direct, wake=wake)
    transactions.on_published = wake
    return Database(postgres, executor, transactions, topics, outbox, relay)
