"""Child processes started in order and stopped in reverse, each with a log file and a health check.

A child with `keep_alive` is restarted whenever it dies, after a growing pause. The group ends if none of these children
was healthy for `GIVE_UP_SECONDS`, and at the death of any other child. Independent of the programs it runs.
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
# Pauses in seconds before the restarts of a child; the last one applies to all further ones.
BACKOFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
# A failed restart ends the group once no restarted child has been healthy for this time: three times the time limit of
# an engine's load. A process manager above then sees the failure.
GIVE_UP_SECONDS = 1800.0
# After this healthy time, a child's count of consecutive deaths restarts.
STEADY_SECONDS = 60.0


class ChildError(RuntimeError):
    """A child died, or was not healthy in time. The message ends with the tail of its log."""


@dataclass(frozen=True)
class KeepAlive:
    """The health check of a restarted child, and its time limit."""

    check: Callable[[], Awaitable[bool]]
    timeout: float


@dataclass(eq=False)
class Child:
    """A child process.

    cpus: those that it may use, also after a restart; empty: all. keep_alive: None if its death ends the group. deaths:
    consecutive ones. healthy_at, down_since: on the event loop's clock; down_since is set while the child is being
    restarted. is_paused: whether it was stopped by `pause`. is_run: whether `run` waits for its end.
    """

    name: str
    process: asyncio.subprocess.Process
    log: Path
    argv: Sequence[str]
    env: Mapping[str, str]
    cpus: Sequence[int] = ()
    keep_alive: KeepAlive | None = None
    deaths: int = 0
    healthy_at: float | None = None
    down_since: float | None = None
    is_paused: bool = False
    is_run: bool = False

    def failure(self, problem: str) -> ChildError:
        # A restart that found no room on the disk left no log.
        tail = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if self.log.exists() else []
        lines = [f"{self.name} {problem}; its log is {self.log}" + (", which ends:" if tail else " (empty)")]
        return ChildError("\n".join(lines + [f"  {line}" for line in tail]))

    def death(self) -> ChildError:
        return self.failure(self.how_it_died())

    def how_it_died(self) -> str:
        code = self.process.returncode or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class ProcessGroup:
    """The children of one `loraplex up`.

    Use it from the main thread: the death signal follows the thread that forks.
    """

    def __init__(
        self, logs: Path, stop_seconds: float = 45.0, announce: Callable[[str], None] = lambda line: None
    ) -> None:
        """announce: called with a line about each restarted child."""
        self._announce = announce
        self.logs = logs
        self.stop_seconds = stop_seconds
        self.children: list[Child] = []
        # Restarts in progress, by child.
        self._revivals: dict[Child, asyncio.Task[ChildError | None]] = {}

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str], cpus: Sequence[int] = ()) -> Child:
        """Start `argv` in its own process group, so that Ctrl-C in the terminal reaches only this process.

        cpus: those that it may use; empty: all.
        """
        log = self._new_log(name)
        child = Child(name, await self._spawn(log, argv, env, cpus), log, argv, env, cpus)
        self.children.append(child)
        return child

    def keep_alive(self, child: Child, check: Callable[[], Awaitable[bool]], timeout: float) -> None:
        """Restart a healthy child whenever it dies. check, timeout: as in `healthy`."""
        child.keep_alive, child.healthy_at = KeepAlive(check, timeout), asyncio.get_running_loop().time()

    async def _spawn(
        self, log: Path, argv: Sequence[str], env: Mapping[str, str], cpus: Sequence[int]
    ) -> asyncio.subprocess.Process:
        with log.open("wb") as out:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "loraplex.up.launch", str(os.getpid()), ",".join(map(str, cpus)), *argv),
                env=dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,
            )

    def _new_log(self, name: str) -> Path:
        """Create an empty private log file; keep the last run's beside it."""
        log = self.logs / f"{name}.log"
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
        log.touch(0o600)
        return log

    async def run(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Run a program to its end. Raises ChildError unless it exits with 0."""
        child = await self.start(name, argv, env)
        child.is_run = True
        await child.process.wait()
        if child.process.returncode != 0:
            raise child.death()
        self.children.remove(child)

    async def healthy(self, child: Child, check: Callable[[], Awaitable[bool]], timeout: float) -> None:
        """Wait until `check` returns true. Raises ChildError if the child dies or `timeout` seconds pass."""
        if (problem := await self._until_healthy(child, check, timeout)) is not None:
            raise child.failure(problem)

    @staticmethod
    async def _until_healthy(child: Child, check: Callable[[], Awaitable[bool]], timeout: float) -> str | None:
        """Wait until `check` returns true. Return the problem if the child dies or `timeout` seconds pass."""
        deadline = asyncio.get_running_loop().time() + timeout
        while not await check():
            if child.process.returncode is not None:
                return child.how_it_died()
            if asyncio.get_running_loop().time() > deadline:
                return f"was not ready after {timeout:.0f} s"
            await asyncio.sleep(POLL_SECONDS)
        return None

    async def first_death(self) -> ChildError:
        """Restart the children with `keep_alive`.

        Return the error of the first child that died without it, or of a restart that failed after none of them had
        been healthy for `GIVE_UP_SECONDS`.
        """
        revivals = self._revivals
        try:
            while True:
                for child in self.children:
                    if child in revivals:
                        if revivals[child].done() and (error := revivals.pop(child).result()) is not None:
                            return error
                    elif child.process.returncode is not None and not (child.is_paused or child.is_run):
                        if child.keep_alive is None:
                            return child.death()
                        revivals[child] = asyncio.create_task(self._revive(child, child.keep_alive))
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for task in revivals.values():
                task.cancel()
            await asyncio.gather(*revivals.values(), return_exceptions=True)
            revivals.clear()

    async def _revive(self, child: Child, keep_alive: KeepAlive) -> ChildError | None:
        """Restart a dead child until it is healthy. Return the error that ends the group, if any."""
        clock = asyncio.get_running_loop().time
        if child.healthy_at is not None and clock() - child.healthy_at >= STEADY_SECONDS:
            child.deaths = 0
        child.healthy_at, child.down_since = None, clock()
        problem: str | None = child.how_it_died()
        while problem is not None:
            if self._is_hopeless():
                return child.failure(f"{problem}; no engine was healthy in the last {GIVE_UP_SECONDS:g} s")
            child.deaths += 1
            pause = BACKOFF_SECONDS[min(child.deaths, len(BACKOFF_SECONDS)) - 1]
            self._announce(f"{child.name} {problem}; it starts again in {pause:g} s")
            # A child may be healthy and die again without end, so a log of months shows the reason now and then.
            if child.deaths % len(BACKOFF_SECONDS) == 0:
                self._announce(str(child.failure(f"has died {child.deaths} times in a row")))
            await asyncio.sleep(pause)
            problem = await self._restart(child, keep_alive)
        child.healthy_at, child.down_since = clock(), None
        self._announce(f"{child.name} serves again")
        return None

    def _is_hopeless(self) -> bool:
        """Return whether no child that is restarted was healthy in the last `GIVE_UP_SECONDS`."""
        now = asyncio.get_running_loop().time()
        kept = [child for child in self.children if child.keep_alive is not None]
        return all(child.down_since is not None and now - child.down_since >= GIVE_UP_SECONDS for child in kept)

    async def _restart(self, child: Child, keep_alive: KeepAlive) -> str | None:
        """Start a dead child and wait until it is healthy. Return the problem, if any; the child is dead then."""
        try:
            await self._spawn_again(child)
        except OSError as error:  # no memory, process or disk left for it now
            return f"could not be started: {error.strerror}"
        problem = await self._until_healthy(child, keep_alive.check, keep_alive.timeout)
        if problem is not None:
            self._kill(child)
            await child.process.wait()
        return problem

    async def _spawn_again(self, child: Child) -> None:
        child.log = self._new_log(child.name)
        child.process = await self._spawn(child.log, child.argv, child.env, child.cpus)

    async def pause(self, child: Child) -> None:
        """Stop a child until `resume`; its place in the order of `stop` stays."""
        child.is_paused = True
        if (revival := self._revivals.pop(child, None)) is not None:
            revival.cancel()
            await asyncio.gather(revival, return_exceptions=True)
        child.down_since = None
        await self._end(child)

    async def resume(self, child: Child, check: Callable[[], Awaitable[bool]], timeout: float) -> None:
        """Start a paused child and wait until it is healthy. Raises ChildError, and the child counts as paused then."""
        await self._spawn_again(child)
        await self.healthy(child, check, timeout)
        child.deaths, child.healthy_at = 0, asyncio.get_running_loop().time()
        child.is_paused = False

    async def _end(self, child: Child) -> None:
        """Terminate a child; send SIGKILL if it does not stop within `stop_seconds`."""
        if child.process.returncode is not None:
            return
        child.process.terminate()
        try:
            await asyncio.wait_for(child.process.wait(), self.stop_seconds)
        except TimeoutError:
            self._kill(child)
            await child.process.wait()

    async def stop(self, announce: Callable[[str], None]) -> None:
        """Stop the children, the youngest first; send SIGKILL to a child that does not stop within `stop_seconds`."""
        for child in reversed(self.children):
            if child.process.returncode is not None:
                continue
            announce(child.name)
            await self._end(child)
        self.children.clear()

    def kill(self) -> None:
        """Kill all children at once; the running `stop` then returns at once."""
        for child in self.children:
            self._kill(child)

    @staticmethod
    def _kill(child: Child) -> None:
        # Signal the child's own process group, so that a server's helper processes end too.
        if child.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
