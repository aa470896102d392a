"""Unpacking and checks of uploads in child processes: few at once, shared fairly, each within its own limits."""

import asyncio
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import adapters
from adapters.check import PREPARED
from adapters.check_server import BOOT
from adapters.decaying_sums import DecayingSums
from adapters.manifest import AdapterError
from gateway.api.requests.memory import OPERATOR
from gateway.api.uploads.receiving import Workplace, too_large
from gateway.errors import BadRequest, CheckFailed, TooManyRefusedUploads, Unavailable
from gateway.records.bases.base import Base
from gateway.sharing.concurrency import ConcurrencyLimiter

log = logging.getLogger(__name__)

ROOT = Path(adapters.__file__).parent.parent
# Concurrent checks: quick ones of tenants, long ones and those of busy tenants, and the operator's.
QUICK_CHECKS, LONG_CHECKS, OPERATORS_CHECKS = 2, 1, 1
# A quick check that uses more CPU time is ended by the kernel, and begins again as a long one, so that another tenant's
# small upload does not wait for it. A larger upload is long from the start. An archive of a few MiB may become 2 GiB.
QUICK_CPU_SECONDS, QUICK_BYTES = 2, 256 << 20
MEMORY_BYTES = 512 << 20
# A check reads, hashes and writes an adapter; measured: 150 to 300 MB a second and core.
CPU_SECONDS, CPU_BYTES_PER_SECOND = 10, 20_000_000
# Wall-clock limit as a factor of the CPU limit: at a low priority a check may get a small share of a core.
CLOCK_FACTOR = 6
# A tenant is busy if its checks used more CPU time than this recently, with this half-life. Long checks and those of
# busy tenants run one at a time, so that the engine's steps and other tenants' uploads hardly wait for them. An
# ordinary check takes 0.01 s, so busy tenants send expensive uploads.
BUSY_SECONDS, HALF_LIFE_S = 0.7, 10.0
# Limit of the CPU time that the checks of a tenant's refused uploads have used recently. An ordinary refusal takes
# 0.003 s, the most expensive one 1 to 2 s, and a tenant's checks run one after the other, but for a quick and a long
# one: without the limit, the fifth expensive upload was refused after 20 s.
REFUSED_SECONDS = 1.5
# Time limit for the end of a killed check.
KILL_SECONDS = 5.0


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest rank and the largest adapter, in bytes of host memory (0: unknown), that a base's engines serve."""

    max_rank: int
    max_adapter_bytes: int = 0


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A checked adapter in its canonical form. folder: its files. base: its base model."""

    digest: str
    rank: int
    num_bytes: int
    folder: Path
    base: Base


class Candidates(msgspec.Struct, frozen=True, kw_only=True):
    """Base models that an upload may belong to, at least one. closed: names of further base models, which
    take no adapters.
    """

    bases: Sequence[Base]
    closed: Sequence[str] = ()


class _TakesLong(Exception):
    """A quick check has used up its CPU time."""


class Checker:
    """Runner of checks. Raises AdapterError, BadRequest and TooLarge for a refusal, Unavailable if the disk is full."""

    def __init__(self, max_bytes: int, engine_limits: Callable[[str], EngineLimits]) -> None:
        """engine_limits: returns the limits of a base model's engines, by its id."""
        self._max_bytes = max_bytes
        self._engine_limits = engine_limits
        self._quick, self._long = ConcurrencyLimiter(QUICK_CHECKS), ConcurrencyLimiter(LONG_CHECKS)
        self._operators = ConcurrencyLimiter(OPERATORS_CHECKS)
        # CPU time of all checks, and of those whose upload was refused.
        self._used, self._refused = DecayingSums(HALF_LIFE_S), DecayingSums(HALF_LIFE_S)
        self._client = CheckClient()

    def close(self) -> None:
        """End the process that forks the checks."""
        self._client.close()

    async def check(self, place: Workplace, owner: str, candidates: Candidates) -> Checked:
        """Unpack and check the upload in the workplace, and find its base model. owner: a tenant's id, or OPERATOR.

        Raises TooManyRefusedUploads if the checks of the owner's refused uploads have used up their CPU time.
        """
        num_bytes = sum(entry.stat().st_size for entry in os.scandir(place.folder))
        run = partial(self._run, place.folder, owner, candidates, num_bytes)
        if owner == OPERATOR:
            return await self._check_in(self._operators, owner, place, run)
        if num_bytes <= QUICK_BYTES and self._used.of(owner) <= BUSY_SECONDS:
            with suppress(_TakesLong):
                return await self._check_in(self._quick, owner, place, partial(run, QUICK_CPU_SECONDS))
        return await self._check_in(self._long, owner, place, run)

    async def _check_in(
        self,
        limiter: ConcurrencyLimiter,
        owner: str,
        place: Workplace,
        run: Callable[[], Coroutine[Any, Any, Checked]],
    ) -> Checked:
        self.check_refused(owner)
        async with limiter.place(owner):
            # Other uploads may have been refused while this one waited.
            self.check_refused(owner)
            return await place.run(run())

    def check_refused(self, owner: str) -> None:
        """Raise TooManyRefusedUploads if the checks of the owner's refused uploads have used up their CPU time."""
        used = self._refused.of(owner)
        if used >= REFUSED_SECONDS and owner != OPERATOR:
            raise TooManyRefusedUploads(max(1, math.ceil(HALF_LIFE_S * math.log2(used / REFUSED_SECONDS))))

    async def _run(
        self, folder: Path, owner: str, candidates: Candidates, num_bytes: int, quick_seconds: int | None = None
    ) -> Checked:
        """Run a check in a child process.

        num_bytes: size of the upload. quick_seconds: CPU time of a quick check, beyond which _TakesLong is raised.
        """
        cpu_seconds = CPU_SECONDS + num_bytes // CPU_BYTES_PER_SECOND
        seconds = CLOCK_FACTOR * cpu_seconds
        job = {
            "folder": str(folder),
            "bases": {base.name: self._describe(base) for base in candidates.bases},
            "closed": candidates.closed,
            "max_bytes": self._max_bytes,
            "memory_bytes": MEMORY_BYTES,
            "file_bytes": self._max_bytes + (4 << 20),
            "cpu_seconds": cpu_seconds if quick_seconds is None else quick_seconds,
            "seconds": seconds,
        }
        began, cpu_used, failure, is_refused = time.monotonic(), None, None, True
        try:
            code, out = await self._client.run(json.dumps(job).encode(), seconds)
            if code == -signal.SIGXCPU and quick_seconds is not None:
                cpu_used, is_refused = quick_seconds, False
                raise _TakesLong
            answer: dict[str, Any] = json.loads(out) if code == 0 else {}
            cpu_used = answer.pop("cpu_seconds", None)
            failure = None if code == 0 else _failed(code, out)
            # A full store is not the tenant's fault.
            is_refused = "refused" in answer or isinstance(failure, CheckFailed)
        finally:
            # A killed check does not report its CPU time, so its wall-clock time counts.
            used = time.monotonic() - began if cpu_used is None else cpu_used
            self._used.add(owner, used)
            if is_refused:
                self._refused.add(owner, used)
        if failure is not None:
            raise failure
        if "refused" in answer:
            raise self._refusal(answer)
        [base] = [each for each in candidates.bases if each.name == answer["base"]]
        return Checked(folder=folder / PREPARED, **{**answer, "base": base})

    def _describe(self, base: Base) -> dict[str, Any]:
        return msgspec.to_builtins(base.shape) | msgspec.to_builtins(self._engine_limits(base.id))

    def _refusal(self, answer: dict[str, Any]) -> Exception:
        kind = answer["refused"]
        if kind == "too_large":
            return too_large(self._max_bytes, answer["message"])
        if kind == "archive":
            return BadRequest(answer["message"], param="file")
        if kind == "memory":
            return CheckFailed(f"The adapter cannot be checked within {MEMORY_BYTES >> 20} MiB of memory.")
        return AdapterError(answer["field"], answer["message"])


