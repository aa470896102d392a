"""Fallback to plain torch, with the reason in the log, when the native library cannot be built or opened."""

import hashlib
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.cpu import native_build
from kernels.cpu.native import NativeOps
from kernels.cpu.plain import TorchOps
from kernels.platform import pick_ops


@pytest.fixture
def pick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], object]:
    """Choose a backend again, with this test's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native_build.load.cache_clear()

    def pick() -> object:
        native_build.load.cache_clear()
        return pick_ops(torch.device("cpu"), torch.float32, 64, 16)

    yield pick
    native_build.load.cache_clear()


@pytest.fixture(scope="module")
def library() -> bytes:
    """Return the library from the compiler, built before a test points the cache elsewhere."""
    assert native_build.load() is not None, "the tests need a C++ compiler"
    return native_build._cache_path([shutil.which("g++") or "c++"]).read_bytes()[: -native_build._CHECKSUM_BYTES]


@pytest.fixture
def compiler(library: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Install an instant compiler that copies the library; return the file with one line per run."""
    (tmp_path / "prebuilt").write_bytes(library)
    copy = f'while [ "$1" != "-o" ]; do shift; done; cp {tmp_path}/prebuilt "$2"; echo >> {tmp_path}/runs'
    fake = script(tmp_path / "cxx", f'[ "$1" = --version ] && cat {tmp_path}/version && exit 0; {copy}')
    (tmp_path / "version").write_text("1")
    (tmp_path / "runs").write_text("")
    monkeypatch.setenv("CXX", fake)
    return tmp_path / "runs"


def runs(compiler: Path) -> int:
    return len(compiler.read_text().splitlines())


def script(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_cache_that_cannot_be_written(pick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert isinstance(pick(), TorchOps)
    assert "plain-torch ops" in caplog.text


@pytest.mark.parametrize("compiler", ["no-such-compiler", "no-such-ccache g++", "false"])
def test_a_compiler_that_is_not_there_or_fails(pick, monkeypatch: pytest.MonkeyPatch, compiler: str, caplog) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert isinstance(pick(), TorchOps)
    assert "plain-torch ops" in caplog.text


def test_a_library_that_cannot_be_opened(pick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog) -> None:
    """Plain torch serves if the library file is invalid, as on a cache whose files may not be executed."""
    fake = script(tmp_path / "cxx", 'while [ "$1" != "-o" ] && [ $# -gt 1 ]; do shift; done; echo nothing > "$2"')
    monkeypatch.setenv("CXX", fake)
    assert isinstance(pick(), TorchOps)
    assert "plain-torch ops" in caplog.text


def test_another_version_of_the_compiler_builds_anew(pick, tmp_path: Path, compiler: Path) -> None:
    """The cache key includes the compiler's version: after an upgrade of g++ an old library is not opened."""
    for builds in (1, 1, 2):
        (tmp_path / "version").write_text(str(builds))
        assert isinstance(pick(), NativeOps)
        assert runs(compiler) == len(list((tmp_path / "cache" / "loraplex").glob("native-*.so"))) == builds


def test_a_compiler_with_arguments(pick, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: Path) -> None:
    monkeypatch.setenv("CXX", f"env -u NOTHING {tmp_path}/cxx")
    assert isinstance(pick(), NativeOps)
    assert runs(compiler) == 1


OTHER_MACHINE = b"\x7fELF\x01\x01\x01" + bytes(9) + b"\x03\x00\xf7\x00" + bytes(1000)


@pytest.mark.parametrize("damage", ["cut short", "empty", "a byte changed", "without digest", "another machine's"])
def test_a_damaged_library_is_built_once_more(
    pick, tmp_path: Path, library: bytes, compiler: Path, caplog, damage: str
) -> None:
    whole = library + hashlib.sha256(library).digest()
    damaged = {
        "cut short": whole[: len(whole) // 2],
        "empty": b"",
        "a byte changed": whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
        "without digest": library,
        "another machine's": OTHER_MACHINE + hashlib.sha256(OTHER_MACHINE).digest(),
    }[damage]
    path = native_build._cache_path([str(tmp_path / "cxx")])
    path.parent.mkdir(parents=True)
    path.write_bytes(damaged)
    for _ in range(2):
        assert isinstance(pick(), NativeOps)
        assert path.read_bytes() == whole
        assert runs(compiler) == 1, "a library that was built once more is opened from then on"
    assert caplog.text.count("rebuilding it") == 1


def test_builders_at_once_compile_once(pick, tmp_path: Path, library: bytes, compiler: Path) -> None:
    """The others, which found the same damaged library, wait for its library and open it."""
    cxx = tmp_path / "cxx"
    cxx.write_text(cxx.read_text().rstrip() + "; sleep 0.5\n")
    path = native_build._cache_path([str(cxx)])
    path.parent.mkdir(parents=True)
    path.write_bytes(library[:100])
    opened: list[object] = []
    threads = [threading.Thread(target=lambda: opened.append(native_build.load.__wrapped__())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 3
    assert None not in opened
    assert runs(compiler) == 1
    names = {file.name for file in path.parent.iterdir()}
    assert names == {path.name, "native.lock"}, "no scratch folder stays behind"
    assert path.read_bytes() == library + hashlib.sha256(library).digest()
