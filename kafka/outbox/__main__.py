"""``python -m sidings.kafka.outbox --service NAME``: a relay alone, until SIGTERM or SIGINT.

Its connections are set up by the environment, as those of ``Service.from_env`` are; the options come before it.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys

import asyncpg

from ... import kafka as kafka_package
from ...collector import relax_collector
from ...errors import ConfigurationError, PostgresUnavailable, SidingsError
from ...executor import NOT_NOW, Backoff, Link, PostgresSettings
from ...outage import Outage
from ...schema import load_sql
from ..environment import environment
from ..settings import KafkaSettings
from .relay import Relay
from .settings import OutboxSettings

log = logging.getLogger("sidings.outbox")


async def _run(arguments: argparse.Namespace) -> None:
    settings = OutboxSettings.model_validate_json(arguments.settings)
    given = environment()
    if not {"postgres", "kafka"} <= given.keys():
        raise ConfigurationError("give --postgres and --kafka, or set SIDINGS_POSTGRES and SIDINGS_KAFKA")
    relay = Relay(arguments.service, given["postgres"], given["kafka"], settings)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    work = _relay(relay, given["postgres"], given["kafka"])
    tasks = [asyncio.create_task(work), asyncio.create_task(stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await relay.stop()


async def _relay(relay: Relay, postgres: PostgresSettings, kafka: KafkaSettings) -> None:
    await _check_partitioners(postgres, kafka)
    await relay.start()
    print(f"relay {relay.id} started", flush=True)
    await relay.wait()


async def _check_partitioners(postgres: PostgresSettings, kafka: KafkaSettings) -> None:
    """Else a key would go to one partition from here and to another from the service. Waits for Postgres, as the relay
    does."""
    link = Link(postgres)
    try:
        rows = await _load_topics(link, postgres.schema_name)
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError):  # no schema, or an older one: the relay says so
        return
    except asyncpg.PostgresError as error:
        raise ConfigurationError(f"the relay has to know how its service chooses partitions: {error}") from error
    finally:
        link.drop()
    known: dict[str, str] = {row["topic"]: row["partitioner"] for row in rows}
    if wrong := {t: p for t, p in known.items() if p != kafka.partitioners.get(t, "murmur2")}:
        raise ConfigurationError(
            f"the service chooses partitions otherwise than this relay would: set SIDINGS_KAFKA_PARTITIONERS as its "
            f"KafkaSettings.partitioners are; of its topics that differ: {json.dumps(wrong)}"
        )


async def _load_topics(link: Link, schema: str) -> list[asyncpg.Record]:
    backoff, outage = Backoff(), Outage(log, "the service's partitioners could not be read")
    while True:
        try:
            rows = await link.fetch(load_sql(kafka_package.__name__, "load_topics", schema))
            outage.over()
            return rows
        except (PostgresUnavailable, *NOT_NOW) as error:
            outage.failed(error)
            await backoff.sleep()


def main() -> int:
    """Run the command; 0 after a signal, 1 with the reason on stderr otherwise."""
    parser = argparse.ArgumentParser(prog="python -m sidings.kafka.outbox", description="Relay the outbox to Kafka.")
    parser.add_argument("--service", required=True, help="name of the service that the schema belongs to")
    for name in ("schema", "postgres", "kafka"):
        parser.add_argument(f"--{name}", help=f"default: $SIDINGS_{name.upper()}")
    parser.add_argument("--settings", default="{}", help="OutboxSettings as JSON")
    parser.add_argument("--verbose", action="store_true", help="log everything")
    arguments = parser.parse_args()
    for name in ("schema", "postgres", "kafka"):
        if (value := getattr(arguments, name)) == "":  # as of a variable that is not set; not the default
            parser.error(f"--{name}: it is empty: give one, or leave it out")
        if value is not None:
            os.environ[f"SIDINGS_{name.upper()}"] = value
    logging.basicConfig(
        level=logging.INFO if arguments.verbose else logging.WARNING,
        format="%(asctime)s %(process)d %(name)s %(levelname)s %(message)s",
    )
    relax_collector()  # this process is the relay's
    try:
        asyncio.run(_run(arguments))
    except (SidingsError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
