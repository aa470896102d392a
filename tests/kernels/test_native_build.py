"""Where the native library cannot be built or opened, plain torch serves, and the log says why."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import native
from kernels.backend import pick_ops
from kernels.cpu import TorchOps
from kernels.native import NativeOps


@pytest.fixture
def pick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], object]:
    """Choose a backend anew, with a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.load.cache_clear()

    def pick() -> object:
        native.load.cache_clear()
        return pick_ops(torch.device("cpu"), torch.float32, 64, 16)

    yield pick
    native.load.cache_clear()


def script(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_cache_that_cannot_be_written(pick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert isinstance(pick(), TorchOps)
    assert "plain-torch ops serve" in caplog.text


@pytest.mark.parametrize("compiler", ["no-such-compiler", "no-such-ccache g++", "false"])
def test_a_compiler_that_is_not_there_or_fails(pick, monkeypatch: pytest.MonkeyPatch, compiler: str, caplog) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert isinstance(pick(), TorchOps)
    assert "plain-torch ops serve" in caplog.text


def test_a_library_that_cannot_be_opened(pick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog) -> None:
    """A file that is no library, as on a cache whose files may not be executed."""
    fake = script(tmp_path / "cxx", 'while [ "$1" != "-o" ] && [ $# -gt 1 ]; do shift; done; echo nothing > "$2"')
    monkeypatch.setenv("CXX", fake)
    assert isinstance(pick(), TorchOps)
    assert "plain-torch ops serve" in caplog.text


def test_a_compiler_with_arguments_and_another_version_build_anew(
    pick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cache's key has the compiler's version: after an upgrade of g++ an old library is not opened."""
    say = tmp_path / "version"
    say.write_text("1")
    fake = script(tmp_path / "cxx", f'[ "$2" = --version ] && cat {say} && exit 0; shift; exec g++ -O0 "$@"')
    monkeypatch.setenv("CXX", f"{fake} unused")
    for builds in (1, 1, 2):
        if builds == 2:
            say.write_text("2")
        assert isinstance(pick(), NativeOps)
        assert len(list((tmp_path / "cache" / "loraplex").glob("native-*.so"))) == builds
