"""Progress of an engine's start: a bar on a terminal, lines in a log."""

import io
import logging

import pytest
from rich.console import Console

from engine.progress import LOADING, WARMING
from loraplex.up import display
from loraplex.up.display import start_progress


def test_a_terminal_has_a_bar_while_a_phase_runs(monkeypatch: pytest.MonkeyPatch):
    out = io.StringIO()
    monkeypatch.setattr(display, "Console", lambda **_: Console(file=out, force_terminal=True, width=80))
    with start_progress() as show:
        show(LOADING, 10**9, 3 * 10**9)
        assert "loading weights: 1.0 of 3.0 GB" in out.getvalue()
        show(LOADING, 3 * 10**9, 3 * 10**9)
        show(WARMING, 12, 40)
        assert "warming up: 12 of 40" in out.getvalue()
        show(WARMING, 40, 40)
        # The line is empty again and the cursor is back, for the engine's own lines.
        assert out.getvalue().endswith("\x1b[2K\x1b[?25h\r")
        assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 2


def test_a_log_has_a_line_now_and_then_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO), start_progress() as show:
        for done in range(1, 41):
            now[0] += 0.3
            show(WARMING, done, 40)
    assert caplog.messages == [f"warming up: {done} of 40" for done in (17, 34, 40)]