class CheckClient:
    """Client of the process that forks the checks (`adapters.check_server`). The first check starts the process, and
    the next check restarts it if it has died.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def run(self, job: bytes, seconds: float) -> tuple[int, bytes]:
        """Run a check. Returns its exit status, negative for a signal, and its output.

        A check that takes longer than `seconds` or whose caller is cancelled is killed. The check has ended when this
        returns.
        """
        client, servers = socket.socketpair()
        client.setblocking(False)
        if client.send(job) < len(job):
            raise ValueError(f"a job of {len(job)} bytes does not fit into a socket's buffer")
        with servers:
            reader, writer = await asyncio.open_connection(sock=client)
            try:
                await self._send(servers)
                servers.close()
                async with asyncio.timeout(seconds):
                    out, _, status = (await reader.read()).rpartition(b"\n")
            except TimeoutError:
                return -signal.SIGALRM, b""
            except ConnectionError:
                # The server died before it read the job.
                return -signal.SIGKILL, b""
            finally:
                servers.close()
                await self._end(reader, writer)
        # The status is missing if the server died during the check.
        return (int(status), out) if status else (-signal.SIGKILL, b"")

    def close(self) -> None:
        """End the server and kill running checks."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    async def _end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Kill the check if it still runs, and wait for its end. Kill the server if it does not react."""
        try:
            if not reader.at_eof():
                # The server kills the check when this side of the socket ends, and closes the socket after its end.
                writer.write_eof()
                async with asyncio.timeout(KILL_SECONDS):
                    await reader.read()
        except TimeoutError:
            log.warning("the process that forks the checks of uploads did not react and was killed")
            self.close()
        except OSError:
            log.warning("the process that forks the checks of uploads died")
        finally:
            writer.close()

    async def _send(self, sock: socket.socket) -> None:
        while True:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._start()
            assert self._control is not None
            try:
                socket.send_fds(self._control, [b"+"], [sock.fileno()])
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except ConnectionError:
                # The server died after the poll.
                self.close()
            else:
                return

    def _start(self) -> None:
        self._control, servers = socket.socketpair()
        self._control.setblocking(False)
        with servers:
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", "-c", BOOT, str(ROOT), str(os.getpid())),
                stdin=servers.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


def _failed(code: int, out: bytes) -> Exception:
    """Return the error for a check that ended without an answer."""
    problem = out.decode("utf-8", "replace")[:200]
    log.warning("the check of an upload ended with status %d: %s", code, problem)
    if problem.startswith(("ENOSPC", "EDQUOT")):
        return Unavailable("The adapter store is full.", code="adapter_store_full", retry_after=60)
    ends = {-signal.SIGXCPU: "too much CPU time", -signal.SIGALRM: "too much time", -signal.SIGKILL: "it was killed"}
    why = ends.get(code, f"it ended with status {code}")
    return CheckFailed(f"The adapter could not be checked: {why}.")
