"""A database moves to another server by a logical replication, as docs/operations.md says."""

import re
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any

from sidings.devstack.binaries import postgres_program
from sidings.devstack.process import clean_environment
from sidings.schema import migrate

from .guide import DOCS
from .support import connected, eventually

ENDED = """
    INSERT INTO sidings.job_history
        (job_id, enqueued_at, finished_at, attempt, outcome, priority, type, origin, payload)
    VALUES (1, $1, $1, 1, 'discarded', 0, 'send_eta', 't/0', '{}')
"""


def postgres(name: str, *arguments: str, text: str | None = None) -> str:
    """What a program of Postgres' prints."""
    command = [postgres_program(name), *arguments]
    env = clean_environment(LC_ALL="C")
    return subprocess.run(command, check=True, capture_output=True, text=True, input=text, env=env).stdout


async def test_a_replication_that_lasts_for_days_goes_on_as_the_guide_says(own_postgres: Any):
    """It stopped at the first id of a day for which the new server had no table, and at the first attempt that the
    upkeep moved to its day, or deleted: nothing more of any table came. Nor was it ever begun where there were ids of
    messages from before the last eight days."""
    former, new = (own_postgres({"wal_level": "logical", "fsync": "off"}) for _ in range(2))
    guide = (DOCS / "operations.md").read_text().partition("\n## Another server\n")[2].partition("\n## ")[0]
    days, past_days, sequences = (
        next(sql for sql in re.findall(r"^ *```sql\n(.*?)```", guide, re.DOTALL | re.MULTILINE) if word in sql)
        for word in ("make_seen_day", "format('SELECT sidings.make_", "setval")
    )
    [publication] = re.findall(r"`(WITH \(publish_via_partition_root = true\))`", guide)
    [identity] = re.findall(r"`(ALTER TABLE sidings.job_history_default REPLICA IDENTITY FULL)`", guide)

    await migrate(former.dsn, service="test")
    postgres("psql", new.dsn, "-q", "-v", "ON_ERROR_STOP=1", text=postgres("pg_dump", "--schema-only", former.dsn))
    async with connected(former.dsn) as before, connected(new.dsn) as after:
        await before.execute(ENDED, datetime.now(UTC) - timedelta(days=20))
        await before.execute(
            "SELECT sidings.make_history_day(current_date - 21), sidings.make_seen_day(current_date - 21)"
        )
        await before.execute(r"INSERT INTO sidings.message_seen VALUES (current_date - 21, '\x02', 0, 0)")
        await before.execute(days)
        await before.execute(f"{identity}; {identity.replace('job_history_default', 'pause')}")
        await before.execute(f"CREATE PUBLICATION moved FOR ALL TABLES {publication}")
        await after.execute(days)
        for row in await before.fetch(past_days):
            await after.execute(row[0])
        await after.execute(f"CREATE SUBSCRIPTION moving CONNECTION '{former.dsn}' PUBLICATION moved")
        # Three weeks later, when the former server has made itself a table.
        await before.execute(r"SELECT sidings.record_seen('{\\x01}', '{0}', '{0}', now() + interval '21 days')")
        await before.execute(ENDED, datetime.now(UTC) + timedelta(days=21))
        await before.execute("SELECT sidings.make_history_day(current_date + 21)")  # as the upkeep does
        await before.execute("SELECT sidings.maintain(14)")
        enqueue = "SELECT sidings.enqueue('send_eta', '{}', origin => 't/0')"
        last = await before.fetchval(enqueue)
        caught_up = (
            "SELECT count(*) FROM sidings.job j, sidings.message_seen s, sidings.job_history h HAVING count(*) > 1"
        )
        await eventually(lambda: after.fetchval(caught_up), lambda: new.log.read_text()[-2_000:])
        for row in await before.fetch(sequences):
            await after.execute(row[0])
        assert await after.fetchval(enqueue) > last
        await after.execute("DROP SUBSCRIPTION moving")
