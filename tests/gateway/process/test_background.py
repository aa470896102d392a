"""Work that runs to its end although its caller is cancelled."""

import asyncio
import logging

import pytest

from gateway.process.background import all_ended, run_to_end


async def test_a_failure_after_the_caller_has_left_is_logged(caplog: pytest.LogCaptureFixture):
    goes_on = asyncio.Event()

    async def work() -> None:
        await goes_on.wait()
        raise ValueError("the second step failed")

    caller = asyncio.create_task(run_to_end(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller})
    goes_on.set()
    with caplog.at_level(logging.ERROR):
        await all_ended()
        await asyncio.sleep(0)
    assert "the second step failed" in caplog.text


async def test_a_failure_that_reaches_the_caller_is_not_logged(caplog: pytest.LogCaptureFixture):
    async def work() -> None:
        raise ValueError

    with caplog.at_level(logging.ERROR):
        with pytest.raises(ValueError):
            await run_to_end(work())
        await asyncio.sleep(0)
    assert not caplog.records
