"""Small run of `python -m benchmarks.ledger_chaos`: each part of a real stack is killed once under streams.

At the end the ledger equals the engine's books.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ledger_chaos import Part, run
from benchmarks.ledger_chaos_check import is_exact


@pytest.mark.usefixtures("starts_servers")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("partitioned", [False, True], ids=["plain", "partitioned"])
async def test_the_ledger_is_exact_whatever_dies(partitioned: bool):
    found = await run(200, at_once=16, rounds=1, pause=0.4, seed=3, seconds=120.0, partitioned=partitioned)
    if not is_exact(found):
        pytest.fail(json.dumps(found, indent=1))
    assert sum(found["kills"].values()) == 5
    assert found["engine_requests"] >= 200
    assert all(name[-6:].isdigit() == partitioned for name in found["tables"])


async def test_a_part_that_is_started_twice_at_once_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started, plain = list[asyncio.subprocess.Process](), asyncio.create_subprocess_exec

    async def record(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        started.append(await plain(*args, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", record)
    part = Part("sleeper", ["sleep", "600"], tmp_path / "log")
    try:
        await asyncio.gather(part.start(), part.start())
        await asyncio.gather(part.kill(), part.start(), part.start())
        await part.kill()
        assert len(started) == 2
        assert all(process.returncode is not None for process in started)
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
