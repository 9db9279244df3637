"""The terminals example, as its reader runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_payments_go_on_while_postgres_is_away(sidings_kafka: str):
    done = subprocess.run(
        [sys.executable, "-m", "examples.terminals"],
        cwd=ROOT,
        env=os.environ | {"SIDINGS_KAFKA": sidings_kafka},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Postgres is killed" in done.stdout
    assert done.stdout.endswith("Payments went on, whatever became of Postgres.\n")
    assert done.stderr == ""
