"""Real children: order, logs, deaths, and that none outlives its parent."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from loraplex.processes import ChildError, ProcessGroup

SLEEPER = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)")


def alive(pid: int) -> bool:
    """Running; a zombie that nobody has waited for is not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def has_printed(child) -> bool:
    return bool(child.log.read_text())


async def test_stops_the_youngest_first_and_leaves_none(tmp_path):
    group = ProcessGroup(tmp_path)
    children = [await group.start(name, SLEEPER, os.environ) for name in ("first", "second")]
    for child in children:
        await group.healthy(child, lambda child=child: has_printed(child), 10)
    stopped: list[str] = []
    await group.stop(stopped.append)
    assert stopped == ["second", "first"]
    assert [child.process.returncode for child in children] == [-signal.SIGTERM] * 2


async def test_one_that_ignores_sigterm_is_killed(tmp_path):
    group = ProcessGroup(tmp_path, stop_seconds=0.3)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = await group.start("stubborn", (sys.executable, "-c", stubborn), os.environ)
    await group.healthy(child, lambda: has_printed(child), 10)
    await group.stop(lambda name: None)
    assert child.process.returncode == -signal.SIGKILL


async def test_a_death_tells_the_end_of_the_log(tmp_path):
    group = ProcessGroup(tmp_path)
    script = "import sys; print(*range(100), sep='\\n'); print('out of cheese', file=sys.stderr); sys.exit(7)"
    await group.start("mouse", (sys.executable, "-c", script), os.environ)
    message = str(await asyncio.wait_for(group.first_death(), 10))
    assert message.startswith(f"mouse exited with code 7; its log is {tmp_path / 'mouse.log'}")
    assert message.endswith("  99\n  out of cheese")
    assert len(message.splitlines()) == 16


async def test_waiting_for_health_ends_when_the_child_dies(tmp_path):
    group = ProcessGroup(tmp_path)

    async def never() -> bool:
        return False

    child = await group.start("brief", (sys.executable, "-c", "raise SystemExit('bad flag')"), os.environ)
    with pytest.raises(ChildError, match=r"(?s)brief exited with code 1.*bad flag"):
        await group.healthy(child, never, 10)


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


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_die_when_the_parent_is_killed(tmp_path):
    script = textwrap.dedent(f"""
        import asyncio, os
        from pathlib import Path
        from loraplex.processes import ProcessGroup
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
    assert not alive(orphan)
