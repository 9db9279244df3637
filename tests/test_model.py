"""The models of the protocols: `docs/model/`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).parent.parent / "docs" / "model"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MODEL / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.long
@pytest.mark.timeout(300)  # a minute and a half on one core
def test_every_seeded_bug_is_caught_and_the_right_protocols_hold() -> None:
    quick = run("--quick")
    assert quick.returncode == 0, quick.stdout + quick.stderr
    assert "MISSED" not in quick.stdout
    count = len(re.findall("^caught ", quick.stdout, re.MULTILINE))
    assert count > 50
    assert f"{count} of {count} seeded bugs caught" in quick.stdout


def test_the_readme_explains_every_seeded_bug() -> None:
    seeded = run("--list").stdout.splitlines()
    readme = (MODEL / "README.md").read_text()
    table = re.findall(r"^\| ([^|]+? \| (?:I\d|R1|FE|FT|RN|NM|LO|LV)) \|", readme, re.MULTILINE)
    assert sorted(seeded) == sorted(table)
