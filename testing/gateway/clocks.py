"""Clocks that a test moves, so that a stalled machine changes no result."""

import asyncio
from datetime import datetime, timedelta, tzinfo
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest


class Clock:
    """A monotonic clock that stands still until the test changes `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def put(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """Make it the clock of a module that uses only `time.monotonic`."""
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.monotonic))


class SleepClock(Clock):
    """A clock whose sleepers sleep until `go` is set. slept: the seconds for which each wanted to sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.go.wait()

    def put(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """Make it the clock of a module that uses only `time.monotonic`, `asyncio.sleep` and `CancelledError`."""
        super().put(monkeypatch, module)
        names = SimpleNamespace(sleep=self.sleep, CancelledError=asyncio.CancelledError)
        monkeypatch.setattr(module, "asyncio", names)


def clock_ahead(ahead: timedelta) -> Any:
    """Return `datetime` on a machine whose clock is ahead."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + ahead

    return Shifted
