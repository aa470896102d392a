"""Threads that compute for one tenant leave the interpreter lock to the event loop."""

import asyncio
import ctypes
import sys

import pytest

from gateway.api.requests.memory import BodyMemory
from gateway.process.gil_priority import SLACK_NS

PR_GET_TIMERSLACK = 30

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no timer slack")


def slack() -> int:
    return ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)


async def test_threads_of_bodies_ask_late_for_the_lock_and_the_loop_at_once():
    before = slack()
    with BodyMemory(2**26).share("acme") as share:
        assert await share.run(slack) == SLACK_NS
        share.admitted()
    assert await asyncio.to_thread(slack) == slack() == before < SLACK_NS
