"""The benchmarks at tiny sizes: each of our own scenarios runs and yields sane figures, and the report is made."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from benchmarks.meter import Meter, postgres_cpu
from benchmarks.report import markdown, put_into
from benchmarks.results import Comparison, Report, ScenarioResult, VariantResult
from benchmarks.scenarios import SCENARIOS
from benchmarks.server import Server
from benchmarks.suite import SIZES, Bench, Compare, Scenario, Skip, Variant, run

# About 25 s; many times that where others work on the machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[1]


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of all our own scenarios has left its results."""
    made = tmp_path_factory.mktemp("benchmarks")
    done = benchmarks("run", "--size", "tiny", "--no-peers", "--json", str(made / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    return Report.read(folder / "out.json")


@pytest.fixture(scope="module")
def of(report: Report) -> Callable[[str], ScenarioResult]:
    return lambda name: next(s for s in report.scenarios if s.name == name)


def test_every_scenario_measures_what_it_is_about(report: Report):
    assert {s.name for s in report.scenarios} == {s.name for s in SCENARIOS.values() if not s.kafka and not s.spark}
    for scenario in report.scenarios:
        for variant in scenario.variants:
            assert variant.skipped is None, (scenario.name, variant.name, variant.skipped)
            assert all(value > 0 for value in variant.values(scenario.key)), (scenario.name, variant)


def test_cpu_and_wal_stand_beside_every_rate(report: Report):
    for scenario in report.scenarios:
        if scenario.key == "rate":
            for variant in scenario.variants:
                assert {"rate", "client_us", "postgres_us", "wal_bytes"} <= variant.runs[0].keys(), scenario.name


def test_figures_are_plausible(of: Callable[[str], ScenarioResult]):
    drained = of("drain").variant("sidings")
    assert drained is not None
    assert 100 < drained.runs[0]["wal_bytes"] < 2_000
    assert 1 < drained.runs[0]["client_us"] < 1_000
    quiet = of("drain").variant("sidings, no history")
    assert quiet is not None
    assert quiet.runs[0]["wal_bytes"] < drained.runs[0]["wal_bytes"]
    stopped = of("takeover").variant("sidings, clean stop")
    assert stopped is not None
    assert stopped.runs[0]["seconds"] < 10


def test_the_report_is_one_page_with_a_plot_for_each_scenario(folder: Path, report: Report):
    done = benchmarks("report", str(folder / "out.json"), "--html", str(folder / "report.html"))
    assert done.returncode == 0, done.stderr
    page = (folder / "report.html").read_text()
    ratios = [s for s in report.scenarios if any(c.to is not None for c in s.comparisons)]
    assert page.count("<svg") == len(report.scenarios) + len(ratios)
    assert not re.search(r"(src|href)=|@import|url\(", page), "nothing is loaded from elsewhere"
    for scenario in report.scenarios:
        assert scenario.title in done.stdout


def test_the_tables_of_the_documentation_are_replaced_and_nothing_else(report: Report, tmp_path: Path):
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    copy = tmp_path / "benchmarks.md"
    copy.write_text(page)
    for _ in range(2):
        put_into(copy, report)
    before, after = page.split("<!-- results")[0], page.split("end of results -->")[1]
    made = copy.read_text()
    assert made.startswith(before)
    assert made.endswith(after)
    tables = made.removeprefix(before).removesuffix(after)
    for scenario in report.scenarios:
        for variant in scenario.variants:
            assert tables.count(f"| {scenario.name} | {variant.name} |") == 1
    assert "target" in tables
    with pytest.raises(ValueError, match="put them"):
        put_into(ROOT / "README.md", report)


def test_a_scenario_that_has_none_of_the_variants_asked_for_is_refused():
    """It started its servers, measured nothing, and said nothing."""
    done = benchmarks("run", "drain", "consumer", "--no-peers", "--only", "sidings")
    assert done.returncode == 2
    assert done.stderr.startswith("--only: consumer has none of these; it has: floor: aiokafka alone; sidings, no job")


def test_every_comparison_is_of_variants_that_exist():
    for scenario in SCENARIOS.values():
        names = {v.name for size in SIZES.values() for v in scenario.variants(size)}
        for compare in scenario.compare:
            assert {compare.of, compare.to or compare.of} <= names, (scenario.name, compare)


async def test_a_variant_that_fails_or_cannot_run_does_not_spoil_the_others():
    async def fails(_: object) -> dict[str, float]:
        raise RuntimeError("broken")

    async def cannot(_: object) -> dict[str, float]:
        raise Skip("go is not installed")

    calls = iter((100.0, 300.0, 200.0))

    async def works(_: object) -> dict[str, float]:
        return {"rate": next(calls)}

    variants = [Variant("bad", fails), Variant("away", cannot), Variant("good", works), Variant("one", works, {}, 1)]
    chosen = Scenario(
        "s",
        "t",
        lambda _: variants,
        [Compare("good", "one"), Compare("good", "bad")],
        "rate",
        "",
        kafka=False,
        spark=False,
    )
    kept: list[int] = []
    size = replace(SIZES["tiny"], repetitions=2)
    with patch("benchmarks.suite.foreign_cores", lambda _: lambda: 0.0), patch("benchmarks.suite.Meter"):
        [result] = await run([chosen], Mock(), size, saved=lambda results: kept.append(len(results)))
    bad, away, good, once = result.variants
    assert (bad.failed, bad.skipped, bad.runs) == (True, "RuntimeError: broken", [])
    assert (away.failed, away.skipped) == (False, "go is not installed")
    assert good.values("rate") == [100.0, 200.0]
    assert once.values("rate") == [300.0]
    assert [c.values for c in result.comparisons] == [[100.0 / 300.0]], "the first repetitions are the pair"
    assert kept == [1, 1], "results are kept after every repetition"
    assert Report({}, [result]).failures == ["s / bad: RuntimeError: broken"]


async def test_the_memory_of_an_executor_is_its_own_and_not_that_of_the_process_that_started_it(tmp_path: Path):
    """Linux carries the peak of a process into the getrusage() of what it starts."""
    small = SCENARIOS["memory"].variants(SIZES["tiny"])[0]
    ballast = b"x" * (300 * 2**20)
    async with Server(tmp_path / "postgres", durable=False) as server:
        figures = await small.once(Bench(server, SIZES["tiny"], Meter(server)))
    assert len(ballast) == 300 * 2**20
    assert 10 < figures["memory_mib"] < 200


async def test_the_cpu_beside_a_ratio_is_that_of_its_first_against_its_second():
    """Each comparison in which a floor came first had it the other way round, and not only those of times."""

    def takes(name: str, client: float, postgres: float) -> Variant:
        async def once(_: object) -> dict[str, float]:
            return {"rate": 1e6 / (client + postgres), "client_us": client, "postgres_us": postgres}

        return Variant(name, once)

    variants = [
        takes("floor", 1.45, 5.13),
        takes("floor, with handlers", 3.65, 5.75),
        takes("sidings", 7.82, 7.37),
        takes("deimos", 11.0, 2.16),
    ]
    chosen = Scenario(
        "s",
        "t",
        lambda _: variants,
        [
            Compare("floor, with handlers", "floor"),
            Compare("floor", "deimos", 0.5),
            Compare("sidings", "floor", 0.75),
            Compare("floor", "sidings", 1.15, at_most=True, times=True),
        ],
        "rate",
        "",
        kafka=False,
        spark=False,
    )
    with patch("benchmarks.suite.foreign_cores", lambda _: lambda: 0.0), patch("benchmarks.suite.Meter"):
        results = await run([chosen], Mock(), SIZES["tiny"])
    names = ("cores", "cpu", "memory_gib", "system", "postgres", "python", "commit", "when")
    machine = dict.fromkeys(names, "?") | {"packages": {}, "postgres_settings": {}, "load_before": []}
    lines = markdown(Report(machine, results)).splitlines()
    assert "| s | floor, with handlers / floor | 0.70 (0.70–0.70, 1) | 1.43 × |" in lines
    assert "| s | floor / deimos | 2.00 (2.00–2.00, 1) | 0.50 × |" in lines
    assert "| s | sidings / floor | 0.43 (0.43–0.43, 1) | 2.31 × |" in lines
    assert "| s | time of sidings / time of floor | 2.31 (2.31–2.31, 1) | 2.31 × |" in lines
    ours, floors = "7.82 + 7.37 µs", "1.45 + 5.13 µs"
    assert f"| s | floor / deimos | 2.00 (2.00–2.00, 1) | {floors} | 11 + 2.16 µs | ≥ 0.5 | met |" in lines
    both = f"| {ours} | {floors} | ≤ 1.15 | **missed** |"
    assert f"| s | time of sidings / time of floor | 2.31 (2.31–2.31, 1) {both}" in lines


async def test_no_further_repetition_begins_when_the_time_is_up():
    async def works(_: object) -> dict[str, float]:
        return {"rate": 1.0}

    chosen = Scenario("s", "t", lambda _: [Variant("only", works)], [], "rate", "", kafka=False, spark=False)
    size = replace(SIZES["tiny"], repetitions=3, seconds=1e-9)
    with patch("benchmarks.suite.foreign_cores", lambda _: lambda: 0.0), patch("benchmarks.suite.Meter"):
        [result] = await run([chosen], Mock(), size)
    assert len(result.variants[0].runs) == 1


def test_a_target_that_is_a_ceiling_is_missed_from_above():
    def met(values: list[float], target: float | None, *, at_most: bool = False) -> bool | None:
        return Comparison("a / b", "a", "b", values, target, at_most).met

    assert met([1.0, 1.3, 1.1], 1.15, at_most=True) is True
    assert met([1.2, 1.3, 1.1], 1.15, at_most=True) is False
    assert met([0.9, 1.3, 0.8], 0.95) is False
    assert met([0.9], None) is None


def test_a_variant_that_did_not_run_has_no_median():
    assert VariantResult("peer", skipped="go is not installed").median("rate") is None


def test_the_cpu_of_a_server_counts_its_children():
    burn = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7))']);"
        "print(1, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert postgres_cpu(process.pid) > 0.03, "that of children that have ended, too"
        process.kill()
