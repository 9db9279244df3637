"""The verdict: the checks, the figures, and the two ways side by side."""

from rich.console import Console
from rich.table import Table

from .compare import Delivery, Window, delays, stalled
from .observe import STALLED_SECONDS
from .scenario import InlineRun, JobsRun
from .settings import LEASE_SECONDS, PARTITIONS, SESSION_SECONDS, Plan
from .verify import Check

__all__ = ["better_than_inline", "isolation", "print_checks", "print_comparison", "takeover_in_time"]

# What "not delayed" means. Wide bounds, since the machine may be small and busy with other things; in the full demo,
# calls in the message handler are far beyond them even on an idle one.
HEALTHY_P50_SECONDS = 1.0
HEALTHY_P99_SECONDS = 5.0
FAILING_TO_HEALTHY = 4.0  # the failing ones' median must be so many times the healthy ones' p99
TAKEOVER_SLACK_SECONDS = 3.0


def isolation(run: JobsRun) -> Check:
    """Were the healthy transports delayed by the failing ones?"""
    counted = [d for d in run.deliveries if _counts(d, run, run.handovers)]
    healthy, failing = delays(d for d in counted if d.healthy), delays(d for d in counted if not d.healthy)
    retried = run.outcomes.get("retried", 0)
    problems: list[str] = []
    if healthy.messages < 100 or failing.messages < 5 or not retried:
        problems.append("too few messages were sent while the carrier failed: nothing is shown")
    if healthy.p50 > HEALTHY_P50_SECONDS or healthy.p99 > HEALTHY_P99_SECONDS:
        problems.append(f"healthy: more than {HEALTHY_P50_SECONDS:.0f} s (p50) or {HEALTHY_P99_SECONDS:.0f} s (p99)")
    if healthy.p99 * FAILING_TO_HEALTHY > failing.p50:
        problems.append(f"the failing ones' p50 is not {FAILING_TO_HEALTHY:.0f} times the healthy ones' p99")
    return Check(
        "the failing transports delayed nobody else",
        f"p50 / p99 of an ETA: healthy {healthy}, failing {failing}; {retried} retries",
        problems,
    )


def takeover_in_time(run: JobsRun) -> Check:
    """Was the killed instance replaced as soon as promised?"""
    promised = LEASE_SECONDS + SESSION_SECONDS
    problems = (
        [f"it took more than lease + session = {promised:.0f} s, and {TAKEOVER_SLACK_SECONDS:.0f} s on top"]
        if run.takeover_seconds > promised + TAKEOVER_SLACK_SECONDS
        else []
    )
    return Check(
        "what the killed instance held was taken over in time",
        f"{run.takeover_seconds:.1f} s after SIGKILL (promised: {promised:.0f} s); {run.handover_seconds:.1f} s after "
        "SIGTERM for the one that was stopped",
        problems,
    )


def better_than_inline(jobs: JobsRun, inline: InlineRun) -> Check:
    """Is the comparison what it is meant to be?"""
    ours, theirs = delays(_chosen(jobs, jobs.handovers)), delays(_chosen(inline, []))
    our_stalls, _ = stalled(jobs.stalls, jobs.faults, jobs.handovers)
    their_stalls, _ = stalled(inline.stalls, inline.faults)
    problems: list[str] = []
    if theirs.p50 < ours.p50 or theirs.p99 < ours.p99:
        problems.append(f"p50 / p99 of an ETA: in jobs {ours}, in the message handler {theirs}")
    if their_stalls <= our_stalls:
        problems.append(f"partitions that stood still: with jobs {our_stalls}, without {their_stalls}")
    return Check(
        "calls in the message handler would have delayed everybody",
        f"p50 / p99 of an ETA: {theirs}; {their_stalls} of {PARTITIONS} partitions stood still",
        problems,
    )


def print_checks(console: Console, checks: list[Check]) -> None:
    """One line for each, and what is wrong below it."""
    table = Table(title="What must be true", title_justify="left", title_style="bold", box=None, padding=(0, 1))
    table.add_column("")
    table.add_column("")
    table.add_column("", style="dim")
    for check in checks:
        mark = "[green]ok[/]" if check.passed else "[red bold]WRONG[/]"
        table.add_row(mark, check.claim, check.figures)
        for problem in check.problems:
            table.add_row("", f"[red]{problem}[/]", "")
    console.print(table)


def print_comparison(console: Console, plan: Plan, jobs: JobsRun, inline: InlineRun) -> None:
    """The reason for the project, in one picture."""
    table = Table(
        title="While the carrier fails for 5 % of the transports, the other 95 % …",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("")
    table.add_column("carrier called in a job", justify="right")
    table.add_column("called in the message handler", justify="right")
    for name, left, right in zip(_NAMES, _figures(jobs, jobs.handovers), _figures(inline, []), strict=True):
        table.add_row(name, left, right)
    console.print(table)
    everything = delays(_chosen(jobs, []))
    partitions, seconds = stalled(jobs.stalls, jobs.faults)
    left_out = "; ".join(f"{w.name}: {w.end - w.start:.0f} s" for w in jobs.handovers)
    console.print(
        f"Jobs: delays and stalls leave out the moments in which partitions changed hands ({left_out}). With them, "
        f"p50 / p99 of the healthy was {everything}, and {partitions} partitions stood still for {seconds:.0f} s in "
        "all: a killed process is replaced when its session and its leases have run out.",
        style="dim",
    )
    console.print(
        f"Message handler: nobody was killed. It was ended after {plan.inline_seconds:.0f} s, with {inline.unread} "
        "messages unread; their delay counts as long as it had lasted by then.",
        style="dim",
    )


_NAMES = (
    "… ETAs told per second",
    "… wait for an ETA: p50",
    "… wait for an ETA: p99",
    "… ETAs not told by the end of that time",
    f"partitions that stood still for over {STALLED_SECONDS:.0f} s",
    "… for how long, added up",
)


def _figures(run: JobsRun | InlineRun, apart_from: list[Window]) -> list[str]:
    """One column. Only the delays leave anything out."""
    healthy, all_healthy = _chosen(run, apart_from), _chosen(run, [])
    found = delays(healthy)
    in_time = sum(d.arrived and d.sent_at + d.seconds < run.faults.end for d in all_healthy)
    sent_seconds = min(run.faults.end, max(d.sent_at for d in run.deliveries)) - run.faults.start
    partitions, seconds = stalled(run.stalls, run.faults, apart_from)
    return [
        f"{in_time / sent_seconds:.0f}",
        _milliseconds(found.p50),
        _milliseconds(found.p99),
        f"{100 * (1 - in_time / max(1, len(all_healthy))):.1f} %",
        f"{partitions} of {PARTITIONS}",
        f"{seconds:.0f} s",
    ]


def _chosen(run: JobsRun | InlineRun, apart_from: list[Window]) -> list[Delivery]:
    """The healthy transports' messages that were sent while the carrier failed."""
    return [d for d in run.deliveries if d.healthy and _counts(d, run, apart_from)]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def _counts(delivery: Delivery, run: JobsRun | InlineRun, apart_from: list[Window]) -> bool:
    """Whether it was sent while the carrier failed, and not while its partition changed hands."""
    at, partition = delivery.sent_at, delivery.partition
    return run.faults.holds(at, partition) and not any(window.holds(at, partition) for window in apart_from)
