"""``python -m sidings.schema --service NAME DSN``: apply the migrations that are missing."""

import argparse
import asyncio
import os
import sys

import asyncpg

from ..errors import SidingsError
from .migrate import migrate


def main() -> int:
    """Run the command; 0 when the schema is up to date, 1 with the reason on stderr otherwise, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m sidings.schema", description="Migrate the schema of Sidings.")
    parser.add_argument("dsn", nargs="?", default=os.environ.get("SIDINGS_POSTGRES"), help="default: $SIDINGS_POSTGRES")
    parser.add_argument("--service", required=True, help="name of the service that the schema belongs to")
    schema = os.environ.get("SIDINGS_SCHEMA") or "sidings"  # the service's, as for all commands
    parser.add_argument("--schema", default=schema, help="default: $SIDINGS_SCHEMA, else sidings")
    arguments = parser.parse_args()
    if not arguments.dsn:
        parser.error("give the DSN of the database, or set SIDINGS_POSTGRES")
    password = os.environ.get("SIDINGS_POSTGRES_PASSWORD")
    try:
        applied = asyncio.run(
            migrate(arguments.dsn, service=arguments.service, schema=arguments.schema, password=password)
        )
    except (SidingsError, OSError, asyncpg.PostgresError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run it again, it is done as a whole or not at all", file=sys.stderr)
        return 130
    for migration in applied:
        print(f"applied {migration.version:04}_{migration.name}")
    print(f"the schema {arguments.schema!r} is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
