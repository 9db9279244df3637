"""The command line: list, run, report, profile."""

import argparse
import asyncio
import logging
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from sidings.collector import relax_collector

from . import peers, scenarios
from .profile import profile
from .report import html, markdown, put_into, text
from .results import Report, ScenarioResult
from .scenarios import SCENARIOS
from .server import Server, machine
from .suite import SIZES, Scenario, run

log = logging.getLogger("benchmarks")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the scenarios")
    runs = commands.add_parser("run", help="run scenarios and print a table")
    runs.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    runs.add_argument("--short", action="store_true", help="smaller, with as many repetitions as fit into 10 minutes")
    runs.add_argument("--long", action="store_true", help="10 million rows, drains of more than 35 s")
    runs.add_argument("--size", choices=SIZES, help="tiny is for tests")
    runs.add_argument("--no-peers", action="store_true", help="only ours and the bare SQL floors")
    runs.add_argument("--only", action="append", default=[], metavar="VARIANT", help="may be given several times")
    runs.add_argument("--repetitions", type=int)
    runs.add_argument("--json", type=Path, metavar="FILE")
    runs.add_argument("--html", type=Path, metavar="FILE")
    report = commands.add_parser("report", help="show results again, several files as one")
    report.add_argument("files", nargs="+", type=Path, metavar="FILE")
    report.add_argument("--html", type=Path, metavar="FILE")
    report.add_argument("--markdown", action="store_true", help="print the tables of docs/benchmarks.md")
    report.add_argument("--into", type=Path, metavar="FILE", help="put them between the marks of that file")
    profiles = commands.add_parser("profile", help="where the time of a drain goes")
    profiles.add_argument("--jobs", type=int, default=200_000)
    profiles.add_argument("--groups", type=int, default=0)
    profiles.add_argument("--out", type=Path, default=Path("profile"), metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("sidings", "aiokafka"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    match chosen.command:
        case "list":
            for scenario in SCENARIOS.values():
                print(f"{scenario.name:<12} {scenario.title}")
        case "run":
            return _run(chosen)
        case "report":
            _report(chosen)
        case "profile":
            asyncio.run(profile(chosen.jobs, groups=chosen.groups, folder=chosen.out))
        case _:
            raise AssertionError(chosen.command)
    return 0


def _run(chosen: argparse.Namespace) -> int:
    size = SIZES[chosen.size or ("short" if chosen.short else "long" if chosen.long else "normal")]
    if chosen.repetitions:
        size = replace(size, repetitions=chosen.repetitions, seconds=None)
    unknown = [name for name in chosen.names if name not in SCENARIOS]
    if unknown:
        print(f"no such scenario: {', '.join(unknown)}; there are: {', '.join(SCENARIOS)}", file=sys.stderr)
        return 2
    picked = [SCENARIOS[name] for name in chosen.names]
    if not picked:
        picked = sorted(SCENARIOS.values(), key=lambda scenario: scenario.kafka)  # the servers one after the other
        if size.name in ("tiny", "short"):
            log.info("without those on Spark, which have to be named: %s", ", ".join(s.name for s in picked if s.spark))
            picked = [scenario for scenario in picked if not scenario.spark]
        if size.name == "tiny":
            picked = [scenario for scenario in picked if not scenario.kafka]
    if chosen.no_peers:
        scenarios.without_peers()
    for scenario in picked:
        there = [variant.name for variant in scenario.variants(size)]
        if chosen.names and chosen.only and not {*there} & {*chosen.only}:
            print(f"--only: {scenario.name} has none of these; it has: {'; '.join(there)}", file=sys.stderr)
            return 2
    peers.prepare([scenario.name for scenario in picked])
    report = asyncio.run(_measure(picked, size, chosen.only, chosen.json))
    print(text(report))
    if chosen.html is not None:
        chosen.html.write_text(html(report))
    for failure in report.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


async def _measure(picked: list[Scenario], size: scenarios.Size, only: list[str], json: Path | None) -> Report:
    relax_collector()  # as Service.run() does, for the floors too
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # the servers must not stay behind
    with tempfile.TemporaryDirectory(prefix="sidings-bench-") as folder:
        async with Server(Path(folder) / "postgres", durable=size.name != "tiny") as server:
            report = Report(machine(await server.admin.fetchval("SHOW server_version")))
            report.machine["size"] = size.name
            began = time.monotonic()

            def saved(results: list[ScenarioResult]) -> None:
                report.scenarios = results
                report.machine["seconds"] = round(time.monotonic() - began)
                if json is not None:
                    report.write(json)

            await run(picked, server, size, only=only, saved=saved)
            return report


def _report(chosen: argparse.Namespace) -> None:
    report = Report.read(chosen.files[0])
    for file in chosen.files[1:]:
        report.scenarios += Report.read(file).scenarios
    print(markdown(report) if chosen.markdown else text(report))
    if chosen.html is not None:
        chosen.html.write_text(html(report))
    if chosen.into is not None:
        put_into(chosen.into, report)


if __name__ == "__main__":
    sys.exit(main())
