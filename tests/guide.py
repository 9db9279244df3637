"""Code blocks of the documentation, to be run by tests."""

import re
from pathlib import Path
from typing import Any

from .support import connected

DOCS = Path(__file__).parent.parent / "docs"


def block(page: str, heading: str, language: str) -> str:
    """The first code block of that language below a heading of a page; heading "" is the page's beginning."""
    text = (DOCS / page).read_text()
    start = rf"^#+ {re.escape(heading)}\n" if heading else r"\A# [^\n]*\n"
    section = re.search(rf"{start}(.*?)(?=^#+ |\Z)", re.sub(r"^```.*?^```", _shield, text, flags=_FLAGS), _FLAGS)
    assert section is not None, f"{page} has no heading {heading!r}"
    found = re.search(rf"^```{language}\n(.*?)^```", section[1], _FLAGS)
    assert found is not None, f"{page}, {heading}: no {language}"
    return found[1].replace("\0", "#")


def run(page: str, *headings: str, **names: Any) -> dict[str, Any]:
    """Run the Python blocks below these headings, one after the other, and return what they have defined."""
    namespace: dict[str, Any] = {"__name__": f"docs.{page}", **names}
    for heading in headings:
        exec(compile(block(page, heading, "python"), f"docs/{page}", "exec", dont_inherit=True), namespace)
    return namespace


def statements(heading: str, **names: str) -> str:
    """The guide's statements, with these names for those of the guide."""
    text = block("operations.md", heading, "sql")
    for name, its in names.items():
        text = text.replace(name, its)
    return text


async def perform(dsn: str, heading: str, **names: str) -> None:
    """Perform the guide's statements, with these names for those of the guide."""
    async with connected(dsn) as connection:
        for statement in statements(heading, **names).split(";\n"):
            if statement.strip():
                await connection.execute(statement)


_FLAGS = re.DOTALL | re.MULTILINE


def _shield(found: re.Match[str]) -> str:
    return found[0].replace("#", "\0")  # a comment in a code block is no heading
