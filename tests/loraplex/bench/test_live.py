"""The progress of a run on stderr."""

import asyncio
import io
import sys
from types import SimpleNamespace

import pytest

from loraplex.bench import live
from loraplex.bench.load import Target
from loraplex.bench.run import Run
from loraplex.bench.workload import Workload

LOAD = Workload(n=4).load([Target("acme", None, "a0")])
# Times are those of the double: two seconds pass in each period.
LINES = [f"{2 * n} s, {4 * n} sent, {2 * n} done, {n} failed, {n} in flight, 25 output tok/s" for n in (1, 2, 3)]
BLANK = "\r" + " " * 100 + "\r"


class Screen(io.StringIO):
    """Stderr that says whether it is a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


async def shown(monkeypatch: pytest.MonkeyPatch, periods: int, *, is_terminal: bool) -> tuple[str, list[float]]:
    """Return the text of so many periods, each with 50 tokens, 2 answers and a failure in 2 s; and the sleeps."""
    run, slept, moments = Run(LOAD), list[float](), iter(range(100, 1000, 2))
    screen = Screen(is_terminal=is_terminal)

    async def sleep(seconds: float) -> None:
        if len(slept) == periods:
            raise asyncio.CancelledError
        slept.append(seconds)
        run.progress.sent, run.progress.done = run.progress.sent + 4, run.progress.done + 2
        run.progress.failed, run.progress.tokens = run.progress.failed + 1, run.progress.tokens + 50

    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(live, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: float(next(moments))))
    with pytest.raises(asyncio.CancelledError):
        await live.show(run, "run 1 of 3")
    return screen.getvalue(), slept


async def test_a_terminal_has_one_line_that_is_rewritten_and_erased_at_the_end(monkeypatch):
    text, slept = await shown(monkeypatch, 2, is_terminal=True)
    assert slept == [0.5, 0.5]
    assert "\n" not in text
    first, second = (f"run 1 of 3: {line}" for line in LINES[:2])
    assert text == f"\r{first:<100}\r{second:<100}{BLANK}"


async def test_a_file_has_a_line_every_ten_seconds(monkeypatch):
    text, slept = await shown(monkeypatch, 3, is_terminal=False)
    assert slept == [10.0, 10.0, 10.0]
    assert text == "".join(f"run 1 of 3: {line}\n" for line in LINES)
