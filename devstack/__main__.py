"""The command line: `python -m sidings.devstack up|topic|down|status|logs|…`."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Sequence

from aiokafka.errors import KafkaError

from .broker import Broker
from .errors import DevstackError
from .jars import kafka_jars, spark_jars
from .kafka import Kafka
from .postgres import Postgres
from .prepared import prepare
from .stack import KAFKA_VARIABLE, POSTGRES_VARIABLE, Stack
from .state import ServerState
from .topics import create_topic

Server = Postgres | Kafka | Broker

ACTIONS: dict[str, tuple[Callable[[Server], None], str]] = {
    "restart": (lambda server: server.restart(), "stop cleanly and start again"),
    "kill": (lambda server: server.kill(), "SIGKILL"),
    "pause": (lambda server: server.pause(), "SIGSTOP: connections stay open, nothing answers"),
    "resume": (lambda server: server.resume(), "SIGCONT"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 when it did what it says, 1 otherwise."""
    options = _parser().parse_args(arguments)
    if options.directory == "":  # as of a variable that is not set; what it meant is not the default
        print("error: --directory: it is empty: name one, or leave it out", file=sys.stderr)
        return 1
    stack = Stack(options.directory, brokers=getattr(options, "brokers", None), secure=getattr(options, "secure", None))
    try:
        match options.command:
            case "up":
                _up(stack)
            case "fetch":
                kafka_jars()
                prepare()
                if options.spark:
                    spark_jars()
            case "down":
                stack.remove() if options.delete else stack.down()
            case "status":
                return _status(stack)
            case "topic":
                _topic(stack, options.name, options.partitions, compacted=options.compacted)
            case "logs":
                _logs(stack, options.server, options.lines)
            case action:
                for server in _servers(stack, options.server):
                    ACTIONS[action][0](server)
    except (DevstackError, OSError) as error:  # of the system: a full disk, a folder that may not be written
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sidings.devstack", description=__doc__)
    parser.add_argument("--directory", help="default: $SIDINGS_DEVSTACK_HOME, else .sidings-devstack")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start both servers and print where they are, as lines for a shell")
    up.add_argument(
        "--brokers",
        type=int,
        choices=range(1, 10),
        default=1,
        help="number of Kafka brokers (fixed at the first start)",
    )
    up.add_argument(
        "--secure",
        action="store_const",
        const=True,
        help="a SASL_SSL listener too (fixed at the first start)",
    )
    down = commands.add_parser("down", help="stop both servers; their data stays")
    down.add_argument("--delete", action="store_true", help="kill them and delete their data")
    fetch = commands.add_parser("fetch", help="fetch Kafka's jars into the cache and prepare its start, once")
    fetch.add_argument("--spark", action="store_true", help="Spark's connectors to Kafka and Postgres too")
    commands.add_parser("status", help="what runs where; exit code 1 when not all run")
    topic = commands.add_parser("topic", help="make a topic; Kafka makes none by itself here")
    topic.add_argument("name")
    topic.add_argument("--partitions", type=int, default=3, help="default: 3")
    topic.add_argument("--compacted", action="store_true", help="keep the last message of each key")
    logs = commands.add_parser("logs", help="the last lines of the servers' logs")
    logs.add_argument("-n", "--lines", type=int, default=40)
    for name, (_, text) in ACTIONS.items():
        commands.add_parser(name, help=text)
    for name in ("logs", *ACTIONS):
        commands.choices[name].add_argument(
            "server", nargs="?", default="all", help="postgres, kafka, kafka-2 (one broker), or all (default)"
        )
    return parser


def _servers(stack: Stack, name: str) -> list[Server]:
    if name.startswith("kafka-") and name.removeprefix("kafka-").isdigit():
        return [stack.kafka.broker(int(name.removeprefix("kafka-")))]
    known: dict[str, list[Server]] = {
        "postgres": [stack.postgres],
        "kafka": [stack.kafka],
        "all": [stack.postgres, stack.kafka],
    }
    if name not in known:
        raise DevstackError(f"there is no server {name!r}: say postgres, kafka, kafka-1 or all")
    return known[name]


def _up(stack: Stack) -> None:
    # What else is said goes to stderr, so that `eval "$(… up)"` works.
    given = stack.given()
    for variable, server in ((POSTGRES_VARIABLE, given.postgres), (KAFKA_VARIABLE, given.kafka)):
        if server:
            print(f"{variable} names a server, so none is started here: unset it for one", file=sys.stderr)
    endpoints = stack.up()
    print(f"export {POSTGRES_VARIABLE}='{endpoints.postgres}'")
    print(f"export {KAFKA_VARIABLE}='{endpoints.kafka}'")


def _topic(stack: Stack, name: str, partitions: int, *, compacted: bool) -> None:
    kafka = stack.given().kafka or stack.kafka.bootstrap
    config = {"cleanup.policy": "compact"} if compacted else None
    logging.basicConfig(handlers=[logging.NullHandler()])  # what the client logs beside an error is none of the output
    try:
        asyncio.run(create_topic(kafka, name, partitions=partitions, config=config))
    except KafkaError as error:
        raise DevstackError(f"Kafka at {kafka} does not answer ({error}); `up` starts the devstack's own") from error


def _status(stack: Stack) -> int:
    statuses = stack.status()
    for status in statuses:
        print(f"{status.name:<10} {status.state:<8} {status.pid or '-':<8} {status.address or '-':<22} {status.log}")
    all_run = len(statuses) > 1 and all(status.state is ServerState.RUNNING for status in statuses)
    return 0 if all_run else 1


def _logs(stack: Stack, name: str, lines: int) -> None:
    logs = [server.log for server in _servers(stack, name) if not isinstance(server, Kafka)]
    if name in ("kafka", "all"):
        logs += [broker.log for broker in stack.kafka.brokers]
    for log in logs:
        print(f"==> {log}")
        if log.exists():
            print("\n".join(log.read_text(errors="replace").splitlines()[-lines:]))


if __name__ == "__main__":
    sys.exit(main())
