"""The tenants example as the tests run it: its processes over a database and topics of their own."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
from sidings.devstack.databases import create_database, drop_database
from sidings.devstack.topics import delete_topics

from examples.tenants.settings import Settings, Topics
from examples.tenants.topics import make_topics

from .consumer_support import producing
from .outbox_support import records
from .support import SECONDS, eventually, fetch

ROOT = Path(__file__).resolve().parents[1]
ANN = {"email": "ann@example.com", "name": "Ann", "billing_address": "Main Street 1"}


class Process:
    """A process of the example. `url`: the first line that it prints."""

    def __init__(self, module: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"examples.tenants.{module}", *arguments],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: Queue[str] = Queue()
        assert self.process.stdout is not None
        threading.Thread(target=lambda out=self.process.stdout: self._lines.put(out.readline()), daemon=True).start()

    def started(self) -> "Process":
        self.url = self._lines.get(timeout=SECONDS).strip()
        assert self.url, f"the process ended with {self.process.poll()}"
        return self

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def dead(self) -> None:
        """Wait until it has been killed."""
        code = await asyncio.to_thread(self.process.wait, SECONDS)
        assert code == -signal.SIGKILL, code

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(SECONDS)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Stage:
    """A database, topics, and a payment provider, for processes of the example."""

    def __init__(self, dsn: str, kafka: str, folder: Path) -> None:
        self.dsn = dsn
        self.kafka = kafka
        self.prefix = f"t{secrets.token_hex(4)}-"
        self.topics = Topics(self.prefix)
        self._folder = folder
        self._crash = folder / "crash"
        self._stack = ExitStack()
        self.provider = self.start_provider().started()

    def start_provider(self, port: int = 0) -> Process:
        return self._keep(Process("provider", "--port", str(port), "--journal", str(self._folder / "journal.jsonl")))

    def start(self, parts: str, **settings: object) -> Process:
        """A process with these parts; `settings`: fields of `Settings`. Call its `started`."""
        values: dict[str, object] = {
            "postgres": self.dsn,
            "kafka": self.kafka,
            "payment": self.provider.url,
            "parts": parts,
            "prefix": self.prefix,
            "port": 0,
            "lease_seconds": 1.5,
            "session_seconds": 1.5,
            "payment_seconds": 1.0,
            **settings,
        }
        environment = {f"TENANTS_{name.upper()}": str(value) for name, value in values.items()}
        return self._keep(Process("serve", environment=environment | {"TENANTS_CRASH_FILE": str(self._crash)}))

    def crash_at(self, point: str) -> None:
        """The first process that reaches this point dies there."""
        self._crash.write_text(point)

    def _keep(self, process: Process) -> Process:
        self._stack.callback(process.end)
        return process

    async def mode(self, mode: str, times: int = 1) -> None:
        """The provider's next registrations go wrong."""
        async with httpx.AsyncClient(base_url=self.provider.url, timeout=SECONDS) as http:
            (await http.put(f"/mode/{mode}", params={"times": times})).raise_for_status()

    async def journal(self, tenant: object) -> list[dict[str, Any]]:
        """What the provider has done for a tenant."""
        async with httpx.AsyncClient(base_url=self.provider.url, timeout=SECONDS) as http:
            return [entry for entry in (await http.get("/journal")).json() if entry["tenant"] == str(tenant)]

    async def events(self, topic: str, tenant: object) -> list[Any]:
        """What stands in a topic with the tenant's key."""
        return [record for record in await records(self.kafka, topic) if record.key == str(tenant).encode()]

    async def events_of_users(self, tenant: object) -> list[Any]:
        """What stands in the users' topic of a tenant."""
        found = await records(self.kafka, self.topics.users)
        return [record for record in found if record.value and value_of(record)["tenant"] == str(tenant)]

    async def send_users(self, tenant: object, transaction: str, events: list[Any], *, number: int = 1) -> None:
        """Send these events of users again as parts, from `number` on, of a transaction of three."""
        async with producing(self.kafka) as producer:
            for count, event in enumerate(events, number):
                headers = [("transaction", f"{transaction}/{count}/3".encode())]
                await producer.send_and_wait(
                    self.topics.users, event.value, key=event.key, partition=event.partition, headers=headers
                )

    async def settled(self, tenant: object) -> None:
        """Wait until nothing is under way for a tenant any more, and both outboxes are empty."""

        async def nothing() -> bool:
            query = """
                SELECT 1 FROM tenants_processor.registration WHERE outcome IS NULL AND tenant = $1::text::uuid
                UNION ALL SELECT 1 FROM sidings_processor.job WHERE "group" = $1
                UNION ALL SELECT 1 FROM sidings_processor.outbox UNION ALL SELECT 1 FROM sidings_api.outbox
            """
            return not await fetch(self.dsn, query, str(tenant))

        await eventually(nothing, "nothing is under way any more")

    def close(self) -> None:
        self._stack.close()


@contextmanager
def staged(postgres: str, kafka: str, folder: Path) -> Iterator[Stage]:
    """A stage; all its processes are gone after the block."""
    dsn = asyncio.run(create_database(postgres, f"tenants_{secrets.token_hex(4)}"))
    stage = Stage(dsn, kafka, folder)

    try:
        asyncio.run(make_topics(Settings(postgres=dsn, kafka=kafka, prefix=stage.prefix), partitions=2))
        yield stage
    finally:
        stage.close()
        with contextlib.suppress(Exception):
            asyncio.run(delete_topics(kafka, stage.topics.all()))
        asyncio.run(drop_database(postgres, dsn))


def change_of(record: Any) -> str:
    """Which change an event tells of."""
    return dict(record.headers)["change"].decode()


def value_of(record: Any) -> dict[str, Any]:
    """An event's value."""
    return json.loads(record.value)
