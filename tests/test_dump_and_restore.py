"""A dump of a service's schemas is restored on another server, as docs/operations.md says."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from sidings.devstack.binaries import postgres_program
from sidings.devstack.process import clean_environment
from sidings.schema import migrate

from .guide import DOCS, block
from .support import connected, value

TABLE = """
    CREATE TABLE terminal (id text PRIMARY KEY, acquirer text NOT NULL);
    SELECT sidings.directory_table('terminal', topic => 'terminals', key => '{id}');
"""


def program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = clean_environment(LC_ALL="C")
    return subprocess.run([postgres_program(name), *arguments], capture_output=True, text=True, env=env)


@pytest.mark.parametrize("whole", [True, False])
async def test_directory_tables_are_restored_with_their_own_schema(own_postgres: Any, tmp_path: Path, whole: bool):
    former, new = (own_postgres({"fsync": "off"}) for _ in range(2))
    guide = (DOCS / "operations.md").read_text().partition("\n## Another server\n")[2].partition("\n## ")[0]
    [schemas] = re.findall(r"`pg_dump (-n sidings -n public)`", guide)
    [told] = re.findall(r"`(COPY failed for table \"directory\")`", guide)
    await migrate(former.dsn, service="test")
    async with connected(former.dsn) as before:
        await before.execute(TABLE)
        await before.execute("SELECT sidings.enqueue('send_eta', '{}', origin => 't/0')")
    dump, given = str(tmp_path / "dump"), schemas.split() if whole else ["-n", "sidings"]
    assert program("pg_dump", "-Fc", "-f", dump, *given, former.dsn).returncode == 0
    # A database of its own: the schema "public" is in the dump.
    restored = program("pg_restore", "--clean", "--if-exists", "-d", new.dsn, dump)
    assert (restored.returncode == 0) == whole, restored.stderr
    assert await value(new.dsn, "SELECT count(*) FROM sidings.job") == 1
    async with connected(new.dsn) as after:
        if not whole:
            assert told in restored.stderr
            await after.execute(TABLE)
        await after.execute("DELETE FROM sidings.outbox")
        await after.execute("INSERT INTO terminal VALUES ('1', 'a')")
        assert await after.fetchval("SELECT topic FROM sidings.outbox") == "terminals"


async def test_after_a_backup_is_restored_no_number_or_fence_comes_again(own_postgres: Any, tmp_path: Path):
    """Receivers know them by what the backup lacks: other jobs were repeats to them, and the owner a stale one."""
    former, new = (own_postgres({"fsync": "off"}) for _ in range(2))
    statements = block("operations.md", "A backup is restored", "sql")
    await migrate(former.dsn, service="test")
    enqueue = "SELECT sidings.enqueue('pay', '{}', origin => 't/0')"
    take_over = "UPDATE sidings.origin SET epoch = epoch + 1 RETURNING epoch"
    async with connected(former.dsn) as before, connected(new.dsn) as after:
        await before.execute("INSERT INTO sidings.origin (origin, epoch) VALUES ('t/0', 3)")
        dump = str(tmp_path / "dump")
        assert program("pg_dump", "-Fc", "-f", dump, former.dsn).returncode == 0
        lost = [await before.fetchval(enqueue) for _ in range(40)]
        fence = await before.fetchval(take_over)
        assert program("pg_restore", "-d", new.dsn, dump).returncode == 0
        await after.execute(statements)
        assert await after.fetchval(enqueue) > max(lost)
        assert await after.fetchval(take_over) > fence
