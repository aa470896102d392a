"""Child processes started in order and stopped in reverse, each with a log file and a health check.

Knows nothing of what the processes do.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 15
POLL_SECONDS = 0.1


class ChildError(RuntimeError):
    """A child died, or was not healthy in time. The message ends with the tail of its log."""


@dataclass(frozen=True)
class Child:
    name: str
    process: asyncio.subprocess.Process
    log: Path

    def failure(self, what: str) -> ChildError:
        tail = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        lines = [f"{self.name} {what}; its log is {self.log}" + (", which ends:" if tail else " (empty)")]
        return ChildError("\n".join(lines + [f"  {line}" for line in tail]))

    def death(self) -> ChildError:
        code = self.process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return self.failure(how)


class ProcessGroup:
    """The children of one `loraplex up`. Use from the main thread: the death signal follows the thread that forks."""

    def __init__(self, logs: Path, stop_seconds: float = 45.0) -> None:
        self.logs = logs
        self.stop_seconds = stop_seconds
        self.children: list[Child] = []

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> Child:
        """Starts `argv` in its own process group, so that a Ctrl-C in the terminal reaches only us."""
        log = self._new_log(name)
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "loraplex.launch", str(os.getpid()), *argv),
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def _new_log(self, name: str) -> Path:
        """An empty private file; the last run's is kept beside it."""
        log = self.logs / f"{name}.log"
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
        log.touch(0o600)
        return log

    async def run(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Runs a program to its end. Raises ChildError unless it exits with 0."""
        child = await self.start(name, argv, env)
        await child.process.wait()
        if child.process.returncode != 0:
            raise child.death()
        self.children.remove(child)

    async def healthy(self, child: Child, check: Callable[[], Awaitable[bool]], timeout: float) -> None:
        """Waits until `check` says true. Raises ChildError when the child dies or `timeout` seconds pass."""
        deadline = asyncio.get_running_loop().time() + timeout
        while not await check():
            if child.process.returncode is not None:
                raise child.death()
            if asyncio.get_running_loop().time() > deadline:
                raise child.failure(f"was not ready after {timeout:.0f} s")
            await asyncio.sleep(POLL_SECONDS)

    async def first_death(self) -> ChildError:
        """Returns once a child has died by itself."""
        while True:
            for child in self.children:
                if child.process.returncode is not None:
                    return child.death()
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self, announce: Callable[[str], None]) -> None:
        """Stops the children, the youngest first; SIGKILL for one that does not go within `stop_seconds`."""
        for child in reversed(self.children):
            if child.process.returncode is not None:
                continue
            announce(child.name)
            child.process.terminate()
            try:
                await asyncio.wait_for(child.process.wait(), self.stop_seconds)
            except TimeoutError:
                self._kill(child)
                await child.process.wait()
        self.children.clear()

    def kill(self) -> None:
        """Ends everything at once; `stop`, which must be running, then returns at once."""
        for child in self.children:
            self._kill(child)

    @staticmethod
    def _kill(child: Child) -> None:
        # The child's own process group: a server's helper processes go with it.
        if child.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
