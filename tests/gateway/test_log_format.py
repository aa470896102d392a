"""Lines of the text log: one for each record, whatever its message quotes."""

import logging

import pytest

from gateway.log_format import TEXT, TextFormatter

FORGED = "2026-12-01 10:00:00,000 INFO gateway.fleet engine http://e is up"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\x1b[2K\r", "\u2028", "\x85"])
def test_a_message_with_a_line_end_forges_no_line(end: str):
    """A foreign server's reason for a refused load began a line of its own."""
    record = logging.LogRecord("gateway.fleet", logging.ERROR, "", 0, "it refused: %s", (f"no{end}{FORGED}",), None)
    line = TextFormatter(TEXT).format(record)
    assert line.isprintable()
    assert line.endswith(FORGED)
    record = logging.LogRecord("gateway.fleet", logging.ERROR, "", 0, "Größe: 5 µs", (), None)
    assert TextFormatter(TEXT).format(record).endswith(" ERROR gateway.fleet Größe: 5 µs")
