"""One instance of a service that does everything at once: `python tests/soak_worker.py DSN BOOTSTRAP DIRECTORY NAME`.

How a handler ends is drawn at random; once there is a file `calm` in DIRECTORY, well. Each run of a job is noted in the
journal there, and now and then, in `look-NAME`, what the directory has and what /health complains of.

Whoever enqueues or publishes for an entity has locked its row before. Groups of jobs at home are called `h` and the
entity, all others as the entity alone, which is also the key of messages: of those, several may be parked at once in
several partitions of a topic that has grown, and nobody promises an order across these.
"""

import asyncio
import json
import logging
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos_worker import Journal, _before_exit  # first: it has to see who takes `os._exit`

# isort: split

from pydantic import BaseModel
from sidings import (
    Call,
    Discard,
    ExecutorSettings,
    Job,
    KafkaSettings,
    Message,
    Next,
    OutboxSettings,
    PostgresSettings,
    Retry,
    Service,
    Snooze,
    Transaction,
)
from sidings.executor import cycles
from sidings.kafka.subscription import Subscription
from tenacity import stop_after_attempt, wait_fixed

ENTITY = "SELECT id FROM entity ORDER BY random() LIMIT 1"
LOCK = "UPDATE entity SET sent = sent + $2 WHERE id = $1 RETURNING sent"
TERMINAL = "UPDATE terminal SET version = version + 1, is_active = random() < 0.8 WHERE id = $1"
HANDLED = 'INSERT INTO handled (topic, partition, "offset", key, n) VALUES ($1, $2, $3, $4, $5)'
KAFKA: dict[str, Any] = {"session_seconds": 8, "rebalance_seconds": 5, "request_seconds": 8, "fetch_seconds": 0.05,
                         "metadata_seconds": 1, "max_records": 10}  # fmt: skip
EXECUTOR: dict[str, Any] = {"lease_seconds": 6, "drain_seconds": 0.5, "shutdown_seconds": 2, "audit_seconds": 5}
OUTBOX: dict[str, Any] = {"lease_seconds": 6, "backoff_seconds": 0.1, "max_backoff_seconds": 3}
TWICE = stop_after_attempt(2)

rng = random.Random()
register = Subscription.register


def register_wrapped(self: Subscription[Any], registry: Any) -> None:
    """The middleware also sees the job that handles a stored message."""
    register(self, registry)
    registry[self.job_type_name].wrapped = True


Subscription.register = register_wrapped


class Work(BaseModel):
    """more: how many generations of jobs it still enqueues."""

    g: str
    more: int = 0


class Number(BaseModel):
    n: int


class Terminal(BaseModel):
    id: str
    version: int
    is_active: bool


def a_service(dsn: str, bootstrap: str) -> Service:
    return Service(
        "test",
        postgres=PostgresSettings(dsn=dsn, call_seconds=6.0, connect_seconds=6.0),
        kafka=KafkaSettings(bootstrap=bootstrap, **KAFKA),
        executor=ExecutorSettings(concurrency=rng.choice([3, 16, 60]), **EXECUTOR),
        outbox=OutboxSettings(window=rng.choice([8, 40, 10_000]), batch_size=rng.choice([3, 1000]), **OUTBOX),
        topics=["orders"],
    )


def note_runs(service: Service, journal: Journal) -> None:
    """From the first line of a handler to its end; a transaction commits a little later."""

    @service.middleware
    async def noted(call: Call, call_next: Next) -> None:
        runs = [run_of(job, str(service.executor.id)) for job in call.jobs]
        how = "raised"
        for run in runs:
            journal.note("start", **run)
        try:
            await call_next()
            how = "done"
        except asyncio.CancelledError:
            how = "cancelled"
            raise
        finally:
            for run in runs:
                journal.note("end", how=how, **run)


def run_of(job: Job[Any], executor: str) -> dict[str, Any]:
    home = (job.group or "").startswith("h")
    origin = job.origin.partition("/")[0] if home else job.origin  # one lane, though its topic grows
    run = {"job": job.id, "type": job.type, "origin": origin, "group": job.group}
    return run | {"attempt": job.attempt, "epoch": job.fence.epoch, "executor": executor}


