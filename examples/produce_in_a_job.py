"""A Kafka message that is produced by a job, as against one that goes through the outbox.

The outbox sends what a transaction has *decided*. Where the content must be *worked out* first (asked of another
system, slow, may fail), a job does that and produces the message itself. Two things have to be kept:

1. *Order.* Jobs of one group run one at a time, in the order of their commits, and a job ends only when Kafka has
   acknowledged its message. So the messages of a vehicle stand in the topic in the order of its positions, although
   each is worked out by a job of its own.
2. *The same path on a retry.* `announce` produces only if the vehicle is late. An attempt may die after the message
   went out and before its outcome is recorded; if the retry looked at the clock again, it might now decide otherwise,
   and what followed the first decision would be missing. So the decision is stored before the message is sent, and a
   retry takes it as it stands. It is needed until its job has ended; a periodic job may delete it then:
   `DELETE FROM announcement a WHERE NOT EXISTS (SELECT FROM produce_in_a_job.job j WHERE j.id = a.job)`.

    .venv/bin/python examples/produce_in_a_job.py
"""

import asyncio
from datetime import UTC, datetime

from pydantic import BaseModel
from sidings import Job, Service, devstack
from sidings.devstack.topics import create_topic

TABLES = """
CREATE TABLE IF NOT EXISTS vehicle (id text PRIMARY KEY, due timestamptz NOT NULL);
CREATE TABLE IF NOT EXISTS announcement (job bigint PRIMARY KEY, late boolean NOT NULL);
"""
ORIGIN = "positions/0"


class Seen(BaseModel):
    """A vehicle was seen somewhere."""

    vehicle: str
    number: int


class Eta(BaseModel):
    """What goes to the topic."""

    vehicle: str
    number: int
    minutes: int


def make_service(
    postgres: str,
    kafka: str,
    topic: str,
    late_topic: str,
    *,
    name: str = "produce-in-a-job",
    schema: str = "sidings",
) -> Service:
    """The service, with its two jobs `produce_eta` and `announce`."""
    service = Service(name, postgres=postgres, kafka=kafka, schema=schema)

    @service.job(group="vehicle")
    async def produce_eta(job: Job[Seen]) -> None:
        minutes = await work_out(job.payload)
        eta = Eta(vehicle=job.payload.vehicle, number=job.payload.number, minutes=minutes)
        # Returns when all in-sync replicas have it; the vehicle's next job starts after that. A retry repeats the
        # message, with the same header.
        await service.producer.send(topic, key=eta.vehicle, value=eta, headers=key_of(job))

    @service.job(group="vehicle")
    async def announce(job: Job[Seen]) -> None:
        async with service.transaction() as tx:
            # The first attempt decides and stores the decision; every later one finds it.
            await tx.execute(
                "INSERT INTO announcement (job, late) SELECT $1, due < $3 FROM vehicle WHERE id = $2 "
                "ON CONFLICT DO NOTHING",
                job.id,
                job.payload.vehicle,
                now(),
            )
            late = await tx.fetchval("SELECT late FROM announcement WHERE job = $1", job.id)
        if late:
            seen = job.payload
            await service.producer.send(late_topic, key=seen.vehicle, value=seen, headers=key_of(job))
            await after_sending(job)

    return service


def key_of(job: Job[Seen]) -> dict[str, str]:
    """A header by which readers know a repeated message, also one of a job that somebody has requeued."""
    return {"job": job.idempotency_key}


async def work_out(seen: Seen) -> int:
    """Minutes to arrival: stands for a slow call to somebody else."""
    await asyncio.sleep(0.01)
    return 60 - seen.number


def now() -> datetime:
    """The clock that the decision depends on."""
    return datetime.now(UTC)


async def after_sending(job: Job[Seen]) -> None:
    """The moment in which a process may die: the message is out, the outcome is not recorded."""


async def main() -> None:
    """Ten positions of three vehicles; prints how many messages stand in which topic."""
    ends = await asyncio.to_thread(devstack.ensure)
    stamp = datetime.now(UTC).strftime("%H%M%S%f")
    topic, late_topic = f"etas-{stamp}", f"late-{stamp}"
    for name in (topic, late_topic):
        await create_topic(ends.kafka, name, partitions=3)
    # A schema belongs to one service, and the database may have another one's.
    service = make_service(ends.postgres, ends.kafka, topic, late_topic, schema="produce_in_a_job")
    await service.migrate()
    async with service:
        service.executor.assign([ORIGIN])
        async with service.transaction() as tx:
            await tx.execute(TABLES)
            await tx.execute("INSERT INTO vehicle VALUES ('v0', now()) ON CONFLICT (id) DO UPDATE SET due = now()")
            for n in range(10):
                await service.registry.enqueue(tx, "produce_eta", Seen(vehicle=f"v{n % 3}", number=n), origin=ORIGIN)
            await service.registry.enqueue(tx, "announce", Seen(vehicle="v0", number=10), origin=ORIGIN)
        async with asyncio.timeout(30):
            while True:
                async with service.transaction() as tx:
                    if not await tx.fetchval("SELECT EXISTS (SELECT FROM produce_in_a_job.job)"):
                        break
                await asyncio.sleep(0.05)
    print(f"10 estimates in {topic}, 1 announcement in {late_topic}")


if __name__ == "__main__":
    asyncio.run(main())
