"""The benchmarks at tiny sizes: each of our own scenarios runs and yields sane figures, and the report is made."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import SHORT
from benchmarks.meter import postgres_cpu
from benchmarks.results import Ratio, Report, ScenarioResult, VariantResult
from benchmarks.suite import SCENARIOS

pytestmark = pytest.mark.timeout(300)  # about 20 s; many times that where others work on the machine
ROOT = Path(__file__).resolve().parents[1]


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
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
    assert {s.name for s in report.scenarios} == {s.name for s in SCENARIOS.values() if not s.long_only and not s.kafka}
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
    assert page.count("<svg") == len(report.scenarios)
    assert not re.search(r"(src|href)=|@import|url\(", page), "nothing is loaded from elsewhere"
    for scenario in report.scenarios:
        assert scenario.title in done.stdout


def test_the_short_run_names_scenarios_that_exist():
    assert set(SHORT) <= set(SCENARIOS)


def test_a_target_that_is_a_ceiling_is_missed_from_above():
    assert Ratio("a / b", [1.0, 1.3, 1.1], target=1.15, at_most=True).met is True
    assert Ratio("a / b", [1.2, 1.3, 1.1], target=1.15, at_most=True).met is False
    assert Ratio("a / b", [0.9, 1.3, 0.8], target=0.95).met is False
    assert Ratio("a / b", [0.9]).met is None


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
