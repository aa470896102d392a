"""Pages and the event loop: none holds it for longer than 20 ms, not even at its first visit."""

import asyncio
import time
from typing import Any

import pytest

from gateway.pages.frame.frame import Compiled
from gateway.process.background import running

PAGES = (
    *("/admin/", "/admin/usage", "/admin/refusals", "/admin/requests", "/admin/tenants", "/admin/adapters"),
    *("/admin/engines", "/admin/fairness", "/admin/alerts", "/admin/audit", "/admin/settings", "/admin/playground"),
)


class Holds:
    """Longest CPU time of this thread between two turns of the event loop, in s: other programs do not count."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            self.longest = max(self.longest, time.thread_time() - began)
            await asyncio.sleep(0.0005)


async def test_no_page_holds_the_event_loop(serve: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Compiled, "codes", {})
    async with serve() as gateway, gateway.browser() as browser:
        holds = Holds()
        async with running(holds.watch()):
            for path in PAGES:
                holds.longest = 0.0
                assert (await browser.get(path)).status == 200, path
                assert holds.longest < 0.02, (path, holds.longest)
