"""Child processes that import the program of a service anew."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio, multiprocessing
from sidings import Service

service = Service("test", postgres="postgresql://somebody@127.0.0.1:1/nowhere")

async def main():
    async with service:
        print("it runs", flush=True)
        child = multiprocessing.get_context("spawn").Process(target=print, args=("the child's work",))
        child.start()
        await asyncio.to_thread(child.join)

asyncio.run(main())
"""


def test_a_child_process_that_imports_the_program_runs_no_service(tmp_path: Path):
    """It did nothing else, for ever: the handler that had started it waited, and each of its attempts left one more."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "it runs\n"
    assert "ConfigurationError: the service 'test' is run by the main module" in done.stderr
