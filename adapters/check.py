"""Unpacking and check of one upload, in a process that `adapters.check_server` forks for it.

A hostile upload can exhaust or crash only this process. Before reading the upload it limits its own memory, CPU time,
wall-clock time, file size and open files. The kernel kills it when its parent dies. The module imports neither torch
nor site-packages.
"""

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from adapters.archives.members import ArchiveError, ArchiveTooLarge
from adapters.archives.unpack import unpack
from adapters.base_choice import TRAINED_ON, choose_base
from adapters.checkpoint import CONFIG_NAME, AdapterCheckpoint, check_ranks
from adapters.manifest import AdapterError, BaseShape, parse_manifest
from adapters.store import prepare

# Names of the archive and of the canonical form within the job's folder.
ARCHIVE, PREPARED = "upload.archive", "adapter"
_PR_SET_PDEATHSIG = 1


def run(job: bytes, parent: int) -> tuple[int, bytes]:
    """Check one upload in this process, which must end afterwards. Returns its exit status and its output.

    job: JSON. A failure's output is its kind and place, never quoted content.
    """
    die_with(parent)
    fields = json.loads(job)
    _limit(fields)
    failure = ""
    try:
        answer = _answer(fields)
    except OSError as error:
        # Python reports the file size limit as EFBIG.
        answer = _refusal("too_large", "file", "") if error.errno == errno.EFBIG else None
        failure = errno.errorcode.get(error.errno or 0, "OSError")
    except Exception as error:  # noqa: BLE001  (the boundary: the gateway logs it and answers that the check failed)
        answer, failure = None, f"{type(error).__name__} {_place(error)}"
    if answer is None:
        return 1, failure.encode()
    return 0, json.dumps(answer | {"cpu_seconds": time.process_time()}).encode()


def _place(error: BaseException) -> str:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else f"at {Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}"


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the call


def _limit(job: dict[str, Any]) -> None:
    with suppress(OSError):
        # If a container runs out of memory, the kernel kills this process instead of the gateway.
        Path("/proc/self/oom_score_adj").write_text("1000")
    # SIGALRM ends the process even if the parent, which has the same limit, hangs.
    signal.alarm(int(job["seconds"]) + 1)
    limits = {
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        # The hard limit of CPU time is one second above the soft one, so that the signal shows which limit was reached.
        resource.setrlimit(kind, (value, value + 1 if kind == resource.RLIMIT_CPU else value))


def _answer(job: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result, or a refusal with its code, the field at fault and the message."""
    try:
        checkpoint, base = _check(job)
    except ArchiveTooLarge as error:
        return _refusal("too_large", "file", str(error))
    except ArchiveError as error:
        return _refusal("archive", "file", str(error))
    except AdapterError as error:
        return _refusal("adapter", error.field, error.message)
    except MemoryError:
        return _refusal("memory", "", "")
    return {
        "digest": checkpoint.digest,
        "rank": checkpoint.rank,
        "num_bytes": checkpoint.num_bytes,
        "base": base,
    }


def _refusal(code: str, field: str, message: str) -> dict[str, Any]:
    return {"refused": code, "field": field, "message": message}


def _check(job: dict[str, Any]) -> tuple[AdapterCheckpoint, str]:
    """Return the adapter and the name of its base model."""
    folder, archive = Path(job["folder"]), Path(job["folder"]) / ARCHIVE
    _remove_leftovers(folder, archive)
    if archive.exists():
        unpack(archive, folder, job["max_bytes"])
        archive.unlink()
    checkpoint = prepare(folder, folder / PREPARED)
    # The canonical form leaves out the adapter's origin, and which field set a rank.
    config = json.loads((folder / CONFIG_NAME).read_bytes())
    bases = {name: _shape(fields) for name, fields in job["bases"].items()}
    base = choose_base(checkpoint, config.get(TRAINED_ON), bases, job["closed"])
    check_ranks(parse_manifest(config), checkpoint.modules, job["bases"][base]["max_rank"])
    checkpoint.check_size(job["bases"][base]["max_adapter_bytes"])
    return checkpoint, base


def _remove_leftovers(folder: Path, archive: Path) -> None:
    """Remove what a check of the same upload has left that was killed. The archive is removed once it is unpacked."""
    shutil.rmtree(folder / PREPARED, ignore_errors=True)
    if archive.exists():
        for entry in folder.iterdir():
            if entry != archive:
                entry.unlink()


def _shape(fields: dict[str, Any]) -> BaseShape:
    return BaseShape(
        num_layers=fields["num_layers"],
        projections={name: tuple(shape) for name, shape in fields["projections"].items()},
        embedding_head={name: tuple(shape) for name, shape in fields["outside"].items()},
    )
