"""The progress of a run on stderr."""

import asyncio
import fcntl
import io
import pty
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TextIO

import pytest

from loraplex.bench import live
from loraplex.bench.load import Target
from loraplex.bench.run import Run
from loraplex.bench.workload import Workload

LOAD = Workload(n=4).load([Target("acme", None, "a0")])
# Times are those of the double: two seconds pass in each period.
LINES = [
    f"run 1 of 3: {2 * n} s, {4 * n} sent, {2 * n} done, {n} failed, {n} in flight, 25 output tok/s" for n in (1, 2, 3)
]


@contextmanager
def terminal(columns: int) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """Open a pseudo-terminal of so many columns: its screen, and a function that closes it and returns its text."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(slave, "w") as screen, open(master, "rb", buffering=0) as other_end:

        def text() -> str:
            screen.close()
            found = b""
            # A terminal without writers ends with an error, after all that they wrote.
            with suppress(OSError):
                while piece := other_end.read(4096):
                    found += piece
            return found.decode()

        yield screen, text


async def show(monkeypatch: pytest.MonkeyPatch, screen: TextIO, periods: int) -> list[float]:
    """Show so many periods, each with 50 tokens, 2 answers and a failure in 2 s. Return the sleeps."""
    run, slept, moments = Run(LOAD), list[float](), iter(range(100, 1000, 2))

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
    return slept


@pytest.mark.parametrize("columns", [40, 80, 120])
async def test_a_terminal_has_one_line_within_its_width_that_is_rewritten_and_erased_at_the_end(columns, monkeypatch):
    with terminal(columns) as (screen, text_of):
        slept = await show(monkeypatch, screen, 2)
        text = text_of()
    assert slept == [0.5, 0.5]
    room = columns - 1
    assert text == "".join(f"\r{line[:room]:<{room}}" for line in (*LINES[:2], "")) + "\r"


async def test_a_terminal_that_does_not_know_its_size_has_eighty_columns(monkeypatch):
    with terminal(0) as (screen, text_of):
        await show(monkeypatch, screen, 1)
        text = text_of()
    assert text == f"\r{LINES[0]:<79}\r{'':<79}\r"


async def test_a_file_has_a_line_every_ten_seconds(monkeypatch):
    screen = io.StringIO()
    assert await show(monkeypatch, screen, 3) == [10.0, 10.0, 10.0]
    assert screen.getvalue() == "".join(f"{line}\n" for line in LINES)
