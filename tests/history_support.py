"""Histories made up at random, as rows of Python, and what the analysis should say about them, computed plainly."""

import asyncio
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import asyncpg

__all__ = [
    "DAY",
    "Attempt",
    "Stop",
    "blocked_seconds",
    "moved",
    "odd_history",
    "quantile",
    "random_history",
    "stops",
    "store",
    "stored",
]

DAY = datetime(2026, 3, 2, tzinfo=UTC)
NOTHING = timedelta(0)


@dataclass(frozen=True)
class Attempt:
    job: int
    attempt: int
    outcome: str
    enqueued: datetime
    finished: datetime
    started: datetime | None = None
    due: datetime | None = None
    type: str = "a"
    origin: str = "t/0"
    group: str | None = None
    error: str | None = None

    @property
    def ready(self) -> datetime:
        return max(self.enqueued, self.due or self.enqueued)

    @property
    def wait(self) -> float | None:
        return None if self.started is None else max(NOTHING, self.started - self.ready).total_seconds()

    @property
    def run(self) -> float | None:
        return None if self.started is None else max(NOTHING, self.finished - self.started).total_seconds()

    @property
    def total(self) -> float | None:
        if self.outcome != "succeeded" or self.started is None:
            return None
        return max(NOTHING, self.finished - self.enqueued).total_seconds()


def random_history(seed: int, jobs: int) -> list[Attempt]:
    """Jobs of serial groups, of parallel ones and of none; whole seconds often, so that much happens at one instant."""
    dice = random.Random(seed)
    free: dict[tuple[str, str], datetime] = {}
    rows: list[Attempt] = []
    clock = DAY + timedelta(hours=1)
    for job in range(1, jobs + 1):
        clock += timedelta(seconds=dice.choice((0, 0, 0, 1, 2, dice.random())))
        origin, kind = f"t/{min(3, int(dice.expovariate(1)))}", f"type {min(4, int(dice.expovariate(0.8)))}"
        group = dice.choice((None, *(f"g{n}" for n in range(6)), "g0", "parallel"))
        ready, number = clock, 1
        while True:
            lane = free.get((origin, group or ""), clock) if group not in (None, "parallel") else clock
            started = max(ready, lane) + timedelta(seconds=dice.choice((0, 0.002, dice.random() / 10)))
            finished = started + timedelta(seconds=dice.choice((0, 1, dice.expovariate(3))))
            outcome = dice.choices(
                ("succeeded", "retried", "lost", "discarded", "followed", "snoozed", "held", "cancelled"),
                (80, 9, 2, 1, 1, 2, 1, 1),
            )[0]
            error = f"fp{job % 3}" if outcome in ("retried", "discarded", "followed", "held") else None
            due = ready if number > 1 else None
            unstarted = outcome in ("lost", "cancelled")
            rows.append(
                Attempt(
                    job,
                    number,
                    outcome,
                    clock,
                    finished,
                    None if unstarted else started,
                    due,
                    kind,
                    origin,
                    group,
                    error,
                )
            )
            if group not in (None, "parallel"):
                free[origin, group] = finished
            if outcome in ("succeeded", "discarded", "followed", "cancelled", "held"):
                break
            ready, number = finished + timedelta(seconds=dice.choice((0, 1, 5, dice.random() * 20))), number + 1
            if group not in (None, "parallel"):
                free[origin, group] = ready  # the head holds its group
    return rows


