"""Restarts of child processes that are kept alive: their pauses, their limits, and the end of the group."""

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path

import pytest

from loraplex.up import processes
from loraplex.up.processes import Child, ProcessGroup
from testing.gateway.running import until
from tests.loraplex.up.children import SLEEPER, alive, has_printed, is_back


def counting(runs: str, *, dies_after: int) -> tuple[str, ...]:
    """Return a program that counts its runs in a file and exits at once from run `dies_after` on."""
    script = f"""
runs=$(($(cat {runs} 2>/dev/null || echo 0) + 1))
printf $runs >{runs}
echo up
test $runs -lt {dies_after} || exit 70
exec sleep 60
"""
    return ("/bin/sh", "-c", script)


async def test_a_child_that_is_kept_alive_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BACKOFF_SECONDS", (0.05, 0.05))
    said: asyncio.Queue[str] = asyncio.Queue()
    group = ProcessGroup(tmp_path, announce=said.put_nowait)
    try:
        child = await group.start("engine", counting(str(tmp_path / "runs"), dies_after=99), os.environ)
        await group.healthy(child, lambda: has_printed(child), 30)
        group.keep_alive(child, lambda: has_printed(child), 30)
        death = asyncio.create_task(group.first_death())
        for runs in ("2", "3"):
            before = child.process.pid
            os.kill(before, signal.SIGKILL)
            async with asyncio.timeout(30):
                assert await said.get() == "engine was killed by SIGKILL; it starts again in 0.05 s"
                assert await said.get() == "engine serves again"
            assert child.process.pid != before
            assert (tmp_path / "runs").read_text() == runs
            assert not death.done()
            # After a period of health, the next failure counts as the first again.
            monkeypatch.setattr(processes, "STEADY_SECONDS", 0.0)
        death.cancel()
        await asyncio.wait([death])
    finally:
        await group.stop(lambda name: None)
    assert not alive(child.process.pid)


async def start_dying(group: ProcessGroup, runs: Path) -> Child:
    """Start a healthy child that dies at once from its second run on, and kill it."""
    child = await group.start("engine", counting(str(runs), dies_after=2), os.environ)
    await group.healthy(child, lambda: has_printed(child), 30)
    group.keep_alive(child, not_up, 30)
    os.kill(child.process.pid, signal.SIGKILL)
    return child


async def not_up() -> bool:
    return False


@pytest.mark.parametrize("is_healthy_first", [False, True])
async def test_a_child_that_dies_again_and_again_does_not_end_the_group(tmp_path, monkeypatch, is_healthy_first):
    """Five deaths in a row of one engine stopped the gateway and the healthy engines too. The reason of a child that
    became healthy each time was shown once only.
    """
    monkeypatch.setattr(processes, "BACKOFF_SECONDS", (0.02, 0.04, 0.06))
    monkeypatch.setattr(processes, "GIVE_UP_SECONDS", 0.0)
    said: list[str] = []
    group = ProcessGroup(tmp_path, announce=said.append)
    runs = tmp_path / "runs"
    try:
        other = await group.start("other", SLEEPER, os.environ)
        await group.healthy(other, lambda: has_printed(other), 30)
        group.keep_alive(other, lambda: has_printed(other), 30)
        before = other.process.pid
        child = await start_dying(group, runs)
        if is_healthy_first:
            group.keep_alive(child, lambda: has_printed(child), 30)
        death = asyncio.create_task(group.first_death())

        async def has_run_seven_times() -> bool:
            return int(runs.read_text() or 0) >= 7

        await until(has_run_seven_times)
        assert not death.done()
        assert (other.process.pid, other.process.returncode) == (before, None)
        assert [line for line in said if "starts again" in line][:5] == [
            "engine was killed by SIGKILL; it starts again in 0.02 s",
            "engine exited with code 70; it starts again in 0.04 s",
            *["engine exited with code 70; it starts again in 0.06 s"] * 3,
        ]
        assert ("engine serves again" in said) == is_healthy_first
        # The end of its log is shown with every third death.
        ends = [line for line in said if " in a row" in line]
        assert len(ends) == 2
        for number, end in zip((3, 6), ends, strict=True):
            log = group.logs / "engine.log"
            assert end.startswith(f"engine has died {number} times in a row; its log is {log}, which ends:")
        death.cancel()
        await asyncio.wait([death])
    finally:
        await group.stop(lambda name: None)


@pytest.mark.parametrize("sleeps", [False, True])
async def test_the_group_ends_if_nothing_was_healthy_for_a_long_time(tmp_path, monkeypatch, sleeps):
    """A child that sleeps can be woken, so something is left."""
    monkeypatch.setattr(processes, "BACKOFF_SECONDS", (0.02,))
    monkeypatch.setattr(processes, "GIVE_UP_SECONDS", 0.5)
    group, runs = ProcessGroup(tmp_path), tmp_path / "runs"
    try:
        if sleeps:
            other = await group.start("other", SLEEPER, os.environ)
            group.keep_alive(other, lambda: has_printed(other), 30)
            await group.pause(other)
        child = await start_dying(group, runs)
        began = asyncio.get_running_loop().time()
        death = asyncio.create_task(group.first_death())
        if sleeps:

            async def has_died_for_long() -> bool:
                return child.deaths > 3 and asyncio.get_running_loop().time() - began > 1

            await until(has_died_for_long)
            assert not death.done()
            death.cancel()
            await asyncio.wait([death])
            return
        message = str(await asyncio.wait_for(death, 60))
        assert asyncio.get_running_loop().time() - began >= 0.5
        assert message.startswith("engine exited with code 70; no engine was healthy in the last 0.5 s; its log is ")
        assert message.endswith("which ends:\n  up")
        assert child.deaths > 1
    finally:
        await group.stop(lambda name: None)


