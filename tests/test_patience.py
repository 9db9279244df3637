"""One timer for many calls: each has its whole time, and a cancellation from elsewhere is not taken for a timeout."""

import asyncio

import pytest
from sidings.kafka.patience import Patience

LONG = 3_600.0


async def hang() -> None:
    await asyncio.sleep(LONG)


async def test_a_call_that_takes_too_long_is_cancelled_and_the_next_ones_go_on():
    with Patience(0.2) as patience:
        for _ in range(3):
            with pytest.raises(TimeoutError, match=r"it took longer than 0\.2 s"):
                await patience.call(hang())
            await patience.call(asyncio.sleep(0))
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_each_call_has_its_whole_time_however_long_those_before_it_took():
    """Together they take far longer than one may."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with Patience(LONG) as patience:
        patience._seconds = 1.0
        patience._look()
        while loop.time() < began + 1.3:
            await patience.call(asyncio.sleep(0.001))


async def test_time_between_calls_does_not_count():
    with Patience(LONG) as patience:
        await patience.call(asyncio.sleep(0))
        patience._seconds = 0.0
        patience._look()  # time is up, and no call is under way
        await asyncio.sleep(0)  # a cancellation would arrive here
        patience._seconds = LONG
        await patience.call(asyncio.sleep(0))


async def test_without_a_limit_nothing_is_cancelled():
    with Patience(None) as patience:
        await patience.call(asyncio.sleep(0.01))


async def test_what_a_call_raises_comes_out():
    async def fail() -> None:
        raise ValueError("its own")

    async def fail_when_cancelled() -> None:
        try:
            await hang()
        except asyncio.CancelledError:
            raise ValueError("on its way out") from None

    with Patience(0.02) as patience:
        with pytest.raises(ValueError, match="its own"):
            await patience.call(fail())
        with pytest.raises(ValueError, match="on its way out"):
            await patience.call(fail_when_cancelled())
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_a_call_that_swallows_its_cancellation_has_succeeded():
    async def swallow() -> None:
        try:
            await hang()
        except asyncio.CancelledError:
            return

    with Patience(0.02) as patience:
        await patience.call(swallow())
        with pytest.raises(TimeoutError):  # the next one has a limit all the same
            await patience.call(hang())
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("both", [False, True], ids=["alone", "with a timeout at the same time"])
async def test_a_cancellation_from_elsewhere_stays_one(both):
    inside = asyncio.Event()

    async def work() -> None:
        with Patience(LONG) as patience:
            inside.set()
            if both:
                patience._seconds = 0.0
                asyncio.get_running_loop().call_soon(patience._look)
            await patience.call(hang())

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_that_raises_cancelled_error_itself_is_no_timeout():
    async def raise_it() -> None:
        raise asyncio.CancelledError

    with Patience(LONG) as patience, pytest.raises(asyncio.CancelledError):
        await patience.call(raise_it())


async def test_whoever_has_left_leaves_no_timer():
    """It would look again and again, for ever: one more for each batch."""
    with Patience(LONG) as patience:
        await patience.call(asyncio.sleep(0))
    assert patience._timer is not None
    assert patience._timer.cancelled()
