"""What the stress tests share: producers that die with their broker, the log as Kafka has it, worker processes.

SIDINGS_CHAOS_SEED repeats a run, as far as the machine lets it; SIDINGS_CHAOS_SECONDS sets how long it goes on.
"""

import asyncio
import contextlib
import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import IllegalOperation, KafkaError

from .support import SECONDS, eventually

_ID = "flow"  # of the transactions
CHAOS_SECONDS = float(os.environ.get("SIDINGS_CHAOS_SECONDS", "60"))
# The last two are aiokafka's own, of transactions that were cut off, as by a successor.
BROKEN = (KafkaError, OSError, IllegalOperation, AssertionError)


def a_seed() -> int:
    """The seed of this run, which is printed."""
    seed = int(os.environ.get("SIDINGS_CHAOS_SEED", random.randrange(1_000_000)))
    print(f"SIDINGS_CHAOS_SEED={seed}")
    return seed


class Flow:
    """Two producers, one of them of transactions, each third of which is aborted. make: topic and arguments of the next
    message, for the transactional producer or for the other one. pauses: seconds between two batches of up to 11."""

    def __init__(
        self,
        bootstrap: str,
        seed: int,
        make: Callable[[bool], tuple[str, dict[str, Any]]],
        *,
        pauses: Sequence[float] = (0.01, 0.03, 0.08),
    ) -> None:
        self.bootstrap = bootstrap
        self._random = random.Random(seed)
        self._make = make
        self._pauses = pauses
        self._go_on = asyncio.Event()
        self._go_on.set()
        self._enough = False
        self._busy = 0
        self._tasks = [asyncio.create_task(self._produce(transactional)) for transactional in (False, True)]

    async def rest(self) -> None:
        """Nothing more is sent, and nothing is open."""
        self._go_on.clear()
        await eventually(lambda: self._busy == 0, "the producers rest", seconds=3 * SECONDS)
        await eventually(self._nothing_is_open, "a transaction is open", seconds=3 * SECONDS)

    async def _nothing_is_open(self) -> bool:
        """A commit is answered before it can be seen everywhere, and what has failed stays open; a producer of the same
        id starts when there is neither. The former one is fenced then, and has a successor."""
        try:
            async with (
                asyncio.timeout(SECONDS),
                AIOKafkaProducer(bootstrap_servers=self.bootstrap, transactional_id=_ID, request_timeout_ms=8_000),
            ):
                return True
        except BROKEN:
            return False

    def go_on(self) -> None:
        self._go_on.set()

    async def stop(self) -> None:
        self._enough = True
        self._go_on.set()
        await asyncio.gather(*self._tasks)
        # What was fenced has left futures of aiokafka that nobody awaits. asyncio tells of them here, instead of at
        # pytest's end, where Python 3.11 has failed over it: it was compiling something.
        gc.collect()

    async def _produce(self, transactional: bool) -> None:
        producer = None
        while not self._enough:
            await self._go_on.wait()
            self._busy += 1
            try:
                async with asyncio.timeout(SECONDS):
                    if producer is None:
                        options = {"transactional_id": _ID} if transactional else {"enable_idempotence": True}
                        producer = AIOKafkaProducer(
                            bootstrap_servers=self.bootstrap,
                            request_timeout_ms=8_000,
                            metadata_max_age_ms=1_000,
                            **options,
                        )
                        await producer.start()
                    await self._send(producer, transactional)
            except BROKEN:  # a successor's first act aborts what is open
                await self._close(producer)
                producer = None
            finally:
                self._busy -= 1
            await asyncio.sleep(self._random.choice(self._pauses))
        await self._close(producer)

    async def _send(self, producer: Any, transactional: bool) -> None:
        if transactional:
            await producer.begin_transaction()
        sent = []
        for _ in range(self._random.randrange(1, 12)):
            topic, message = self._make(transactional)
            sent.append(await producer.send(topic, **message))
        await asyncio.gather(*sent)
        if transactional:
            await asyncio.sleep(self._random.choice([0, 0, 0.02, 0.3]))
            await (producer.abort_transaction() if self._random.random() < 0.3 else producer.commit_transaction())

    async def _close(self, producer: Any) -> None:
        if producer is not None:
            with contextlib.suppress(*BROKEN):
                async with asyncio.timeout(5):
                    await producer.stop()


async def committed_log(bootstrap: str, partitions: Iterable[TopicPartition]) -> list[Any]:
    """All records that are committed."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        enable_auto_commit=False,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        tps = list(partitions)
        consumer.assign(tps)
        ends = await consumer.end_offsets(tps)
        await consumer.seek_to_beginning(*tps)
        found: list[Any] = []
        while any([await consumer.position(tp) < ends[tp] for tp in tps]):
            for records in (await consumer.getmany(timeout_ms=300)).values():
                found += records
        return found
    finally:
        await consumer.stop()


class Workers:
    """Processes of one script; whatever they say goes to one log file each."""

    def __init__(self, script: Path, directory: Path, *arguments: str) -> None:
        self.all: list[asyncio.subprocess.Process] = []
        self._script, self._directory, self._arguments = script, directory, arguments

    @property
    def living(self) -> list[asyncio.subprocess.Process]:
        return [process for process in self.all if process.returncode is None]

    async def spawn(self) -> None:
        with (self._directory / f"worker-{len(self.all)}.log").open("w") as log:
            command = (sys.executable, str(self._script), *self._arguments)
            self.all.append(await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log))

    async def pause(self, process: asyncio.subprocess.Process, seconds: float) -> None:
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        for process in self.living:
            process.kill()
            await process.wait()


async def disturb(rng: random.Random, action: str, workers: Workers) -> None:
    """What may happen to a process: ``kill``, ``stop``, ``pause`` or ``more``; two live on at least."""
    living = workers.living
    match action:
        case "kill" if len(living) > 1:
            rng.choice(living).kill()
        case "stop" if len(living) > 1:
            rng.choice(living).terminate()
        case "pause" if living:
            await workers.pause(rng.choice(living), rng.choice([0.5, 2.5, 5]))
        case "more" if len(living) < 4:
            await workers.spawn()
        case _:
            pass
    await asyncio.sleep(0.05)
    while len(workers.living) < 2:
        await workers.spawn()


async def restart_broker(rng: random.Random, kafka: Any) -> None:
    """In good order, or killed."""
    await asyncio.to_thread(kafka.kill if rng.random() < 0.5 else kafka.stop)
    await asyncio.to_thread(kafka.start)
