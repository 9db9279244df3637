"""Child processes and modules that import the program of a service anew."""

import subprocess
import sys
from pathlib import Path

import pytest

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


SERVICE = """
from sidings import Service
service = Service("tracker", postgres="postgresql://somebody@127.0.0.1:1/nowhere")
"""
MAIN = """
import asyncio, handlers, logging

logging.basicConfig(level=logging.INFO)

async def main():
    async with service:
        print("it runs")

if __name__ == "__main__":
    asyncio.run(main())
"""
HANDLERS = """
from sidings import Job

@service.job()
async def send_eta(job: Job[int]) -> None: ...
"""


def run(folder: Path, *command: str, **modules: str) -> "subprocess.CompletedProcess[str]":
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("command", [["tracker.py"], ["-m", "tracker"]])
def test_handlers_that_import_the_program_are_not_lost(tmp_path: Path, command: list[str]):
    """They were declared on the service of a second copy of it. The one that ran had none, was ready, and silent."""
    handlers = "from tracker import service" + HANDLERS
    done = run(tmp_path, *command, tracker=SERVICE + MAIN, handlers=handlers)
    assert done.stdout == ""
    assert "the handlers of send_eta are on a copy of the service 'tracker'" in done.stderr
    assert "imported twice, as __main__ and as tracker" in done.stderr


def test_handlers_that_import_the_service_of_a_module_run(tmp_path: Path):
    program, handlers = "from app import service" + MAIN, "from app import service" + HANDLERS
    done = run(tmp_path, "tracker.py", app=SERVICE, tracker=program, handlers=handlers)
    assert done.stdout == "it runs\n", done.stderr


@pytest.mark.parametrize("declared", ["", HANDLERS])
def test_a_second_copy_that_has_nothing_more_is_in_nobodys_way(tmp_path: Path, declared: str):
    done = run(tmp_path, "tracker.py", tracker=SERVICE + declared + MAIN, handlers="from tracker import service")
    assert done.stdout == "it runs\n", done.stderr
    assert ("handles nothing: it has no job type, consumer or directory" in done.stderr) == (declared == "")
