"""What the tests of the command line share: running a command inside this process, and as the real executable."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sidings.cli.app import app
from typer.testing import CliRunner, Result

from .support import SECONDS

EXECUTABLE = Path(sys.executable).with_name("sidings")


async def cli(dsn: str | None, *arguments: object, exit_code: int = 0, **environment: str | None) -> Result:
    """Run a command in a thread of this process; stdin is no terminal. Fails when it ends with another code."""
    given = {"SIDINGS_POSTGRES": dsn, "SIDINGS_SCHEMA": None, "SIDINGS_KAFKA": None, "SIDINGS_BY": "alice"}
    runner = CliRunner(env={**given, **environment})
    result = await asyncio.to_thread(runner.invoke, app, [str(argument) for argument in arguments])
    assert result.exit_code == exit_code, (result.exit_code, result.output, result.exception)
    return result


async def cli_json(dsn: str, *arguments: object, exit_code: int = 0) -> dict[str, Any]:
    """The document of a command with --json."""
    document = json.loads((await cli(dsn, *arguments, "--json", exit_code=exit_code)).stdout)
    assert document["now"].endswith("Z")
    return document


async def refused(dsn: str | None, *arguments: object, exit_code: int = 1, **environment: str | None) -> str:
    """The one line that a command says when it does not do what it was asked."""
    result = await cli(dsn, *arguments, exit_code=exit_code, **environment)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    return errors[0].removeprefix("error: ")


async def executed(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real executable, its output piped, without the variables of this process that concern it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SIDINGS_")}
    return await asyncio.to_thread(
        subprocess.run,
        [EXECUTABLE, *(str(argument) for argument in arguments)],
        env=kept | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
