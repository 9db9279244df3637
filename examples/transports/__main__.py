"""``python -m examples.transports``: the demo, about a minute. Exits 0 only if everything that it promises was true."""

import argparse
import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from sidings.devstack import DevstackError, Endpoints

from .children import ChildFailed
from .crew import NotInTime
from .report import better_than_inline, isolation, print_checks, print_comparison, takeover_in_time
from .sabotage import Sabotage
from .scenario import run_inline, run_jobs
from .settings import Plan
from .stage import servers
from .verify import Check
from .view import show

INTRODUCTION = """\
[bold]Sidings: real-time visibility of freight[/]

{transports} lorries report where they are, through Kafka. For each report a service updates the lorry's row in Postgres
and tells the carrier the new time of arrival, over HTTP. Then the carrier's system begins to fail for some of them, one
of the three service instances is killed, another is replaced. First the calls are jobs; then, for comparison, the
message handler makes them itself.
"""


def main() -> int:
    """Run it; the exit code."""
    options = _options()
    logging.basicConfig(level=logging.ERROR)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has ignored by what it starts with `&`
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))  # the same orderly end
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(INTRODUCTION.format(transports=options.transports), highlight=False, soft_wrap=True)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="sidings-demo-"))
    logs.mkdir(parents=True, exist_ok=True)
    try:
        console.print("Starting Postgres and Kafka …")
        with servers() as endpoints:
            checks = asyncio.run(_demo(console, endpoints, options, logs))
    except KeyboardInterrupt:
        console.print("Stopped; all processes are gone.")
        return 130
    except (ChildFailed, NotInTime, DevstackError) as error:
        console.print(f"[red bold]The demo broke down:[/] {error}\nThe logs of its processes: {logs}", highlight=False)
        return 1
    failed = sum(not check.passed for check in checks)
    if failed:
        console.print(f"\n[red bold]{failed} of {len(checks)} promises were broken.[/] The processes' logs: {logs}")
        return 1
    console.print(f"\n[green bold]All {len(checks)} promises were kept.[/]")
    if not options.logs:
        shutil.rmtree(logs)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.transports", description=__doc__)
    parser.add_argument("--transports", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=35.0, help="how long the lorries report (default: 35)")
    parser.add_argument("--rate", type=float, help="messages a second (default: transports / 5, at least 100)")
    parser.add_argument("--plain", action="store_true", help="lines instead of a picture, as without a terminal")
    parser.add_argument("--logs", type=Path, help="where the processes log to (default: kept only if something is off)")
    parser.add_argument("--jobs-only", action="store_true", help="leave out the comparison")
    parser.add_argument(
        "--sabotage",
        choices=[kind.value for kind in Sabotage],
        default=Sabotage.NONE.value,
        help="break a promise on purpose, to see that it is noticed",
    )
    return parser.parse_args()


async def _demo(console: Console, endpoints: Endpoints, options: argparse.Namespace, logs: Path) -> list[Check]:
    """Both runs and the verdict."""
    plan = Plan(
        options.transports, options.rate or max(100.0, options.transports / 5), options.seconds, options.seconds * 3 / 7
    )
    inline = None
    with show(console, plain=options.plain) as view:
        jobs = await run_jobs(endpoints, plan, view, logs, Sabotage(options.sabotage))
        if not options.jobs_only:
            inline = await run_inline(endpoints, plan, view, logs)
    checks = [*jobs.checks, isolation(jobs), takeover_in_time(jobs)]
    if inline is not None:
        checks.append(better_than_inline(jobs, inline))
    console.print()
    print_checks(console, checks)
    if inline is not None:
        console.print()
        print_comparison(console, plan, jobs, inline)
    return checks


if __name__ == "__main__":
    sys.exit(main())
