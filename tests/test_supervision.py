"""The supervisor of a service: what ends its parts, and with what."""

import asyncio

import pytest
from sidings.supervision import Supervisor, only_error, raise_only

from .support import SECONDS, eventually


async def ended(supervisor: Supervisor, *failures: Exception) -> BaseException:
    """What comes out of a block that fails with these, and waits for ever."""
    try:
        async with asyncio.timeout(SECONDS), supervisor:
            for failure in failures:
                supervisor.fail(failure)
            await asyncio.Event().wait()
    except ExceptionGroup as group:
        return only_error(group)
    raise AssertionError("it has not ended")


async def test_what_has_failed_before_the_start_ends_the_service_at_its_start():
    """An assignment may be refused to a consumer of one's own before the service runs."""
    supervisor, refused = Supervisor(), ValueError("refused")
    supervisor.fail(refused)
    assert await ended(supervisor) is refused


async def test_of_two_failures_the_first_ends_the_service():
    """A second assignment is refused before the first refusal has ended all."""
    first, second = ValueError("the first"), ValueError("the second")
    assert await ended(Supervisor(), first, second) is first


async def test_a_part_that_ends_is_told_of_also_where_nobody_can_be_cancelled():
    """As in a notebook, whose cell has ended: it ran on without that part, and `/health` has to say so."""
    supervisor, bug = Supervisor(), ValueError("a bug")
    await asyncio.create_task(supervisor.__aenter__())

    async def part() -> None:
        raise bug

    supervisor.watch("the part", part())
    await eventually(lambda: supervisor.failures)
    assert supervisor.failures == ["the part has ended unexpectedly, and the service has to be ended"]
    with pytest.raises(ExceptionGroup) as raised:
        await supervisor.__aexit__(None, None, None)
    assert only_error(raised.value) is bug


def test_of_several_errors_none_is_hidden():
    both = ExceptionGroup("both", [ValueError("one"), ValueError("another")])
    assert only_error(ExceptionGroup("around", [both])) is both


async def test_an_error_that_ends_a_service_keeps_what_has_caused_it():
    """Its cause, what was handled when it was raised, and that somebody has hidden that."""
    caused, met, hidden = ValueError("caused"), ValueError("met"), ValueError("hidden")
    caused.__cause__ = met.__context__ = hidden.__context__ = cause = KeyError("why")
    hidden.__suppress_context__ = True
    told: list[tuple[BaseException | None, BaseException | None, bool]] = []

    async def end(error: Exception) -> None:
        try:
            async with asyncio.TaskGroup():
                raise error
        except ExceptionGroup as group:
            raise_only(group)

    for error in (caused, met, hidden):
        with pytest.raises(ValueError, match=str(error)) as raised:
            await end(error)
        assert raised.value is error
        told.append((error.__cause__, error.__context__, error.__suppress_context__))
    assert told == [(cause, None, True), (None, cause, False), (None, cause, True)]
