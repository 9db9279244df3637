"""The relay beside a bare producer and the Deimos algorithm: what `benchmarks.relay` measures, as a scenario."""

import os
from collections.abc import Sequence
from typing import Any

from sidings.devstack import Endpoints

from .. import relay
from ..meter import foreign_cores
from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario

__all__: list[str] = []

RATES = {
    "bare producer": "floor: bare producer",
    "bare producer, idempotent": "floor: bare producer, idempotent",
    "bare producer, whole batches": "floor: bare producer, whole batches",
    "relay": "sidings",
    "deimos": "deimos",
    "many topics: relay": "sidings, many topics",
    "many topics: deimos": "deimos, many topics",
    "many topics: deimos, 4 senders": "deimos, many topics, 4 senders",
    "open transaction: relay": "sidings, open transaction",
    "open transaction: deimos": "deimos, open transaction",
}


class _Round:
    """One call of `relay.measure`, which runs all variants in turn; each variant of the scenario takes its part."""

    def __init__(self, messages: int, held: int) -> None:
        self._messages = messages
        self._held = held
        self._taken: set[str] = set()
        self._found: dict[str, Any] = {}
        self._noise = Figures()

    async def part(self, bench: Bench, name: str) -> dict[str, Any]:
        """The figures of a call that this variant has had nothing of yet."""
        if not self._found or name in self._taken:
            self._taken.clear()
            assert bench.kafka is not None
            endpoints = Endpoints(postgres=bench.server.dsn("postgres"), kafka=bench.kafka)
            load, others = os.getloadavg()[0], foreign_cores(bench.server)
            self._found = await relay.measure(self._messages, rounds=1, endpoints=endpoints, held=self._held)
            self._noise = {"load": load, "foreign_cores": others()}
        self._taken.add(name)
        return self._found

    async def rate(self, bench: Bench, name: str) -> Figures:
        """Messages a second."""
        found = await self.part(bench, name)
        return {
            "messages": float(found["messages_per_second"][name]),
            "client_us": float(found["client_cpu_microseconds"][name]),
        } | self._noise

    async def delay(self, bench: Bench) -> Figures:
        """Milliseconds from commit to topic: of commits that wake the relay, and of others' that it polls for."""
        delays = (await self.part(bench, "delay"))["commit_to_topic_seconds"]
        own, others = delays["own commits"], delays["others' commits"]
        return {
            "p50_ms": own["p50"] * 1e3,
            "p99_ms": own["p99"] * 1e3,
            "others_p50_ms": others["p50"] * 1e3,
            "others_p99_ms": others["p99"] * 1e3,
        } | self._noise

    async def deimos_delay(self, bench: Bench) -> Figures:
        """Milliseconds from commit to topic by the Deimos algorithm."""
        found = (await self.part(bench, "delay of deimos"))["commit_to_topic_seconds"]["deimos"]
        return {"p50_ms": found["p50"] * 1e3, "p99_ms": found["p99"] * 1e3} | self._noise

    async def cost(self, bench: Bench, name: str) -> Figures:
        """Microseconds that a message takes within the caller's transaction."""
        return {"us": (await self.part(bench, name))["publish_seconds"][name] * 1e6} | self._noise


@scenario(
    "relay",
    "Messages of the outbox through the relay, one process",
    key="messages",
    compare=[
        Compare("sidings", "floor: bare producer", 0.8),
        Compare("sidings", "floor: bare producer, idempotent"),
        Compare("sidings", "floor: bare producer, whole batches"),
        Compare("floor: bare producer, whole batches", "deimos"),
        Compare("sidings", "deimos", 3.0),
        Compare("sidings, many topics", "deimos, many topics", 3.0),
        Compare("sidings, many topics", "deimos, many topics, 4 senders"),
        Compare("sidings, open transaction", "deimos, open transaction", 3.0),
        Compare("sidings, commit to topic", target=500.0, at_most=True, key="p99_ms"),
        Compare("sidings, commit to topic", target=500.0, at_most=True, key="others_p99_ms"),
        Compare("sidings, publish", "floor: bare INSERT", key="us"),
        Compare("sidings, publish_many", "floor: bare INSERT of many", key="us"),
    ],
    note="A backlog of the outbox is sent with acks=all and deleted; the bare producers send the same bytes and have "
    "no table. Deimos: its algorithm in Python, with the same client library. many topics: a hundred, "
    "100 messages each. open transaction: somebody else's, which keeps vacuum from its work, over a larger backlog "
    "(with --long Deimos needs more than 35 s for it). whole batches: aiokafka's fastest way. commit to topic: at 50 "
    "messages/s, from the commit to a consumer's having it. publish: time of the call within the caller's "
    "transaction.",
    kafka=True,
)
def outbox(size: Size) -> Sequence[Variant]:
    messages = size.jobs(100_000)
    held = messages * (10 if size.long else 4)
    if size.name == "short":
        messages = 100_000  # 40,000 are gone in 0.2 s, in which the broker has not come to its pace
    turn = _Round(messages, held)

    def settings(name: str) -> dict[str, int]:
        return {"messages": held if "open" in name else relay.MANY if "many" in name else messages}

    return [
        *(Variant(shown, lambda b, name=name: turn.rate(b, name), settings(name)) for name, shown in RATES.items()),
        Variant("sidings, commit to topic", turn.delay, {"rate": "50/s"}),
        Variant("deimos, commit to topic", turn.deimos_delay, {"rate": "50/s"}),
        Variant("floor: bare INSERT", lambda b: turn.cost(b, "bare insert")),
        Variant("sidings, publish", lambda b: turn.cost(b, "publish")),
        Variant("floor: bare INSERT of many", lambda b: turn.cost(b, "bare insert of many")),
        Variant("sidings, publish_many", lambda b: turn.cost(b, "publish_many")),
    ]
