"""`Service.run` owns its process; a collector that somebody has set up stays as it is."""

import subprocess
import sys

import pytest

SCRIPT = """
import gc
{before}
from sidings.collector import relax_collector
relax_collector()
print(gc.get_threshold(), gc.isenabled())
"""


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("", "(50000, 20, 100) True"),
        ("gc.set_threshold(900, 5, 5)", "(900, 5, 5) True"),
        ("gc.disable()", f"{__import__('gc').get_threshold()} False"),
    ],
    ids=["Python's own", "set by somebody", "switched off"],
)
def test_the_collector_is_relaxed_where_nobody_has_set_it_up(before: str, told: str):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=before)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == told
