"""A package whose docstring gives a reading order gives all of it: whoever reads along comes to each module."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_packaging import NOT_SHIPPED, ROOT


def packages() -> Iterator[Path]:
    for file in sorted(ROOT.rglob("__init__.py")):
        folder = file.parent.relative_to(ROOT)
        if not any(part.startswith(".") for part in folder.parts):
            yield folder


def docstring(folder: Path) -> str:
    return ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""


def members(folder: Path) -> set[str]:
    """Modules and packages. `__main__` need not be named."""
    modules = {file.stem for file in (ROOT / folder).glob("*.py")} - {"__init__", "__main__"}
    inner = {file.parent.name for file in (ROOT / folder).glob("*/__init__.py")}
    return modules | (inner if folder.parts else inner - NOT_SHIPPED)


ORDERED = [folder for folder in packages() if "eading order" in docstring(folder)]


@pytest.mark.parametrize("folder", ORDERED, ids=str)
def test_a_reading_order_has_every_module(folder: Path):
    named = set(re.findall(r"`(\w+)(?:\.py|/)?`", docstring(folder)))
    assert not members(folder) - named


def test_reading_orders_are_found():
    assert {Path(), Path("executor"), Path("jobs/admin"), Path("kafka/outbox"), Path("cli")} <= set(ORDERED)
