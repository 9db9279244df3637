"""docs/cli.md is complete and true: its commands are those that there are, its options too."""

import re
import shlex
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import typer
from sidings.cli.app import app
from sidings.cli.command import Code
from sidings.cli.filters import a_time

PAGE = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()


def commands() -> dict[str, set[str]]:
    """Every command with its options."""
    found: dict[str, set[str]] = {}

    def walk(name: str, command: object) -> None:
        inner = getattr(command, "commands", None)
        if inner is None:
            found[name] = {option for parameter in command.params for option in parameter.opts}  # type: ignore[attr-defined]
        else:
            for word, child in inner.items():
                walk(f"{name} {word}".strip(), child)

    walk("", typer.main.get_command(app))
    return found


def mentioned() -> list[str]:
    """What the page shows after `sidings`: in its text, its tables and its examples."""
    shown = re.findall(r"`sidings ([^`]+)`", PAGE) + re.findall(r"^\$? ?sidings ([^|\n]+)", PAGE, re.MULTILINE)
    return [text for text in shown if text[0].islower()]


def test_every_command_stands_in_the_page() -> None:
    known = commands()
    text = " ".join(mentioned())
    beside = {f"dev {name}" for name in re.findall(r"`(\w+)`", PAGE.split("sidings dev logs`")[1].splitlines()[0])}
    assert len(known) > 30
    assert [name for name in known if name not in text and name not in beside] == []


def test_every_command_and_option_that_the_page_shows_exists() -> None:
    known = commands()
    wrong: list[str] = []
    for line in mentioned():
        words = shlex.split(line)
        name = next((name for name in (" ".join(words[:2]), words[0]) if name in known), None)
        options = {word for word in words if word.startswith("--")}
        if name is None or options - known[name]:
            wrong.append(line)
    assert wrong == []


def test_what_is_to_be_repeated_until_no_job_fits_has_a_window_that_stays() -> None:
    """It said 3h, which begins later each time: jobs were left behind. And it had no end: what was discarded once more
    came back, again and again."""
    loop = re.findall(r"repeat\s+`(sidings jobs requeue [^`]+)` until no job fits", PAGE)
    assert len(loop) == 1
    words, now = shlex.split(loop[0]), datetime.now(UTC)
    since = words[words.index("--since") + 1]
    assert a_time("--since", since, now) == a_time("--since", since, now + timedelta(hours=1))
    assert words[words.index("--before") + 1] == "$before"
    [before] = re.findall(r"`before=(\$\([^`]+\))`", PAGE)
    told = subprocess.run(["sh", "-c", f'echo "{before}"'], capture_output=True, text=True, check=True).stdout
    assert abs((a_time("--before", told, now) or now) - now) < timedelta(minutes=1)


def test_every_exit_code_stands_in_the_page() -> None:
    section = PAGE.split("| exit code |")[1]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)} == {*Code, 130}
