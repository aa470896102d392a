"""Real child processes: order, logs, failures, and no child that outlives its parent."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from loraplex.up import processes
from loraplex.up.processes import ChildError, ProcessGroup
from testing.gateway.running import until

# It outlives every deadline here, so that no test takes its own end for the end that is tested.
SLEEPER = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")


def alive(pid: int) -> bool:
    """Return whether the process is running; a zombie is not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends between `open` and `read`
        return False


async def is_back(child, before: int) -> bool:
    return child.process.pid != before and child.healthy_at is not None


async def has_printed(child) -> bool:
    return bool(child.log.read_text())


async def test_stops_the_youngest_first_and_leaves_none(tmp_path):
    group = ProcessGroup(tmp_path)
    children = [await group.start(name, SLEEPER, os.environ) for name in ("first", "second")]
    for child in children:
        await group.healthy(child, lambda child=child: has_printed(child), 60)
    stopped: list[str] = []
    await group.stop(stopped.append)
    assert stopped == ["second", "first"]
    assert [child.process.returncode for child in children] == [-signal.SIGTERM] * 2


async def test_one_that_ignores_sigterm_is_killed(tmp_path):
    group = ProcessGroup(tmp_path, stop_seconds=0.3)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = await group.start("stubborn", (sys.executable, "-c", stubborn), os.environ)
    await group.healthy(child, lambda: has_printed(child), 60)
    await group.stop(lambda name: None)
    assert child.process.returncode == -signal.SIGKILL


async def test_a_death_tells_the_end_of_the_log(tmp_path):
    group = ProcessGroup(tmp_path)
    script = "import sys; print(*range(100), sep='\\n'); print('out of cheese', file=sys.stderr); sys.exit(7)"
    await group.start("mouse", (sys.executable, "-c", script), os.environ)
    message = str(await asyncio.wait_for(group.first_death(), 60))
    assert message.startswith(f"mouse exited with code 7; its log is {tmp_path / 'mouse.log'}")
    assert message.endswith("  99\n  out of cheese")
    assert len(message.splitlines()) == 16


async def test_waiting_for_health_ends_when_the_child_dies(tmp_path):
    group = ProcessGroup(tmp_path)

    async def never() -> bool:
        return False

    child = await group.start("brief", (sys.executable, "-c", "raise SystemExit('bad flag')"), os.environ)
    with pytest.raises(ChildError, match=r"(?s)brief exited with code 1.*bad flag"):
        await group.healthy(child, never, 60)


async def test_waiting_for_health_ends_in_time(tmp_path):
    group = ProcessGroup(tmp_path)

    async def never() -> bool:
        return False

    child = await group.start("slow", SLEEPER, os.environ)
    with pytest.raises(ChildError, match="slow was not ready after 0 s"):
        await group.healthy(child, never, 0.2)
    await group.stop(lambda name: None)


async def test_run_waits_for_the_end(tmp_path):
    group = ProcessGroup(tmp_path)
    await group.run("job", (sys.executable, "-c", "print('done')"), os.environ)
    assert (tmp_path / "job.log").read_text() == "done\n"
    assert group.children == []
    with pytest.raises(ChildError, match="job exited with code 3"):
        await group.run("job", (sys.executable, "-c", "raise SystemExit(3)"), os.environ)
    assert (tmp_path / "job.previous.log").read_text() == "done\n"


async def test_the_end_of_a_program_that_is_run_is_no_death(tmp_path, monkeypatch):
    """A busy event loop sees the program's end before `run` does."""
    wait = asyncio.subprocess.Process.wait

    async def late(process: asyncio.subprocess.Process) -> int:
        code = await wait(process)
        await asyncio.sleep(5 * processes.POLL_SECONDS)
        return code

    monkeypatch.setattr(asyncio.subprocess.Process, "wait", late)
    group = ProcessGroup(tmp_path)
    death = asyncio.create_task(group.first_death())
    await group.run("job", (sys.executable, "-c", "print('done')"), os.environ)
    assert not death.done()
    death.cancel()
    await asyncio.wait([death])


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_die_when_the_parent_is_killed(tmp_path):
    script = textwrap.dedent(f"""
        import asyncio, os
        from pathlib import Path
        from loraplex.up.processes import ProcessGroup
        async def main():
            group = ProcessGroup(Path({str(tmp_path)!r}))
            child = await group.start("orphan", {SLEEPER!r}, os.environ)
            while not child.log.read_text():
                await asyncio.sleep(0.02)
            print(child.process.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        assert alive(orphan)
        parent.kill()
    deadline = time.monotonic() + 60
    while alive(orphan) and time.monotonic() < deadline:
        time.sleep(0.02)
    if is_left := alive(orphan):
        os.kill(orphan, signal.SIGKILL)
    assert not is_left


def counting(runs: str, *, dies_after: int) -> tuple[str, ...]:
    """Return a program that counts its runs in a file and exits at once from run `dies_after` on."""
    script = f"""
import pathlib, sys, time
runs = pathlib.Path({runs!r})
runs.write_text(str(int(runs.read_text() or 0) + 1 if runs.exists() else 1))
print('up', flush=True)
if int(runs.read_text()) >= {dies_after}:
    sys.exit(70)
time.sleep(60)
"""
    return (sys.executable, "-c", script)


async def test_a_child_that_is_kept_alive_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BACKOFF_SECONDS", (0.05,))
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


async def test_a_child_that_dies_too_often_in_a_row_ends_the_group(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BACKOFF_SECONDS", (0.02, 0.04, 0.06))
    said: list[str] = []
    group = ProcessGroup(tmp_path, announce=said.append)
    try:
        child = await group.start("engine", counting(str(tmp_path / "runs"), dies_after=2), os.environ)
        await group.healthy(child, lambda: has_printed(child), 30)
        group.keep_alive(child, lambda: has_printed(child), 30)
        os.kill(child.process.pid, signal.SIGKILL)
        message = str(await asyncio.wait_for(group.first_death(), 60))
        assert message.startswith("engine exited with code 70 and has died 4 times in a row; its log is ")
        assert [line for line in said if "starts again" in line] == [
            "engine was killed by SIGKILL; it starts again in 0.02 s",
            "engine exited with code 70; it starts again in 0.04 s",
            "engine exited with code 70; it starts again in 0.06 s",
        ]
        assert (tmp_path / "runs").read_text() == "4"
    finally:
        await group.stop(lambda name: None)


async def test_a_child_that_never_is_healthy_again_is_killed_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BACKOFF_SECONDS", (0.02,))
    group, is_healthy = ProcessGroup(tmp_path), True

    async def check() -> bool:
        return is_healthy

    try:
        child = await group.start("engine", SLEEPER, os.environ)
        group.keep_alive(child, check, 0.3)
        is_healthy = False
        os.kill(child.process.pid, signal.SIGKILL)
        message = str(await asyncio.wait_for(group.first_death(), 60))
        assert message.startswith("engine was killed by SIGKILL and has died 2 times in a row")
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
        assert lines[1] == "engine could not be started: No space left on device"
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
