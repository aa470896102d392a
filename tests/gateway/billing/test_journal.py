"""The journal: an appended row survives a SIGKILL, is read once by any process, and never for another database."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gateway.billing.journal import Journal, journal_folder, report_others

ROOM = 10**6


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def read(journal: Journal) -> list[bytes]:
    return [event async for batch in journal.batches() for event in batch]


@pytest.mark.parametrize("lacking", ["", "fdatasync"], ids=["linux", "macos"])
async def test_what_was_appended_is_read_once_and_the_disk_is_free_again(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if lacking:
        monkeypatch.delattr(os, lacking)
    journal = Journal(tmp_path / "j", ROOM)
    events = [b"%d" % i * (i % 50) for i in range(1300)]
    await asyncio.gather(*(journal.append(event) for event in events))
    assert journal.bytes > sum(map(len, events))
    assert sorted(await read(journal)) == sorted(events)
    assert (journal.bytes, await read(journal)) == (0, [])
    await journal.append(b"later")
    assert await read(journal) == [b"later"]
    await journal.close()
    assert files(tmp_path / "j") == []


async def test_without_need_nothing_is_made(tmp_path: Path):
    journal = Journal(tmp_path / "j", ROOM)
    assert await read(journal) == []
    await journal.close()
    assert not (tmp_path / "j").exists()


async def test_a_batch_that_could_not_be_written_down_comes_again(tmp_path: Path):
    journal = Journal(tmp_path, ROOM)
    await journal.append(b"event")
    for _ in range(2):
        batches = journal.batches()
        assert await anext(batches) == [b"event"]
        # After an error the writer closes its generator in the same way.
        await batches.aclose()
    assert await read(journal) == [b"event"]
    await journal.close()


async def test_a_living_processs_file_is_left_alone_and_a_closed_ones_taken_over(tmp_path: Path):
    first, second = Journal(tmp_path, ROOM), Journal(tmp_path, ROOM)
    await first.append(b"first's")
    await second.append(b"second's")
    assert await read(second) == [b"second's"]
    await first.close()
    assert await read(second) == [b"first's"]
    await second.close()
    assert files(tmp_path) == []


async def test_room_ends_with_the_bytes(tmp_path: Path):
    journal = Journal(tmp_path, 100)
    assert journal.has_room
    await journal.append(b"e" * 200)
    assert not journal.has_room
    await read(journal)
    assert journal.has_room
    await journal.close()


KILLED = """
import asyncio, sys
from pathlib import Path
from gateway.billing.journal import Journal

async def main():
    journal = Journal(Path(sys.argv[1]), 10**9)
    for i in range(10**6):
        await journal.append(b"event %d" % i)
        print(i, flush=True)

asyncio.run(main())
"""


async def test_what_was_acknowledged_before_a_sigkill_is_there_after_it(tmp_path: Path):
    def kill() -> int:
        """Kill the process and return the last event that it knew to be safe."""
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 20:
                os.kill(process.pid, signal.SIGKILL)
                break
        rest = process.stdout.read().split()
        process.stdout.close()
        process.wait()
        return int(rest[-1]) if rest else 20

    last = await asyncio.to_thread(kill)
    journal = Journal(tmp_path, ROOM)
    found = await read(journal)
    assert found[: last + 1] == [b"event %d" % i for i in range(last + 1)]
    assert len(found) <= last + 2
    await journal.close()
    assert [path for path in files(tmp_path) if path.suffix != ".damaged"] == []


async def test_a_torn_record_ends_its_file_and_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    journal = Journal(tmp_path, ROOM)
    await journal.append(b"whole")
    await journal.append(b"to be torn")
    await journal.close()
    [path] = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    journal = Journal(tmp_path, ROOM)
    assert await read(journal) == [b"whole"]
    assert "is incomplete" in caplog.text
    assert [p.suffix for p in files(tmp_path)] == [".damaged"]
    await journal.append(b"goes on")
    assert await read(journal) == [b"goes on"]
    await journal.close()


async def test_a_disk_that_takes_nothing_says_so(tmp_path: Path):
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file" / "j", ROOM)
    with pytest.raises(OSError, match="file"):
        await journal.append(b"event")
    await journal.close()


def test_each_database_has_a_folder_of_its_own_whatever_its_password(tmp_path: Path):
    urls = ["postgresql://u:one@h/a", "postgresql://u:two@h/a", "postgresql://u:one@h/b", "sqlite:////a"]
    one, two, three, four = (journal_folder(tmp_path, url) for url in urls)
    assert one == two
    assert len({one, three, four}) == 3


async def test_the_journal_does_not_wait_for_other_threads(tmp_path: Path):
    """The event loop's pool is fully occupied by a tenant's work; an append reaches the disk all the same."""
    release = threading.Event()
    held = [asyncio.create_task(asyncio.to_thread(release.wait, 60)) for _ in range(100)]
    journal = Journal(tmp_path, ROOM)
    try:
        async with asyncio.timeout(20):
            await journal.append(b"event")
            assert await read(journal) == [b"event"]
        assert not any(task.done() for task in held)
    finally:
        release.set()
        await asyncio.gather(*held)
        await journal.close()


async def test_usage_left_under_another_host_of_the_database_is_reported_and_can_be_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """After a failover to another host, the usage of the outage waits in the former host's folder."""
    before, now, live = (journal_folder(tmp_path, f"postgresql://u:p@{host}/d") for host in ("old", "new", "third"))
    dead = Journal(before, ROOM)
    await dead.append(b"usage of the outage")
    await dead.close()
    other = Journal(live, ROOM)  # of a gateway that runs, with a database of its own
    await other.append(b"of another")
    journal = Journal(now, ROOM)
    assert await read(journal) == []
    report_others(now)
    [path] = files(before)
    [line] = [record.getMessage() for record in caplog.records if "another LORAPLEX_DATABASE_URL" in record.message]
    assert str(path) in line
    assert line.endswith(f"move the file into the folder {now}")
    path.rename(now / path.name)
    assert await read(journal) == [b"usage of the outage"]
    assert await read(other) == [b"of another"]
    await journal.close()
    await other.close()
