"""Who is started, killed and stopped when."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sidings.devstack import Endpoints

from .compare import Delivery, Window, deliveries
from .crew import STOP_SECONDS, Crew
from .observe import Snapshot, Stall
from .sabotage import Sabotage
from .settings import Plan
from .stage import stage
from .verify import Check, Story, verify
from .view import View

__all__ = ["InlineRun", "JobsRun", "run_inline", "run_jobs"]

JOBS = "jobs"
INLINE = "inline"
START_SECONDS = 30.0
DRAIN_SECONDS = 60.0
REBALANCE_SECONDS = 3.0  # before the new owners are seen: a heartbeat's interval, then the group stops for a moment
LEAD = 3.0  # seconds before a change of owners: what was sent then may still be on its way, on a busy machine
SETTLING = 3.0  # seconds after it, until what has piled up is worked off


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is measured in both runs. `faults`: while the carrier failed."""

    deliveries: list[Delivery]
    stalls: list[Stall]
    faults: Window


@dataclass(frozen=True, kw_only=True)
class JobsRun(Run):
    """The run with jobs. `handovers`: while partitions changed hands, with a little time to settle."""

    checks: list[Check]
    handovers: list[Window]
    takeover_seconds: float
    handover_seconds: float
    outcomes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class InlineRun(Run):
    """The run with the carrier called in the message handler. `unread`: messages in Kafka when it was ended."""

    unread: int


async def run_jobs(endpoints: Endpoints, plan: Plan, view: View, logs: Path, sabotage: Sabotage) -> JobsRun:
    """As it should be: the carrier's calls are jobs."""
    async with stage(endpoints, "tracker", plan.transports) as address, Crew.gather(address, plan, view, logs) as crew:
        view.begin("Jobs: a message updates a row and enqueues a call to the carrier, in one transaction")
        view.narrate("Three instances of one service share twelve partitions, and run the jobs of those they own.")
        await _open(crew, JOBS)
        producer = await crew.start_producer(plan.seconds)

        await crew.at(plan.faults_at)
        view.narrate("The carrier fails for 5 % of the transports. Their jobs are retried, in order; the others go on.")
        faults_from = await crew.switch_faults("on")

        await crew.at(plan.kill_at)
        view.narrate("B dies by SIGKILL. When its leases have run out, A and C take over its partitions and jobs.")
        killed = await crew.kill("B")
        await crew.until(_shared_by("A", "C"), START_SECONDS, "A and C have taken over from B")
        taken_at = time.time()

        await crew.at(plan.replace_at)
        view.narrate("A clean handover: C is asked to stop and gives its partitions back; then D starts.")
        stopped_at = time.time()
        await crew.stop("C")
        await crew.until(_shared_by("A"), START_SECONDS, "A has what C held")
        handed_at = time.time()
        await crew.start_instance("D", JOBS)
        await crew.until(_shared_by("A", "D"), START_SECONDS, "D has its share")
        shared_at = time.time()

        await crew.at(plan.recovery_at)
        await sabotage.commit(crew.observer.postgres)
        view.narrate("The carrier is well again: the blocked groups catch up, each in its order.")
        faults = Window("faults", faults_from, await crew.switch_faults("off"))
        await crew.meanwhile(producer.wait(plan.seconds + STOP_SECONDS))
        view.event("the lorries have stopped")
        await crew.until(
            lambda now: _left(now) == 0, DRAIN_SECONDS, "every message is applied and no job waits", left=_left
        )

        story = Story(crew.observer.executors, "B", killed.executor, killed.died_at, crew.snapshot.sent)
        return JobsRun(
            deliveries=await deliveries(crew.observer.postgres, time.time()),
            stalls=crew.stalls(),
            faults=faults,
            checks=await verify(crew.observer.postgres, story),
            handovers=[
                Window("B's partitions until they were taken over", killed.at - LEAD, taken_at + SETTLING, killed.held),
                Window("all while the group shared them anew", taken_at - REBALANCE_SECONDS, taken_at + SETTLING),
                Window("all while C gave up and D joined", stopped_at - LEAD, shared_at + SETTLING),
            ],
            takeover_seconds=taken_at - killed.at,
            handover_seconds=handed_at - stopped_at,
            outcomes=dict(crew.snapshot.outcomes),
        )


async def run_inline(endpoints: Endpoints, plan: Plan, view: View, logs: Path) -> InlineRun:
    """The same lorries and the same carrier, called inside the message handler. Nobody is killed, and it is ended while
    the carrier still fails."""
    async with (
        stage(endpoints, "tracker_inline", plan.transports) as address,
        Crew.gather(address, plan, view, logs) as crew,
    ):
        view.begin("For comparison, without jobs: the message handler calls the carrier itself")
        view.narrate("The same lorries, the same carrier; nobody is killed.")
        await _open(crew, INLINE)
        producer = await crew.start_producer(plan.inline_seconds)
        await crew.at(plan.inline_faults_at)
        view.narrate("The carrier fails for 5 % of the transports. Each blocks its partition for all the others.")
        faults_from = await crew.switch_faults("on")
        await crew.meanwhile(producer.wait(plan.inline_seconds + STOP_SECONDS))
        end = time.time()
        return InlineRun(
            deliveries=await deliveries(crew.observer.postgres, end),
            stalls=crew.stalls(),
            faults=Window("faults", faults_from, end),
            unread=crew.snapshot.lag,
        )


async def _open(crew: Crew, way: str) -> None:
    for name in "ABC":
        await crew.start_instance(name, way)
    await crew.until(_shared_by(*"ABC"), START_SECONDS, "A, B and C share the partitions", for_seconds=2.5)


def _shared_by(*names: str) -> Callable[[Snapshot], bool]:
    """All partitions are owned by these instances, and each has its share."""

    def holds(now: Snapshot) -> bool:
        owners = Counter(None if state.expired else state.owner for state in now.partitions)
        return set(owners) == set(names) and max(owners.values()) - min(owners.values()) <= 1

    return holds


def _left(now: Snapshot) -> int:
    return now.lag + now.waiting
