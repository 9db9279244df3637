"""The command line: list, run, report, profile."""

import argparse
import asyncio
import gc
import logging
import sys
import tempfile
import time
from pathlib import Path

from . import scenarios
from .profile import profile
from .report import html, text
from .results import Report
from .server import Server, machine
from .suite import SCENARIOS, SIZES, Scenario, run

log = logging.getLogger("benchmarks")

# What `make bench` runs: the lines of the design's section 7, small, in less than 10 minutes.
SHORT = ["drain", "groups", "enqueue", "bulk", "stuck", "failing", "latency", "idle", "takeover"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the scenarios")
    runs = commands.add_parser("run", help="run scenarios and print a table")
    runs.add_argument("names", nargs="*", metavar="NAME", help="default: all; with --short: those of `make bench`")
    runs.add_argument("--short", action="store_true", help="fewer and smaller repetitions: less than 10 minutes")
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
                long = "  (only with --long)" if scenario.long_only else ""
                print(f"{scenario.name:<12} {scenario.title}{long}")
        case "run":
            return _run(chosen)
        case "report":
            _show(_merged(chosen.files), None, chosen.html)
        case "profile":
            asyncio.run(profile(chosen.jobs, groups=chosen.groups, folder=chosen.out))
        case _:
            raise AssertionError(chosen.command)
    return 0


def _run(chosen: argparse.Namespace) -> int:
    size = SIZES[chosen.size or ("short" if chosen.short else "long" if chosen.long else "normal")]
    if chosen.repetitions:
        from dataclasses import replace

        size = replace(size, repetitions=chosen.repetitions)
    unknown = [name for name in chosen.names if name not in SCENARIOS]
    if unknown:
        print(f"no such scenario: {', '.join(unknown)}; there are: {', '.join(SCENARIOS)}", file=sys.stderr)
        return 2
    names = chosen.names or (SHORT if chosen.short else list(SCENARIOS))
    picked = [SCENARIOS[name] for name in names]
    if not chosen.names:
        picked = [s for s in picked if (size.long or not s.long_only) and (size.name != "tiny" or not s.kafka)]
    if chosen.no_peers:
        scenarios.without_peers()
    _show(asyncio.run(_measure(picked, size, chosen.only)), chosen.json, chosen.html)
    return 0


async def _measure(picked: list[Scenario], size: "scenarios.Size", only: list[str]) -> Report:
    gc.freeze()  # what the harness itself holds is none of the collector's business
    with tempfile.TemporaryDirectory(prefix="sidings-bench-") as folder:
        async with Server(Path(folder) / "postgres", durable=size.name != "tiny") as server:
            report = Report(machine(await server.admin.fetchval("SHOW server_version")))
            report.machine["size"] = size.name
            began = time.monotonic()
            for scenario in picked:
                report.scenarios.append(await run(scenario, server, size, only=only))
            report.machine["seconds"] = round(time.monotonic() - began)
            return report


def _merged(files: list[Path]) -> Report:
    report = Report.read(files[0])
    for file in files[1:]:
        report.scenarios += Report.read(file).scenarios
    return report


def _show(report: Report, json_file: Path | None, html_file: Path | None) -> None:
    print(text(report))
    if json_file is not None:
        report.write(json_file)
    if html_file is not None:
        html_file.write_text(html(report))


if __name__ == "__main__":
    sys.exit(main())
