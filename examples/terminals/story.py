"""What happens, and whether it was as it should be."""

import asyncio
import time
from collections.abc import Callable

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from .routing import Authorization, Payment, Routing, Topics, make_routing
from .stage import Servers

__all__ = ["Story"]

_SECONDS = 60.0  # for anything that is waited for
_UPDATE = "UPDATE terminal_acquirer SET acquirer_id = $2 WHERE terminal_id = $1 AND is_active"
_INSERT = "INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ($1, $2)"
_SWITCH_OFF = "UPDATE terminal_acquirer SET is_active = false WHERE terminal_id = $1"


class Story:
    """broken: what was not as it should be."""

    def __init__(self, servers: Servers, topics: Topics) -> None:
        self.broken: list[str] = []
        self._servers = servers
        self._topics = topics
        self._producer: AIOKafkaProducer
        self._authorizations: dict[int, str | None] = {}
        self._number = 0
        self._began = time.monotonic()

    async def tell(self) -> None:
        """All of it. Raises `TimeoutError` if something does not happen at all."""
        self._producer = AIOKafkaProducer(bootstrap_servers=self._servers.kafka, acks="all")
        await self._producer.start()
        listening = asyncio.create_task(self._listen())
        try:
            await self._edit(_INSERT, "T-1", "Alpha Bank")
            await self._edit(_INSERT, "T-2", "Beta Bank")
            await self._go_on_without_postgres()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await self._producer.stop()

    async def _go_on_without_postgres(self) -> None:
        routing = make_routing(self._servers.kafka, self._topics)
        async with routing.service:
            await self._until(routing, "T-2", "Beta Bank")
            self._say(f"the directory was ready after {routing.terminals.start_seconds:.2f} s")
            await self._pay("T-1", "Alpha Bank")
            await self._pay("T-2", "Beta Bank")

            self._say("support moves T-1 to Gamma Bank, and switches T-2 off")
            await self._edit(_UPDATE, "T-1", "Gamma Bank")
            await self._edit(_SWITCH_OFF, "T-2")
            await self._until(routing, "T-1", "Gamma Bank")
            await self._until(routing, "T-2", None)
            await self._pay("T-1", "Gamma Bank")
            await self._pay("T-2", None)

            self._say("Postgres is killed")
            await asyncio.to_thread(self._servers.postgres.kill)
            await self._pay("T-1", "Gamma Bank")
            await self._pay("T-2", None)

        self._say("the routing service is started anew, and Postgres is still away")
        routing = make_routing(self._servers.kafka, self._topics)
        async with routing.service:
            await self._pay("T-1", "Gamma Bank")
            await self._pay("T-2", None)
            self._check("the service without Postgres complains of nothing", routing.service.problems(), [])

            await asyncio.to_thread(self._servers.postgres.start)
            self._say("Postgres is back; support moves T-1 to Delta Bank, and takes up T-3")
            await self._edit(_UPDATE, "T-1", "Delta Bank")
            await self._edit(_INSERT, "T-3", "Alpha Bank")
            await self._until(routing, "T-1", "Delta Bank")
            await self._until(routing, "T-3", "Alpha Bank")
            await self._pay("T-1", "Delta Bank")
            await self._pay("T-3", "Alpha Bank")
            self._check("no record of the directory was bad", routing.terminals.errors(), [])
            self._check(
                "the directory is what the table says",
                {terminal: row.acquirer_id for terminal, row in routing.terminals.items()},
                {"T-1": "Delta Bank", "T-3": "Alpha Bank"},
            )
        self._check("every payment was decided", sorted(self._authorizations), list(range(1, self._number + 1)))

    async def _edit(self, statement: str, *arguments: str) -> None:
        """What support does: an ordinary statement, on an ordinary connection."""
        connection = await asyncpg.connect(self._servers.postgres.dsn, timeout=_SECONDS)
        try:
            await connection.execute(statement, *arguments)
        finally:
            await connection.close()

    async def _pay(self, terminal: str, expected: str | None) -> None:
        """A payment comes in; wait for the decision."""
        self._number += 1
        number, began = self._number, time.monotonic()
        payment = Payment(number=number, terminal_id=terminal)
        await self._producer.send_and_wait(
            self._topics.payments, payment.model_dump_json().encode(), key=terminal.encode()
        )
        await self._wait(lambda: number in self._authorizations, f"payment {number} is decided")
        found = self._authorizations[number]
        took = time.monotonic() - began
        self._check(f"payment {number} at {terminal}: {found or 'declined'} ({took:.2f} s)", found, expected)

    async def _until(self, routing: Routing, terminal: str, acquirer: str | None) -> None:
        """The edit has arrived."""

        def arrived() -> bool:
            row = routing.terminals.get(terminal) if routing.terminals.ready else None
            return routing.terminals.ready and (None if row is None else row.acquirer_id) == acquirer

        await self._wait(arrived, f"{terminal} has {acquirer}")

    async def _listen(self) -> None:
        consumer = AIOKafkaConsumer(
            self._topics.authorizations, bootstrap_servers=self._servers.kafka, auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            async for record in consumer:
                decision = Authorization.model_validate_json(record.value or b"")
                self._authorizations.setdefault(decision.number, decision.acquirer_id)  # the first one counts
        finally:
            await consumer.stop()

    async def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {_SECONDS:.0f} s: {what}")
            await asyncio.sleep(0.01)

    def _check(self, what: str, found: object, expected: object) -> None:
        right = found == expected
        if not right:
            self.broken.append(f"{what}: {found!r}, and not {expected!r}")
        self._say(f"{'ok  ' if right else 'WRONG'} {what}")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.1f} s  {text}", flush=True)
