"""Build of the native library, compiled once for this machine and kept in the user's cache.

The file name has the hash of everything the library depends on: source, flags, compiler and processor. The checksum of
the content follows the last byte, so that a damaged file is detected before it is opened.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("native_src")
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared", "-std=c++17"]
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("-mprefer-vector-width=512")
_CHECKSUM_BYTES = hashlib.sha256().digest_size


@cache
def load() -> ctypes.CDLL | None:
    """Compile the library if needed and open it. If that fails, log a warning with the reason and return None.

    torch is loaded first, so that both share its OpenMP threads.
    """
    compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or "")
    if not compiler:
        log.warning("no C++ compiler: using the slower plain-torch ops (install g++ for the native ones)")
        return None
    try:
        path = _cache_path(compiler)
        if _is_whole(path):
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:  # built for another processor, which only opening it shows
                log.warning("the native ops' library cannot be opened; rebuilding it: %s", error)
        return ctypes.CDLL(str(path)) if _build(compiler, path) else None
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        log.warning("the native ops cannot be built or opened; using the slower plain-torch ops: %s", error)
        return None


def _cache_path(compiler: list[str]) -> Path:
    """Return the library's path in the user's cache. Raises OSError, RuntimeError."""
    sources = [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    identity = "\0".join(["with digest", *sources, *compiler, _version(compiler), *FLAGS, _processor()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loraplex"
    return folder / f"native-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"


def _build(compiler: list[str], path: Path) -> bool:
    """Compile the library and append its checksum. Return False if the compiler fails.

    Concurrent processes wait for the first one's library. The file is replaced as a whole; a process that has opened an
    earlier file keeps it. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    found = _stamp(path)
    with (path.parent / "native.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _stamp(path) != found and _is_whole(path):
            return True
        built = Path(scratch) / path.name
        command = [*compiler, *FLAGS, "-o", str(built), str(SOURCES / "decoder.cpp")]
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        if run.returncode:
            log.warning("the native ops did not compile; using the slower plain-torch ops: %s", run.stderr[-2000:])
            return False
        checksum = hashlib.sha256(built.read_bytes()).digest()
        with built.open("ab") as file:
            file.write(checksum)
            file.flush()
            os.fsync(file.fileno())
        os.replace(built, path)
    return True


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what differs after a file was replaced; None without a file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _is_whole(path: Path) -> bool:
    """Return whether the file ends with the checksum of the preceding bytes.

    Opening a truncated file can kill the process, which maps pages that the file does not have. Raises OSError if the
    file cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    if hashlib.sha256(content[:-_CHECKSUM_BYTES]).digest() == content[-_CHECKSUM_BYTES:]:
        return True
    log.warning("the native ops' library is damaged; rebuilding it: %s", path)
    return False


def _version(compiler: list[str]) -> str:
    """Return the compiler's version line. Raises OSError if the program does not exist."""
    return subprocess.run([*compiler, "--version"], check=False, capture_output=True, text=True).stdout


def _processor() -> str:
    """Return the processor's features, on which -march=native depends; machines may share a cache directory."""
    known = ("flags", "Features", "CPU implementer", "CPU part", "model name", "isa")  # x86, ARM, RISC-V
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    # Each kind of core once: a big.LITTLE machine has two.
    found = sorted({line for line in lines if line.startswith(known)})
    return "\n".join(found) or f"{platform.machine()} {platform.processor()}"
