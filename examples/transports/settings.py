"""What the processes of the demo tell each other, and the demo's numbers. Durations are seconds."""

import os
from dataclasses import dataclass

__all__ = ["LEASE_SECONDS", "PARTITIONS", "SESSION_SECONDS", "Address", "Plan"]

PARTITIONS = 12

# As `service.py` sets them. Short, so that a takeover is seen within a minute's demo.
LEASE_SECONDS = 5.0
SESSION_SECONDS = 6.0


@dataclass(frozen=True)
class Address:
    """Where things are; passed to the child processes in their environment."""

    postgres: str
    kafka: str
    topic: str
    carrier: str = ""

    def environment(self) -> dict[str, str]:
        """As environment variables."""
        return {
            "TRACKER_POSTGRES": self.postgres,
            "TRACKER_KAFKA": self.kafka,
            "TRACKER_TOPIC": self.topic,
            "TRACKER_CARRIER": self.carrier,
        }

    @classmethod
    def from_environment(cls) -> "Address":
        """The reverse of `environment`."""
        get = os.environ.__getitem__
        return cls(get("TRACKER_POSTGRES"), get("TRACKER_KAFKA"), get("TRACKER_TOPIC"), get("TRACKER_CARRIER"))


@dataclass(frozen=True)
class Plan:
    """The demo's timetable. The moments are seconds after the first message."""

    transports: int
    rate: float
    seconds: float
    inline_seconds: float

    @property
    def faults_at(self) -> float:
        """The carrier's faults begin."""
        return self.seconds * 0.1

    @property
    def kill_at(self) -> float:
        """An instance gets SIGKILL."""
        return self.seconds * 0.25

    @property
    def replace_at(self) -> float:
        """An instance is stopped cleanly and a new one starts."""
        return self.seconds * 0.6

    @property
    def recovery_at(self) -> float:
        """The carrier's faults end."""
        return self.seconds * 0.8

    @property
    def inline_faults_at(self) -> float:
        """The same, in the run without jobs."""
        return self.inline_seconds * 0.2
