"""Breaks a promise on purpose, to see that the verification notices: ``--sabotage lose-job``."""

from enum import Enum

import asyncpg

__all__ = ["Sabotage"]


class Sabotage(Enum):
    """What is done to the database behind the service's back, while the carrier fails."""

    NONE = "none"
    LOSE_JOB = "lose-job"
    REPEAT_JOB = "repeat-job"
    LOSE_MESSAGE = "lose-message"
    REPEAT_MESSAGE = "repeat-message"

    async def commit(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        """Do it."""
        if self is not Sabotage.NONE:
            tag = await connection.execute(_STATEMENTS[self])
            if tag.endswith(" 0"):
                raise RuntimeError(f"sabotage {self.value!r} found nothing to spoil")


# The last job of some blocked group.
_VICTIM = """
SELECT max(id) FROM sidings.job WHERE "group" IN (SELECT "group" FROM sidings.job WHERE failures > 0)
"""

_STATEMENTS = {
    Sabotage.LOSE_JOB: f"DELETE FROM sidings.job WHERE id = ({_VICTIM})",
    Sabotage.REPEAT_JOB: f"""
        INSERT INTO sidings.job (type, origin, "group", payload)
        SELECT type, origin, "group", payload FROM sidings.job WHERE id = ({_VICTIM})
    """,
    Sabotage.LOSE_MESSAGE: "UPDATE transport SET messages_seen = messages_seen - 1 WHERE id = 'lorry-0001'",
    Sabotage.REPEAT_MESSAGE: "UPDATE transport SET messages_seen = messages_seen + 1 WHERE id = 'lorry-0001'",
}
