"""The state of the consumer model: what stands in the database, and what the instances have under way.

Messages are numbers, in the order of the log. A transaction that is rolled back leaves nothing, so what it does is
kept in it until it commits.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

__all__ = [
    "ADVANCED",
    "ASKS",
    "CALLS",
    "LOOKS",
    "SECOND",
    "Budget",
    "Member",
    "Message",
    "Offset",
    "Protocol",
    "Scenario",
    "State",
    "Tx",
    "swap",
]

# What comes next in a transaction: to record ids, to look at repeats again, to ask what is parked, to call handlers
# (and move the offsets), to commit.
LOOKS, SECOND, ASKS, CALLS, ADVANCED = "looks", "second", "asks", "calls", "advanced"

T = TypeVar("T")


def swap(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """The tuple with one item replaced."""
    return (*items[:index], item, *items[index + 1 :])


class Message(NamedTuple):
    """A message in the log. id: an empty string, where it has none."""

    partition: int
    offset: int
    key: str = "k"
    id: str = ""


class Offset(NamedTuple):
    """A row of `consumer_offset`; what an instance knows of it."""

    next: int
    resets: int


class Tx(NamedTuple):
    """A transaction of an instance. places: the stored offsets as it knows them. resets: how often the partitions had
    been reset when it began. snapshot: of `seen`, while it records. recorded: messages whose ids it has recorded.
    repeats, aside: messages that are passed over, that become jobs. locks, moves: the rows of offsets that it has
    changed, and to what. rest: messages whose ids it takes back. parks: it stores its message as a
    job."""

    phase: str
    items: tuple[int, ...]
    places: tuple[Offset | None, ...]
    resets: tuple[int, ...]
    snapshot: tuple[int, ...] | None = None
    recorded: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()
    aside: tuple[int, ...] = ()
    locks: tuple[int, ...] = ()
    moves: tuple[int, ...] = ()
    rest: tuple[int, ...] = ()
    parks: bool = False


class Member(NamedTuple):
    """An instance. places: where each partition stands, None: to be placed."""

    places: tuple[Offset | None, ...]
    tx: Tx | None


class Budget(NamedTuple):
    """How many messages may be parked, answers to commits be lost, offsets be reset, and records vanish."""

    parks: int = 0
    losses: int = 0
    resets: int = 0
    vanishes: int = 0


class State(NamedTuple):
    """Everything. seen: the messages beside whose ids their places stand in `message_seen`. jobs: messages that wait as
    jobs, in the order of their positions. effects: how often each message has had them, since it was delivered again.
    gone: the messages whose records are in the log no more. looked: the jobs that a person has found before the reset;
    by a wrong protocol."""

    offsets: tuple[Offset, ...]
    seen: tuple[int, ...]
    jobs: tuple[int, ...]
    effects: tuple[int, ...]
    members: tuple[Member, ...]
    budget: Budget
    gone: tuple[int, ...] = ()
    looked: tuple[int, ...] | None = None
    broken: str = ""


_NO_FAULTS = Budget()


@dataclass(frozen=True)
class Protocol:
    """The protocol, as choices between the right way (the default) and wrong ones (in the comment)."""

    expects: str = "the stored offset"  # "the message's offset", "nothing": before the offset moves
    resets: str = "are expected, too"  # "are not"
    reset: str = "is looked for"  # "is not": by instances
    places: str = "beside the ids"  # "not kept"
    taken: str = "waited for"  # "a repeat": an id that an open transaction has recorded
    second_look: bool = True
    # "stay recorded", "are taken back, whoever recorded them": ids of messages to which a transaction does not come
    rest: str = "are taken back"
    parked: str = "asked for"  # "not asked for": before a handler is called
    parking: str = "with the offset"  # "a transaction of its own", "without its id"
    cancels: str = "behind the lock"  # "what it has seen before": jobs, at a reset


@dataclass(frozen=True)
class Scenario:
    """What is in the log, where each partition ends, and what may happen."""

    log: tuple[Message, ...]
    ends: tuple[int, ...]
    budget: Budget = _NO_FAULTS
