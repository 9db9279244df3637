"""What a publish returns, and what Postgres says of its messages later."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...jobs.connections import Rows
from .errors import MessageParked, NotPublished, RolledBack

if TYPE_CHECKING:
    from asyncpg import Record

__all__ = ["Receipt", "acknowledged", "has_crashed", "receipt_of"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What `publish` returns: with it `Outbox.published` finds the messages again. It is empty for direct messages."""

    ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    txid: int = 0
    subxid: int = 0
    timeline: str = ""
    crash: str = ""


def receipt_of(rows: Rows) -> Receipt:
    """From the rows of insert_message.sql: id, slot, transaction id, xmin, timeline, crash."""
    if not rows:
        return Receipt()
    txid, xmin, timeline, crash = rows[0][2], rows[0][3], rows[0][4], rows[0][5]
    # xmin has 32 bits: it counts on from the transaction's own id, which is never larger.
    subxid = (txid & ~0xFFFFFFFF) | xmin
    if subxid < txid:
        subxid += 1 << 32
    return Receipt(tuple(row[0] for row in rows), tuple(row[1] for row in rows), txid, subxid, timeline, crash)


def has_crashed(before: str, after: str | None) -> bool:
    """Whether all statistics have been reset, by the times at which each was. None: a standby answers."""
    return after is not None and not set(before.split()) & set(after.split())


def acknowledged(row: "Record") -> bool:
    """Whether Kafka has the message of this row of receipts.sql. Raises `MessageParked`, `RolledBack` and
    `NotPublished`."""
    if row["error"] is not None:
        raise MessageParked(f"message {row['id']} was refused and is parked: {row['error']}")
    match row["status"]:
        case "committed":
            return not row["waiting"]
        case "aborted":
            raise RolledBack(f"message {row['id']}: its transaction was rolled back")
        case None:
            raise NotPublished(f"message {row['id']}: its transaction is too old for Postgres to know what came of it")
        case _:
            return False
