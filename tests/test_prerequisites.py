"""What `make` says on a machine where a tool is missing or too old, and what it makes of an environment of before."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
SCRIPT = PROJECT / ".ci" / "prerequisites"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A PATH with the ordinary tools, a fitting Python and a fitting Java."""
    for tool in ("sed", "head"):
        found = shutil.which(tool)
        assert found
        (tmp_path / tool).symlink_to(found)
    put(tmp_path, "python3", f'exec {sys.executable} "$@"')
    put(tmp_path, "java", "echo 'openjdk version \"21.0.2\" 2024-01-16' >&2")
    return tmp_path


def put(machine: Path, name: str, script: str) -> None:
    (machine / name).write_text(f"#!/bin/sh\n{script}\n")
    (machine / name).chmod(0o755)


def check(machine: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "PYTHON", "VIRTUAL_ENV")}
    return subprocess.run(
        ["/bin/sh", str(SCRIPT), *arguments],
        env=kept | variables | {"PATH": str(machine)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused(machine: Path) -> str:
    done = check(machine)
    assert done.returncode == 1
    return done.stderr


def test_a_fitting_machine_passes(machine: Path):
    assert check(machine).returncode == 0, check(machine).stderr
    assert check(machine, "python").stdout.strip() == str(machine / "python3")


def test_an_old_python_is_named_with_how_to_get_a_newer_one(machine: Path):
    put(machine, "python3", 'case "$2" in *print*) echo 3.9;; *) exit 1;; esac')
    said = refused(machine)
    assert f"{machine}/python3 is 3.9" in said
    assert all(manager in said for manager in ("Python 3.11", "apt install", "brew install", "winget install"))


def test_a_newer_python_beside_an_old_one_is_found(machine: Path):
    put(machine, "python3", 'case "$2" in *print*) echo 3.9;; *) exit 1;; esac')
    put(machine, "python3.12", f'exec {sys.executable} "$@"')
    assert check(machine, "python").stdout.strip() == str(machine / "python3.12")


def test_a_python_that_is_named_is_taken_or_refused(machine: Path):
    """With a wrong name, tests ran with the python3 that is found by itself, and nothing said so."""
    put(machine, "mine", f'exec {sys.executable} "$@"')
    assert check(machine, "python", PYTHON="mine").stdout.strip() == str(machine / "mine")
    assert "there is no python3.99;" in check(machine, "python", PYTHON="python3.99").stderr
    put(machine, "mine", 'case "$2" in *print*) echo 3.9;; *) exit 1;; esac')
    assert f"{machine}/mine is 3.9" in check(machine, "python", PYTHON="mine").stderr


def test_no_python_at_all_is_said(machine: Path):
    (machine / "python3").unlink()
    assert "there is no python3;" in refused(machine)


def test_a_python_without_venv_names_debians_package(machine: Path):
    put(machine, "python3", f'case "$2" in *ensurepip*) exit 1;; *) exec {sys.executable} "$@";; esac')
    assert "apt install python3-venv" in refused(machine)


def test_an_old_java_is_named_with_how_to_get_a_newer_one(machine: Path):
    put(machine, "java", "echo 'openjdk version \"11.0.2\" 2019-01-15' >&2")
    said = refused(machine)
    assert "java is version 11" in said
    assert all(manager in said for manager in ("Java 17", "apt install", "brew install", "winget install"))


def test_no_java_at_all_is_said(machine: Path):
    (machine / "java").unlink()
    assert "Java 17 or newer is needed" in refused(machine)


def test_a_java_that_only_pretends_is_refused(machine: Path):
    put(machine, "java", "echo 'Unable to locate a Java Runtime.' >&2; exit 1")
    assert "names no version" in refused(machine)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What `make` needs to make an environment of, and the beginnings of one, which knows its version alone."""
    project = tmp_path / "project"
    (project / ".ci").mkdir(parents=True)
    (project / "requirements").mkdir()
    for name in ("Makefile", ".ci/prerequisites"):
        shutil.copy(PROJECT / name, project / name)
    for name in ("pyproject.toml", "requirements/build.lock", "requirements/dev.lock"):
        (project / name).touch()
    (project / ".venv" / "bin").mkdir(parents=True)
    put(project / ".venv" / "bin", "python", f'[ "$1" != -V ] || exec {sys.executable} -V')
    return project


def make(machine: Path, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Makes the environment, without installing anything."""
    program = shutil.which("make") or pytest.skip("there is no make here")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "JAVA_HOME"))}
    kept.pop("PYTHON", None)
    return subprocess.run(
        [program, *arguments, "INSTALL=true", ".venv/.ready"],
        cwd=project,
        env=kept | {"PATH": f"{machine}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("pip", [True, False])
def test_an_environment_whose_making_was_interrupted_is_made_anew(machine: Path, project: Path, pip: bool):
    """It had its Python, but no pip yet: `make` failed ever after."""
    environment = project / ".venv"
    if not pip:
        put(environment / "bin", "python", f'[ "$1" != -V ] || exec {sys.executable} -V; exit 1')
    (environment / "of-before").touch()
    real = f'exec {sys.executable} "$@"'  # without pip it is quick
    put(machine, "python3", f'[ "$2" != venv ] || {{ shift 2; set -- -m venv --without-pip "$@"; }}; {real}')
    done = make(machine, project, f"PYTHON={machine / 'python3'}")
    assert done.returncode == 0, done.stderr
    assert (environment / "of-before").exists() == pip  # one that is complete is kept
    assert (environment / "pyvenv.cfg").exists() == (not pip)
    assert (environment / "setup.log").exists()
    assert (environment / ".ready").exists()


@pytest.mark.parametrize("ready", [True, False])
def test_an_environment_of_another_python_than_the_one_that_is_named_is_refused(
    machine: Path, project: Path, ready: bool
):
    """`make test PYTHON=python3.13` ran with the Python of before, and nothing said so."""
    put(project / ".venv" / "bin", "python", '[ "$1" != -V ] || echo Python 3.11.0rc1')
    if ready:
        (project / ".venv" / ".ready").touch()
    done = make(machine, project, "PYTHON=python3")
    assert done.returncode != 0
    assert ".venv is of Python 3.11.0rc1, and PYTHON=python3 is Python" in done.stderr
    assert make(machine, project).returncode == 0  # nobody has asked for another
