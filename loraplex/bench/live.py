"""Progress of a run on stderr: a line that is rewritten on a terminal, else a line every ten seconds."""

import asyncio
import os
import sys
import time

from loraplex.bench.run import Run

PERIOD_TERMINAL, PERIOD_PLAIN = 0.5, 10.0
DEFAULT_COLUMNS = 80


async def show(run: Run, title: str) -> None:
    """Show the run's progress until it is cancelled."""
    is_terminal = sys.stderr.isatty()
    started = time.perf_counter()
    tokens, since = run.progress.tokens, started
    try:
        while True:
            await asyncio.sleep(PERIOD_TERMINAL if is_terminal else PERIOD_PLAIN)
            now = time.perf_counter()
            rate = (run.progress.tokens - tokens) / (now - since)
            tokens, since = run.progress.tokens, now
            line = f"{title}: {now - started:.0f} s, {run.progress.line()}, {rate:.0f} output tok/s"
            sys.stderr.write(_rewritten(line) if is_terminal else line + "\n")
            sys.stderr.flush()
    finally:
        if is_terminal:
            sys.stderr.write(_rewritten("") + "\r")
            sys.stderr.flush()


def _rewritten(line: str) -> str:
    """Return the text that replaces the terminal's line, cut so that it does not continue on a second one."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        columns = 0
    # A terminal that does not know its size reports 0. The last column stays free: some terminals wrap after it.
    room = (columns or DEFAULT_COLUMNS) - 1
    return f"\r{line[:room]:<{room}}"
