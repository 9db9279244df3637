"""The wheel: what is in it, what is not, and that it works without this repository."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_SHIPPED = {"tests", "examples", "benchmarks", "docs"}


def declared_packages() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["setuptools"]["packages"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no earlier build's leftovers get in, and none are left."""
    source = tmp_path_factory.mktemp("source") / "sidings"
    leave = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=leave)
    target = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source))
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; our dependencies are lent to it, our editable install is not."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60)
    python = environment / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    # Folders that a .pth file adds are searched, but their own .pth files (the editable install) are not read.
    (site_packages(environment) / "lent.pth").write_text(sysconfig.get_path("purelib"))
    return python


def site_packages(environment: Path) -> Path:
    return next((environment / "lib").glob("python*/site-packages"))


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_of_the_tree_is_declared():
    dotted = {".".join(("sidings", *folder.relative_to(ROOT).parts)) for folder in package_folders()}
    assert dotted == set(declared_packages())


def package_folders() -> Iterator[Path]:
    # Not by rglob: it fails when a folder disappears, as those of the servers of other tests do.
    for folder, below, names in os.walk(ROOT):
        if "__init__.py" in names:
            yield Path(folder)
        never = NOT_SHIPPED | {"build", "dist"} if Path(folder) == ROOT else set[str]()
        below[:] = [name for name in below if name not in never and not name.startswith(".")]


def test_the_wheel_brings_nothing_to_the_top_level_but_sidings_and_its_metadata(names: set[str]):
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2
    assert "sidings" in tops
    assert any(re.fullmatch(r"sidings-[\d.]+\.dist-info", top) for top in tops)


def test_the_wheel_holds_no_tests_examples_benchmarks_or_docs(names: set[str]):
    seconds = {name.split("/")[1] for name in names if name.startswith("sidings/")}
    assert not seconds & NOT_SHIPPED
    assert not [name for name in names if "conftest" in name or "test_" in name]


def test_every_query_and_migration_of_the_packages_is_in_the_wheel(names: set[str]):
    tops = {package.split(".")[1] for package in declared_packages() if "." in package}
    queries = {f"sidings/{path.relative_to(ROOT).as_posix()}" for top in tops for path in (ROOT / top).rglob("*.sql")}
    assert queries
    assert {name for name in names if name.endswith(".sql")} == queries


def test_the_wheel_says_that_it_is_typed(names: set[str]):
    assert "sidings/py.typed" in names


def test_the_facade_works_from_the_installed_wheel(clean_python: Path, tmp_path: Path):
    script = (
        "import sidings\n"
        "missing = [name for name in sidings.__all__ if not hasattr(sidings, name)]\n"
        "from sidings.schema import migrations\n"
        "print(sidings.__file__, missing, len(migrations()))\n"
    )
    done = subprocess.run(
        [clean_python, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    file, missing, migrations = done.stdout.split()
    assert Path(file) == site_packages(clean_python.parents[1]) / "sidings" / "__init__.py"
    assert missing == "[]"
    assert int(migrations) == len(list((ROOT / "schema" / "migrations").glob("*.sql")))


def test_every_module_of_the_wheel_can_be_imported(clean_python: Path, names: set[str], tmp_path: Path):
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in names
        if name.endswith(".py") and not name.endswith("__main__.py")
    )
    script = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run(
        [clean_python, "-c", script, *modules], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
