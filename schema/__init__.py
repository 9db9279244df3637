"""Every table, index and SQL function that Sidings needs, as numbered migrations.

Reading order: ``migrations/0045_jobs.sql``, whose comments carry the reasons; `sql` (the queries that stand beside the
code of the other packages), `servers` (one of several) and `refusals` (what it means when none lets us in), `blockers`
(who has the locks), and `migrate`: `migrate()` applies what is missing, `check()` is what a starting service calls.
"""

from .migrate import Migration, check, migrate, migrations
from .refusals import REFUSED, check_dsn, refusal, without_account
from .servers import connect_any
from .sql import check_service_name, int_array, load_sql, valid_schema_name

__all__ = [
    "REFUSED",
    "Migration",
    "check",
    "check_dsn",
    "check_service_name",
    "connect_any",
    "int_array",
    "load_sql",
    "migrate",
    "migrations",
    "refusal",
    "valid_schema_name",
    "without_account",
]
