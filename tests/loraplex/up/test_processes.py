"""Real child processes: order, logs, failures, and no child that outlives its parent."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from loraplex.up import processes
from loraplex.up.processes import ChildError, ProcessGroup
from tests.loraplex.up.children import SLEEPER, alive, has_printed


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
