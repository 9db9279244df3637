"""What a type checker in strict mode says of a user's program, in an environment as `pip install sidings` leaves it:
without the stubs and the other drivers that are here for the tests."""

import asyncio
import json
import sys
import sysconfig
import venv
from inspect import signature
from pathlib import Path
from typing import get_overloads, get_type_hints

import pytest
import sidings
from sidings import Directory

from .support import SECONDS

# What Sidings depends on, as far as its own annotations lead there.
_INSTALLED = ("aiokafka", "annotated_types", "asyncpg", "prometheus_client", "pydantic", "pydantic_core", "tenacity")
_INSTALLED += ("pydantic_settings", "typing_extensions.py", "typing_inspection", "cronsim")

PROGRAM = """
import asyncio
from datetime import UTC, datetime
from pydantic import BaseModel
from sidings import Job, Message, Retry, Service, Transaction
from tenacity import wait_exponential_jitter

service = Service("tracker", postgres="postgresql://localhost/tracker", kafka="localhost:9092")

class Position(BaseModel):
    transport_id: str

class SendEta(BaseModel):
    transport_id: str
    eta: datetime

@service.job(group="transport_id", retry=Retry(wait=wait_exponential_jitter(1, max=300)), timeout=30)
async def send_eta(job: Job[SendEta]) -> None: ...

@service.consumer("positions")
async def on_position(message: Message[Position], tx: Transaction) -> None:
    eta = await tx.fetchval("UPDATE transport SET ... RETURNING eta", ...)
    await send_eta.enqueue(tx, SendEta(transport_id=message.value.transport_id, eta=eta))

async def test_the_carrier_is_told() -> None:
    await send_eta(Job.fake(SendEta(transport_id="t-1", eta=datetime.now(UTC))))

def refused(number: int, tx: Transaction) -> None:
    send_eta.enqueue_sync(number, SendEta(transport_id="", eta=datetime.now(UTC)))
    send_eta.enqueue_sync(tx, SendEta(transport_id="", eta=datetime.now(UTC)))

if __name__ == "__main__":
    asyncio.run(service.run())
"""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with the program, and an environment that has no more than Sidings needs."""
    environment, here = tmp_path / "env", Path(sysconfig.get_path("purelib"))
    venv.create(environment, symlinks=True)
    [site] = environment.glob("lib/python*/site-packages")
    for name in _INSTALLED:
        (site / name).symlink_to(here / name)
    (site / "sidings").symlink_to(Path(sidings.__file__).parent)
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"include": ["program.py"], "typeCheckingMode": "strict", "venvPath": ".", "venv": "env"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    return tmp_path


async def test_what_the_readme_writes_is_right_in_strict_mode(bare: Path) -> None:
    """`enqueue` was "partially unknown", for the sake of libraries that were not there; and a handler could not be
    called as docs/testing.md does: "object" is not awaitable."""
    checker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pyright", "--outputjson", "-p", str(bare)), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(checker.communicate(), 4 * SECONDS)
    found = [
        (mistake["range"]["start"]["line"], mistake["rule"]) for mistake in json.loads(output)["generalDiagnostics"]
    ]
    lines = [number for number, line in enumerate(PROGRAM.splitlines()) if ".enqueue_sync(" in line]
    assert found == [(line, "reportArgumentType") for line in lines], output.decode()


def test_a_row_that_a_directory_may_not_have_may_be_none_for_each_checker() -> None:
    """mypy made nothing of a default for what a TypeVar annotates: `get(key)` was a row, and never None."""
    forms = get_overloads(Directory.get)
    returned = [getattr(get_type_hints(form)["return"], "__args__", ()) for form in forms]
    parameters = [list(signature(form).parameters)[2:] for form in forms]
    given = [(names, type(None) in kinds) for names, kinds in zip(parameters, returned, strict=True)]
    assert given == [([], True), (["default"], False)]
