"""Who handles the messages of which topic, and the directories."""

from typing import Any

from ..errors import ConfigurationError
from ..executor import MOST_IDLE_SECONDS
from ..jobs import Registry
from ..kafka import Directory, StatelessSubscription, Subscription
from ..kafka.subscription import MESSAGE_PREFIX

__all__ = ["Subscriptions"]

_IDLE_SECONDS = 30.0


class Subscriptions:
    """What was declared with `Service.consumer` and `Service.topic`, one for each topic, and `Service.directory`.

    registry: of the service; it gets a job type for the stored messages of each topic, and has the middleware.
    """

    def __init__(self, registry: Registry, *, has_postgres: bool) -> None:
        self.stored: dict[str, Subscription[Any]] = {}  # their offsets are in Postgres
        self.stateless: dict[str, StatelessSubscription[Any]] = {}
        self.directories: dict[str, Directory[Any]] = {}
        self._registry = registry
        self.has_postgres = has_postgres
        self._open = True

    @property
    def topics(self) -> list[str]:
        """All topics that have a handler."""
        return [*self.stored, *self.stateless]

    @property
    def declared(self) -> list[str]:
        """The job types, and the topics of consumers and directories."""
        types = [job_type.name.removeprefix(MESSAGE_PREFIX) for job_type in self._registry]  # one for each stored topic
        return [*types, *self.stateless, *self.directories]

    def close(self) -> None:
        """The service starts: what is declared from now on would be heard of by nobody."""
        self._open = False

    def must_be_open(self, what: str) -> None:
        """Raises `ConfigurationError` where the service has started."""
        if not self._open:
            raise ConfigurationError(f"{what} is declared too late, the service has started: declare it before")

    def add(self, subscription: Subscription[Any]) -> None:
        """One whose offsets are stored in Postgres. Raises `ConfigurationError`."""
        topic = subscription.topic
        self._must_be_free(topic)
        if not self.has_postgres:
            raise ConfigurationError(
                f"the consumer of {topic!r} stores its offsets in Postgres: give postgres=..., or use a consumer with "
                "stateless=True"
            )
        subscription.register(self._registry)
        self.stored[topic] = subscription

    def add_stateless(self, subscription: StatelessSubscription[Any]) -> None:
        """One that needs no Postgres. Raises `ConfigurationError`."""
        self._must_be_free(subscription.topic)
        subscription.middleware = self._registry.middleware
        self.stateless[subscription.topic] = subscription

    def add_directory(self, directory: Directory[Any]) -> None:
        """One that consumers, executor and readiness wait for. Raises `ConfigurationError`."""
        self.must_be_open(f"the directory {directory.topic!r}")
        if directory.topic in self.directories:
            raise ConfigurationError(
                f"two directories are declared for the topic {directory.topic!r}: use one, and a "
                "Directory(...) of your own for a second view"
            )
        self.directories[directory.topic] = directory

    def idle_seconds(self, batch_seconds: float) -> float | None:
        """How long a handler's transaction may be silent: a little longer than the slowest of them may take after the
        others of its batch, where none uses the transaction, but no longer than Postgres takes. None: for any time, as
        one of them may take.

        batch_seconds: How long handlers of one batch are begun.
        """
        longest = _IDLE_SECONDS
        for subscription in self.stored.values():
            if subscription.timeout is None:
                return None
            longest = max(longest, subscription.timeout + batch_seconds + 5.0)
        return min(longest, MOST_IDLE_SECONDS)

    def _must_be_free(self, topic: str) -> None:
        self.must_be_open(f"the consumer of {topic!r}")
        if topic in self.stored or topic in self.stateless:
            raise ConfigurationError(f"two consumers are declared for the topic {topic!r}")