def odd_history() -> list[Attempt]:
    """What happens seldom: names that mean something elsewhere, or are long; clocks that differ; times of nothing."""
    at = DAY + timedelta(hours=20)

    def after(seconds: float) -> datetime:
        return at + timedelta(seconds=seconds)

    nasty = "_日本語 <b>&\"'\\ %s {x} $a_b$\x1b\u202e"
    return [
        Attempt(
            90_001, 1, "succeeded", after(5), after(3), after(4), None, "early", "t/0", "g" * 3_000
        ),  # clocks differ
        Attempt(90_002, 1, "succeeded", after(7), after(7), after(7), None, nasty, "t/0", ""),  # no time at all
        Attempt(90_003, 1, "retried", after(10), after(12), after(11), None, nasty, "t/0", nasty, "fp0"),
        Attempt(90_004, 1, "succeeded", after(13), after(131), after(130), None, nasty, "t/0", nasty),  # waits for it
        Attempt(90_003, 2, "lost", after(10), after(60), None, after(20), nasty, "t/0", nasty),
        Attempt(90_003, 3, "discarded", after(10), after(130), after(70), after(20), nasty, "t/0", nasty, "fp0"),
        Attempt(90_005, 1, "lost", after(10), after(12), None, None, "only lost", "t/0", None),
        Attempt(90_006, 1, "superseded", after(10), after(12), None, None, "only superseded", "t 0", "t 0"),
        Attempt(90_008, 1, "succeeded", DAY - timedelta(seconds=9), DAY, DAY, None, "type 0"),  # a day's first instant
        Attempt(90_009, 1, "retried", after(200), after(202), after(201), None, "type 1", "t/1", "tail 9", "fp2"),
        Attempt(90_009, 2, "retried", after(200), after(212), after(211), after(205), "type 1", "t/1", "tail 9", "fp1"),
        Attempt(90_010, 1, "retried", after(300), after(302), after(301), None, "type 1", "t/1", "tail 10", "fp2"),
        Attempt(90_007, 1, "retried", after(10), after(12), after(11), None, nasty, "t 0 t", "0", "fp1"),
        # A later job whose error is not the latest.
        Attempt(90_013, 1, "discarded", after(90), after(92), after(91), None, "type 1", "t/1", None, "fp1"),
        # A head that is held, at its place, until a person has it retried.
        Attempt(90_014, 1, "held", after(400), after(402), after(401), None, "type 1", "t/1", "held", "fp2"),
        Attempt(90_014, 2, "succeeded", after(400), after(462), after(461), None, "type 1", "t/1", "held"),
        Attempt(90_015, 1, "succeeded", after(410), after(471), after(470), None, "type 1", "t/1", "held"),
        # Meanwhile one is cancelled before it is due.
        Attempt(90_016, 1, "cancelled", after(403), after(420), None, after(440), "type 1", "t/1", "held"),
        # One that had left the order, and is released behind one that fails; another waits behind nobody.
        Attempt(90_025, 1, "held", after(1_300), after(1_302), after(1_301), None, "type 1", "t/1", "two", "fp2"),
        Attempt(90_026, 1, "retried", after(1_300), after(1_304), after(1_303), None, "type 1", "t/1", "two", "fp2"),
        Attempt(90_025, 2, "succeeded", after(1_300), after(1_342), after(1_341), after(1_310), "type 1", "t/1", "two"),
        Attempt(90_026, 2, "succeeded", after(1_300), after(1_340), after(1_330), after(1_305), "type 1", "t/1", "two"),
        Attempt(90_027, 1, "held", after(1_400), after(1_402), after(1_401), None, "type 1", "t/1", "one", "fp2"),
        Attempt(90_027, 2, "succeeded", after(1_400), after(1_442), after(1_441), after(1_430), "type 1", "t/1", "one"),
        # Who waits became ready in the minute before the stop.
        Attempt(90_017, 1, "retried", after(590), after(605), after(591), None, "type 1", "t/1", "edge", "fp2"),
        Attempt(90_017, 2, "succeeded", after(590), after(615), after(610), after(608), "type 1", "t/1", "edge"),
        Attempt(90_018, 1, "succeeded", after(595), after(617), after(616), None, "type 1", "t/1", "edge"),
        # Some minutes before, for the head ran long.
        Attempt(90_019, 1, "retried", after(720), after(900), after(721), None, "type 1", "t/1", "long", "fp2"),
        Attempt(90_019, 2, "succeeded", after(720), after(915), after(910), after(905), "type 1", "t/1", "long"),
        Attempt(90_020, 1, "succeeded", after(730), after(917), after(916), None, "type 1", "t/1", "long"),
        # The clock was set back: enqueued by the former one, it has failed before that time came again.
        Attempt(90_023, 1, "retried", after(1_210), after(1_202), after(1_201), None, "type 1", "t/1", "back", "fp2"),
        Attempt(90_023, 2, "succeeded", after(1_210), after(1_221), after(1_220), None, "type 1", "t/1", "back"),
        Attempt(90_024, 1, "succeeded", after(1_205), after(1_223), after(1_222), None, "type 1", "t/1", "back"),
        # Lost at first, it fails from its second attempt on.
        Attempt(90_021, 1, "lost", after(1_000), after(1_010), None, None, "type 1", "t/1", "new"),
        Attempt(90_021, 2, "retried", after(1_000), after(1_030), after(1_020), None, "type 1", "t/1", "new", "fp2"),
        # That one without a group fails keeps nobody from anything.
        Attempt(90_022, 1, "retried", after(1_100), after(1_102), after(1_101), None, "type 1", "t/1", None, "fp2"),
        # Durations of one bin, in two buckets of time; the longest comes first.
        Attempt(90_011, 1, "succeeded", after(400), after(411.02), after(401), None, "twice"),
        Attempt(90_012, 1, "succeeded", after(2_000), after(2_011), after(2_001), None, "twice"),
    ]


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least that share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered) - 1e-9)) - 1]


