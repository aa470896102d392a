"""Output of a report: files before the terminal, and texts of other people without effect on it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loraplex.bench import session
from loraplex.bench.load import Target
from loraplex.bench.run import BenchError
from loraplex.bench.sending import Failure
from loraplex.bench.table import print_report
from loraplex.bench.workload import Workload
from loraplex.cli import main
from testing.bench_reports import HOSTILE, answered, failed, load_of, report_of

LOAD = load_of(*HOSTILE)
REPORT = report_of(LOAD, [[answered(name, 1.0) for name in HOSTILE]])
COMMAND = ("bench", "--url", "http://127.0.0.1:9", "--models", "a0")
# The command, with a report that needs no server.
CLOSED_PIPE = """
import sys
from loraplex.bench import session
from loraplex.cli import main
from testing.bench_reports import answered, load_of, report_of
names = ("acme", "globex")
session.run_benchmark = lambda bench_run: report_of(load_of(*names), [[answered(n, 1.0) for n in names]])
main(sys.argv[1:])
"""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `loraplex bench` report `REPORT` without a server."""
    monkeypatch.setattr(session, "run_benchmark", lambda bench_run: REPORT)


def files(folder: Path) -> tuple[Path, Path, tuple[str, ...]]:
    """Return the paths of the JSON and of the HTML file, and the flags for them."""
    out, page = folder / "r.json", folder / "r.html"
    return out, page, ("--json", str(out), "--html", str(page))


def are_whole(out: Path, page: Path) -> bool:
    return bool(json.loads(out.read_text())["runs"]) and page.read_text().endswith("</html>\n")


def test_the_table_shows_hostile_names_as_they_are(capsys):
    print_report(REPORT)
    shown = capsys.readouterr().out
    for name in ("all requests", "[/x]", "[team]a", ":smile:", "all", r"\x1b[2J"):
        assert [line for line in shown.splitlines() if line.strip().startswith(f"{name}  ")], name
        assert name == "all requests" or f"service of {name}: " in shown
    assert "\x1b" not in shown


@pytest.mark.usefixtures("measured")
def test_the_command_writes_hostile_names_to_every_output(tmp_path):
    out, page, flags = files(tmp_path)
    done = CliRunner().invoke(main, (*COMMAND, *flags))
    assert (done.exit_code, done.exception) == (0, None)
    assert are_whole(out, page)
    assert list(json.loads(out.read_text())["runs"][0]["tenants"]) == list(HOSTILE)


@pytest.mark.usefixtures("measured")
def test_a_terminal_that_fails_does_not_lose_the_files(tmp_path, monkeypatch):
    def fail(report: dict[str, Any]) -> None:
        raise ValueError("cannot print")

    monkeypatch.setattr("loraplex.bench.table.print_report", fail)
    out, page, flags = files(tmp_path)
    done = CliRunner().invoke(main, (*COMMAND, *flags))
    assert isinstance(done.exception, ValueError)
    assert are_whole(out, page)


@pytest.mark.usefixtures("takes_a_core")
def test_a_closed_pipe_does_not_lose_the_files(tmp_path):
    out, page, flags = files(tmp_path)
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        command = (sys.executable, "-c", CLOSED_PIPE, *COMMAND, *flags)
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    finally:
        os.close(write_end)
    assert are_whole(out, page)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("broken", ["json", "html"])
def test_a_file_that_cannot_be_written_loses_neither_the_other_file_nor_the_table(broken, tmp_path):
    out, page, flags = files(tmp_path)
    (out if broken == "json" else page).mkdir()
    done = CliRunner().invoke(main, (*COMMAND, *flags))
    assert done.exit_code == 1
    assert "Is a directory" in done.stderr
    assert "all requests" in done.stdout
    whole = page if broken == "json" else out
    assert whole.stat().st_size > 1000


@pytest.mark.usefixtures("measured")
def test_a_lone_surrogate_in_a_name_does_not_lose_the_page(tmp_path, monkeypatch):
    """A file of --tenants may have one, and UTF-8 cannot encode it."""
    load = Workload(n=20).load([Target(name, None, "m") for name in ("\ud800", "b")])
    values = report_of(load, [[answered("\ud800", 1.0), answered("b", 1.0)]])
    monkeypatch.setattr(session, "run_benchmark", lambda bench_run: values)
    out, page, flags = files(tmp_path)
    done = CliRunner().invoke(main, (*COMMAND, *flags))
    assert (done.exit_code, done.exception) == (0, None)
    assert are_whole(out, page)
    assert r"\ud800" in done.stdout


def test_a_servers_texts_reach_the_terminal_as_printable_characters(monkeypatch):
    load = load_of("acme")
    values = report_of(load, [[failed("acme", Failure("http 500", "\x1b]0;owned\x07\u202e"))]])
    monkeypatch.setattr(session, "run_benchmark", lambda bench_run: values)
    done = CliRunner().invoke(main, COMMAND)
    assert done.exit_code == 1
    assert done.stderr == r"Error: 1 of 1 requests failed; the first: http 500: \x1b]0;owned\x07\u202e" + "\n"


def test_an_error_of_the_connection_has_printable_characters_only(monkeypatch):
    def fail(bench_run: session.BenchRun) -> None:
        raise BenchError("cannot reach it: \x1b[2J")

    monkeypatch.setattr(session, "run_benchmark", fail)
    done = CliRunner().invoke(main, COMMAND)
    assert (done.exit_code, done.stderr) == (1, "Error: cannot reach it: \\x1b[2J\n")
