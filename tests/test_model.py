"""The models of the protocols: `docs/model/`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # a minute and a half on one core

MODEL = Path(__file__).parent.parent / "docs" / "model"


@pytest.fixture(scope="module")
def quick() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MODEL / "run.py"), "--quick"]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def caught(output: str) -> list[str]:
    """The names of the seeded bugs that were caught."""
    return [name.strip() for name in re.findall(r"^caught +\w+  (.+?) +\d+ states", output, re.MULTILINE)]


def test_every_seeded_bug_is_caught_and_the_right_protocols_hold(quick: subprocess.CompletedProcess[str]) -> None:
    assert quick.returncode == 0, quick.stdout + quick.stderr
    assert "MISSED" not in quick.stdout
    count = len(caught(quick.stdout))
    assert count > 50
    assert f"{count} of {count} seeded bugs caught" in quick.stdout


def test_the_readme_explains_every_seeded_bug(quick: subprocess.CompletedProcess[str]) -> None:
    table = re.findall(
        r"^\| ([^|]+?) \| (?:I\d|R1|FE|FT|RN|NM|LO|LV) \|", (MODEL / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(table) == sorted(caught(quick.stdout))