@dataclass(frozen=True)
class Stop:
    """The attempt that began it; its end; how long somebody waited; how long all that waited did together."""

    attempt: Attempt
    end: datetime
    blocked: float
    delayed: float


def stops(rows: list[Attempt]) -> list[Stop]:
    """Those that blocked somebody, by looking at every pair."""
    groups: dict[tuple[str, str], list[Attempt]] = defaultdict(list)
    for row in rows:
        if row.group is not None:
            groups[row.origin, row.group].append(row)
    out: list[Stop] = []
    for members in groups.values():
        jobs: dict[int, list[Attempt]] = defaultdict(list)
        for row in sorted(members, key=lambda r: r.attempt):
            jobs[row.job].append(row)
        pairs = [pair for attempts in jobs.values() for pair in itertools.pairwise(attempts)]
        released = [two for one, two in pairs if one.outcome == "held" and two.ready >= one.finished]
        waiting = [*(r for r in members if r.attempt == 1), *released]
        waits = [(r.job, r.ready, max(r.started or r.finished, r.ready)) for r in waiting]
        for job, attempts in jobs.items():
            for one, following in itertools.pairwise(attempts):
                begin, end = one.finished, max(one.finished, following.finished)
                if one.outcome not in ("retried", "held", "lost") or following in released:
                    continue
                if any(r.job != job and r.started and begin <= r.started < end for r in members):
                    continue
                held_up = [(max(a, begin), min(b, end)) for _, a, b in waits if a < end and b > begin]
                if blocked := _union(held_up):
                    out.append(Stop(one, end, blocked, sum((b - a).total_seconds() for a, b in held_up)))
    return out


def blocked_seconds(rows: list[Attempt]) -> dict[tuple[str, str], tuple[float, float]]:
    """For each (origin, group): how long it was blocked, and the delay of its jobs."""
    out: dict[tuple[str, str], tuple[float, float]] = {}
    for stop in stops(rows):
        key = stop.attempt.origin, stop.attempt.group or ""
        blocked, delayed = out.get(key, (0.0, 0.0))
        out[key] = blocked + stop.blocked, delayed + stop.delayed
    return out


def _union(intervals: list[tuple[datetime, datetime]]) -> float:
    total, reached = 0.0, None
    for a, b in sorted(intervals):
        begin = a if reached is None else max(a, reached)
        if b > begin:
            total += (b - begin).total_seconds()
            reached = b
    return total


def moved(rows: list[Attempt], by: timedelta, jobs: int) -> list[Attempt]:
    """The same history of other jobs at another time."""
    return [
        replace(
            r, job=r.job + jobs, enqueued=r.enqueued + by, finished=r.finished + by,
            started=r.started and r.started + by, due=r.due and r.due + by,
        )
        for r in rows
    ]  # fmt: skip


def store(dsn: str, rows: list[Attempt]) -> None:
    """Put them into the history, with a partition for each of their days."""
    asyncio.run(stored(dsn, rows))


async def stored(dsn: str, rows: list[Attempt], *, partitions: bool = True) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for day in sorted({row.finished.date() for row in rows}) if partitions else ():
            await connection.execute("SELECT sidings.make_history_day($1)", day)
        await connection.copy_records_to_table(
            "job_history", schema_name="sidings",
            columns=["job_id", "attempt", "outcome", "enqueued_at", "finished_at", "started_at", "due_at", "type", "origin",  # noqa: E501
                     "group", "priority", "error_class", "error_message", "error_fingerprint"],
            records=[
                (r.job, r.attempt, r.outcome, r.enqueued, r.finished, r.started, r.due, r.type, r.origin, r.group, 0,
                 r.error and "Broken", r.error and f"message <script>{r.job}", r.error)
                for r in rows
            ],
        )  # fmt: skip
    finally:
        await connection.close()