async def test_a_child_that_never_is_healthy_again_is_killed_and_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BACKOFF_SECONDS", (0.02,))
    monkeypatch.setattr(processes, "GIVE_UP_SECONDS", 0.6)
    said: list[str] = []
    group, is_healthy = ProcessGroup(tmp_path, announce=said.append), True

    async def check() -> bool:
        return is_healthy

    try:
        child = await group.start("engine", SLEEPER, os.environ)
        group.keep_alive(child, check, 0.3)
        is_healthy = False
        os.kill(child.process.pid, signal.SIGKILL)
        message = str(await asyncio.wait_for(group.first_death(), 60))
        assert "engine was not ready after 0 s; it starts again in 0.02 s" in said
        assert message.startswith("engine was not ready after 0 s; no engine was healthy")
        assert not alive(child.process.pid)
    finally:
        await group.stop(lambda name: None)


async def test_a_restart_for_which_the_machine_has_no_room_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BACKOFF_SECONDS", (0.02, 0.02))
    said: asyncio.Queue[str] = asyncio.Queue()
    group = ProcessGroup(tmp_path, announce=said.put_nowait)
    new_log = group._new_log

    def full(name: str) -> Path:
        new_log(name).unlink()
        monkeypatch.setattr(group, "_new_log", new_log)
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        child = await group.start("engine", SLEEPER, os.environ)
        group.keep_alive(child, lambda: has_printed(child), 30)
        monkeypatch.setattr(group, "_new_log", full)
        death = asyncio.create_task(group.first_death())
        os.kill(child.process.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            lines = [await said.get() for _ in range(4)]
        assert lines[1] == "engine could not be started: No space left on device; it starts again in 0.02 s"
        assert lines[2] == f"engine has died 2 times in a row; its log is {tmp_path / 'engine.log'} (empty)"
        assert lines[3] == "engine serves again"
        assert not death.done()
        # A group that ends because of such restarts still states the reason.
        child.log.unlink()
        assert str(child.failure("has died")).endswith("engine.log (empty)")
        death.cancel()
        await asyncio.wait([death])
    finally:
        await group.stop(lambda name: None)


async def test_the_death_of_another_child_ends_the_group_while_one_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BACKOFF_SECONDS", (60.0,))
    group = ProcessGroup(tmp_path)
    try:
        gateway = await group.start("gateway", SLEEPER, os.environ)
        engine = await group.start("engine", SLEEPER, os.environ)
        group.keep_alive(engine, lambda: has_printed(engine), 30)
        death = asyncio.create_task(group.first_death())
        for child in (engine, gateway):
            os.kill(child.process.pid, signal.SIGKILL)
            await child.process.wait()
        assert str(await asyncio.wait_for(death, 30)).startswith("gateway was killed by SIGKILL")
    finally:
        await group.stop(lambda name: None)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
async def test_a_restarted_child_keeps_its_cpu_and_the_other_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BACKOFF_SECONDS", (0.0,))
    cpu = max(os.sched_getaffinity(0))
    group = ProcessGroup(tmp_path)
    pinned, other = [await group.start(name, SLEEPER, os.environ, cpus) for name, cpus in (("a", [cpu]), ("b", []))]
    try:
        for child in (pinned, other):
            await group.healthy(child, lambda child=child: has_printed(child), 60)
            group.keep_alive(child, lambda child=child: has_printed(child), 60)
        watching = asyncio.create_task(group.first_death())
        first, others = pinned.process.pid, other.process.pid
        assert os.sched_getaffinity(first) == {cpu}
        os.kill(first, signal.SIGKILL)
        await until(lambda: is_back(pinned, first))
        assert os.sched_getaffinity(pinned.process.pid) == {cpu}
        assert other.process.pid == others
        assert os.sched_getaffinity(others) == os.sched_getaffinity(0)
        watching.cancel()
    finally:
        await group.stop(lambda name: None)


async def test_a_child_that_is_paused_while_it_would_be_started_again_stays_stopped(tmp_path, monkeypatch):
    """If an engine dies just before its base model sleeps, a later restart would leave a second process running."""
    monkeypatch.setattr(processes, "BACKOFF_SECONDS", (0.5, 0.5, 0.5))
    pauses: list[asyncio.Task[None]] = []

    def pause(line: str) -> None:
        """Pause the child, as the first line about it says that it will be started again."""
        if not pauses:
            pauses.append(asyncio.create_task(group.pause(child)))

    group = ProcessGroup(tmp_path, announce=pause)
    started = tmp_path / "started"
    note = f"import os, time; open({str(started)!r}, 'a').write(f'{{os.getpid()}} ')"
    script = f"{note}; print('up', flush=True); time.sleep(60)"

    async def is_paused() -> bool:
        return bool(pauses) and pauses[0].done()

    def pids() -> list[int]:
        return [int(pid) for pid in started.read_text().split()]

    child = await group.start("engine", (sys.executable, "-c", script), os.environ)
    await group.healthy(child, lambda: has_printed(child), 60)
    group.keep_alive(child, lambda: has_printed(child), 60)
    watch = asyncio.create_task(group.first_death())
    try:
        os.kill(child.process.pid, signal.SIGKILL)
        await until(is_paused)
        await pauses[0]
        await asyncio.sleep(1.5)
        assert len(pids()) == 1
        await group.resume(child, lambda: has_printed(child), 60)
        assert [alive(pid) for pid in pids()] == [False, True]
        # It is kept alive again.
        before = child.process.pid
        os.kill(before, signal.SIGKILL)
        await until(lambda: is_back(child, before))
        assert [alive(pid) for pid in pids()] == [False, False, True]
        assert not watch.done()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await group.stop(lambda name: None)