def add_handlers(service: Service, calm: Callable[[], bool]) -> None:
    def mood() -> str:
        return "well" if calm() else rng.choices([*MOODS], [*MOODS.values()])[0]

    async def behave() -> None:
        match mood():
            case "slowly":
                await asyncio.sleep(rng.choice([0.1, 0.5, 1]))
            case "hang":
                await asyncio.sleep(60)
            case "swallow":
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(4)
                await asyncio.sleep(0.3)
            case other:
                end(other)

    def thread(job: Job[Work]) -> None:
        match mood():
            case "slowly" | "swallow":
                time.sleep(rng.choice([0.1, 0.5, 1]))
            case "hang":
                time.sleep(5)
            case other:
                end(other)

    async def plain(job: Job[Work]) -> None:
        await behave()
        if job.payload.more and rng.random() < 0.3:  # a repeat of the attempt does it again
            async with service.transaction() as tx:
                await lay_out(tx, await tx.fetchval(ENTITY), job.payload.more - 1)

    async def transfer(job: Job[Work]) -> None:
        await job.tx.execute("INSERT INTO public.effect VALUES ($1, $2)", job.id, job.attempt)
        await behave()
        if job.payload.more and rng.random() < 0.5:
            await lay_out(job.tx, await job.tx.fetchval(ENTITY), job.payload.more - 1)
        if not calm() and rng.random() < 0.05:
            raise ConnectionError("after all")

    async def lists(batch: list[Job[Work]]) -> list[Any]:
        await behave()
        errors = [ConnectionError("one"), Discard("one"), Snooze(0.2), Retry.after(0.1)]
        return [rng.choice([None] * 12 + errors) if not calm() else None for _ in batch]

    common: dict[str, Any] = {"group": "g", "timeout": 3}
    quick, wait = Retry(wait=wait_fixed(0.05)), wait_fixed(0.05)
    handlers: dict[str, tuple[Any, dict[str, Any]]] = {
        "step": (plain, {}),
        "newest": (plain, {"policy": "latest"}),
        "skips": (plain, {"retry": Retry(wait=wait, stop=TWICE)}),
        "holds": (plain, {"retry": Retry(wait=wait, stop=TWICE, on_exhausted="hold")}),
        "blocks": (plain, {"retry": Retry(wait=wait, stop=TWICE, on_exhausted="block")}),
        "thread": (thread, {}),
        "lists": (lists, {"batch": 10}),
        "homely": (plain, {"home": "orders"}),
        "transfer": (transfer, {"home": "orders", "transactional": True}),
    }
    types: dict[str, Any] = {
        name: service.job(name=name, **{"retry": quick} | common | options)(handler)
        for name, (handler, options) in handlers.items()
    }

    async def lay_out(tx: Transaction, entity: str, more: int, origin: str | None = None) -> None:
        """Enqueue and publish at random. origin: of the jobs that have no home; by default that of the entity."""
        count = rng.choice([0, 0, 1, 3]) if more else 0
        sent = await tx.fetchval(LOCK, entity, count)
        for name in rng.choices([*types, "transfer", "transfer", "homely"], k=rng.choice([0, 1, 1, 2, 3])):
            home = name in ("homely", "transfer")
            works = [Work(g=f"h{entity}" if home else entity, more=more)] * rng.choice([1, 1, 1, 2])
            where = {} if home else {"origin": origin or service.origin_for(entity, "orders")}
            await types[name].enqueue_many(tx, works, **where)
        if count:
            numbers = [(entity, Number(n=n)) for n in range(sent - count + 1, sent + 1)]
            await service.outbox.publish_many(tx, "loop", numbers)
        if rng.random() < 0.1:
            await tx.execute(TERMINAL, entity)

    async def one(message: Message[Number], tx: Transaction) -> None:
        key = message.key_text or ""
        await tx.execute(HANDLED, message.topic, message.partition, message.offset, key, message.value.n)
        await lay_out(tx, key, 0 if message.topic == "loop" else 2, message.origin)
        if calm() or (message.topic == "bulk" and rng.random() < 0.85):  # so a list fails about as often as one message
            return
        if message.topic != "loop" and random.Random(f"{message.topic}{key}{time.time() // 3}").random() < 0.25:
            raise ConnectionError("for some seconds, no message of this key succeeds")
        match mood():
            case "fail" | "snooze" if rng.random() < 0.5:
                raise ConnectionError("at random")
            case "hang":
                await asyncio.sleep(60)
            case "slowly":
                await asyncio.sleep(0.2)
            case _:
                pass

    async def many(messages: list[Message[Number]], tx: Transaction) -> None:
        if not calm():  # a transaction is open most of the time: stops and pauses find it
            await asyncio.sleep(rng.choice([0, 0.3, 1]))
        for message in messages:
            await one(message, tx)

    parks: dict[str, Any] = {"retry": Retry(wait=wait, stop=TWICE), "timeout": 3}
    service.consumer("orders", **parks)(one)
    service.consumer("isolated", isolate=True, dedup=True, retry=quick, timeout=3)(one)
    service.consumer("bulk", batch=8, **parks)(many)
    service.consumer("loop", dedup=True, **parks)(one)


MOODS = {"well": 60, "slowly": 30, "fail": 8, "hang": 1, "snooze": 2, "after": 1, "discard": 1, "swallow": 0.5}


def end(mood: str) -> None:
    match mood:
        case "fail":
            raise ConnectionError("at random")
        case "snooze":
            raise Snooze(0.3)
        case "after":
            raise Retry.after(0.2)
        case "discard":
            raise Discard("at random")
        case _:
            pass


async def main(dsn: str, bootstrap: str, directory: str, name: str) -> None:
    journal = Journal(Path(directory) / "journal", name)
    _before_exit.append(lambda code: journal.note("exits", code=code))
    service = a_service(dsn, bootstrap)
    note_runs(service, journal)
    add_handlers(service, (Path(directory) / "calm").exists)
    terminals = service.directory("terminal", model=Terminal)

    async def look() -> None:
        path = Path(directory) / f"look-{name}"
        while True:
            with suppress(Exception):  # before it has started
                found = {"terminals": {key: row.version for key, row in terminals.items()}}
                path.with_suffix(".new").write_text(json.dumps(found | {"problems": service.problems()}))
                path.with_suffix(".new").rename(path)
            await asyncio.sleep(0.5)

    looking = asyncio.create_task(look())
    await service.run()
    looking.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    cycles._ENOUGH = rng.choice([1, 10, cycles._ENOUGH])  # or two would never be in flight, for want of work
    asyncio.run(main(*sys.argv[1:]))
