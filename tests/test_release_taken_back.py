"""A release is taken back that had jobs of a new type: what docs/operations.md has a person do about them."""

import shlex
from typing import Any

from sidings import Job, Registry

from .cli_support import cli, cli_json
from .guide import block
from .support import Ride, drained, enqueue, eventually, running

GUIDE = ("operations.md", "A release is taken back", "sh")


def commands() -> list[list[str]]:
    """The guide's, for the type `added`: what to do after the rollback, and after the next deployment."""
    lines = block(*GUIDE).replace("send_offer", "added").replace("2026-05-01T03:00Z", "1h").splitlines()
    given = [words[1:] for line in lines if (words := shlex.split(line, comments=True))]
    assert [words[:2] for words in given] == [["types", "list"], ["jobs", "discard"], ["jobs", "requeue"]]
    return given


async def test_after_a_rollback_groups_go_on_and_the_new_jobs_come_back_with_the_next_deployment(database: str):
    look, discard, requeue = commands()
    before, after = Registry(), Registry()
    seen: list[tuple[str, int]] = []

    def declare(registry: Registry, name: str) -> Any:
        async def ride(job: Job[Ride]) -> None:
            seen.append((name, job.payload.number))

        return registry.job(name=name, group="transport")(ride)

    known, added = declare(after, "known"), declare(after, "added")
    declare(before, "known")
    for job_type, number in ((known, 0), (added, 1), (known, 2), (added, 3)):
        await enqueue(database, job_type, [Ride(transport="a", number=number)])
    async with running(database, before) as executor:
        await eventually(lambda: seen and executor.scheduler.unknown)
        assert executor.problems() == []
        assert (await cli_json(database, "groups", "list"))["groups"] == []
        assert {each["name"] for each in (await cli_json(database, *look))["types"]} == {"added", "known"}
        assert seen == [("known", 0)]  # the others wait behind what this release does not know
        assert "job 2: discarded" in (await cli(database, *discard)).output
        await drained(database)
        assert seen == [("known", 0), ("known", 2)]
    await enqueue(database, known, [Ride(transport="a", number=4)])
    async with running(database, after):
        await cli(database, *requeue)
        await drained(database)
    assert seen[2:] == [("known", 4), ("added", 1), ("added", 3)]
