"""Compiled templates: kept in files for the next process, unless they are stale, damaged or cannot be written."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from jinja2 import nodes
from jinja2.bccache import bc_magic

from gateway.pages.frame import frame
from gateway.pages.frame.assets import Assets
from gateway.pages.frame.filters import filters
from gateway.pages.frame.frame import Compiled, Frame

NAME = "widgets/strip.html"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(frame, "COMPILED", tmp_path / "compiled")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path / "compiled"


@pytest.fixture(autouse=True)
def no_shared_environment() -> Iterator[None]:
    """Let no later test use an environment that a test of this file has changed."""
    yield
    frame.environment.cache_clear()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the templates that are compiled during the test."""
    found: list[str] = []
    compile_one = jinja2.Environment.compile

    def note(self: jinja2.Environment, source: Any, name: str, *rest: Any, **options: Any) -> Any:
        found.append(name)
        return compile_one(self, source, name, *rest, **options)

    monkeypatch.setattr(jinja2.Environment, "compile", note)
    return found


def load(monkeypatch: pytest.MonkeyPatch) -> jinja2.Environment:
    """Load a template as the first gateway of a new process does."""
    monkeypatch.setattr(Compiled, "codes", {})
    frame.environment.cache_clear()
    made = Frame(None, SimpleNamespace(url=None), None, "EUR")._environment  # type: ignore[arg-type]
    made.get_template(NAME)
    return made


def test_the_next_process_compiles_nothing(folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch):
    load(monkeypatch)
    first = set(compilations)
    assert NAME in first
    load(monkeypatch)
    assert len(compilations) == len(first)
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-20])
    load(monkeypatch)
    assert compilations.count(NAME) == 2


def test_further_gateways_of_a_process_read_no_template(monkeypatch: pytest.MonkeyPatch):
    first, second = (Frame(None, Assets(), None, "EUR") for _ in range(2))  # type: ignore[arg-type]
    first.compile()
    monkeypatch.setattr(jinja2.PackageLoader, "get_source", None)
    second.compile()
    assert second._environment.get_template(NAME) is first._environment.get_template(NAME)


def test_a_damaged_file_is_compiled_again(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    load(monkeypatch)
    for file in folder.iterdir():
        file.write_bytes(bc_magic + b"cnothing\nnothing\n.")
    load(monkeypatch)
    assert compilations.count(NAME) == 2
    assert "a compiled template is damaged" in caplog.text


def test_a_changed_template_is_compiled_again(folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch):
    load(monkeypatch)
    source = jinja2.PackageLoader.get_source
    monkeypatch.setattr(
        jinja2.PackageLoader, "get_source", lambda *each: (source(*each)[0] + "new", *source(*each)[1:])
    )
    load(monkeypatch)
    assert compilations.count(NAME) == 2
    # Options of the environment count too.
    monkeypatch.setitem(frame.OPTIONS, "trim_blocks", False)
    load(monkeypatch)
    assert compilations.count(NAME) == 3


def test_without_a_place_for_files_templates_are_compiled(
    folder: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    load(monkeypatch)
    assert not folder.exists()
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    folder.write_text("no folder")
    load(monkeypatch)
    assert compilations.count(NAME) == 2


def test_no_file_depends_on_the_currency(monkeypatch: pytest.MonkeyPatch):
    """Compilation applies filters to constants, and ours depend on the deployment's settings."""
    environment = load(monkeypatch)
    own = {*filters("EUR"), "data"}
    assert environment.loader is not None
    for name in environment.list_templates(extensions=["html"]):
        tree = environment.parse(environment.loader.get_source(environment, name)[0])
        for used in tree.find_all(nodes.Filter):
            if used.name in own:
                with pytest.raises(nodes.Impossible):
                    used.as_const(nodes.EvalContext(environment, name))
