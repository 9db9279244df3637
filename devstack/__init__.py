"""A real Postgres and a real Kafka on this machine, for the demo, the tests, and a user's own tests.

    python -m sidings.devstack up          # and: down, status, logs, restart, kill, pause, resume

    from sidings import devstack
    endpoints = devstack.ensure()          # .postgres: a DSN, .kafka: bootstrap servers

    pytest_plugins = ["sidings.devstack.fixtures"]    # `database`, `topic`, … for tests

Reading order: `stack` (both together), `postgres`, `kafka` and `broker`, then what these stand on: `process`
(a detached process with a pid file), `state`, `binaries`, `jars`, `prepared` (so that a broker starts faster),
`accounts`, `tls`, `locations`, `errors`. For tests: `sessions` (their servers), `databases`, `topics`.
`fixtures` and `__main__` are the two faces.
"""

from .broker import Broker
from .errors import DevstackError, ServerStartError, ServerStateError, ToolMissingError
from .jars import spark_jars
from .kafka import Kafka
from .postgres import Postgres
from .stack import Endpoints, Stack, ensure
from .state import ServerState, ServerStatus

__all__ = [
    "Broker",
    "DevstackError",
    "Endpoints",
    "Kafka",
    "Postgres",
    "ServerStartError",
    "ServerState",
    "ServerStateError",
    "ServerStatus",
    "Stack",
    "ToolMissingError",
    "ensure",
    "spark_jars",
]
