"""Small run of `python -m benchmarks.ledger_chaos`: each part of a real stack is killed once under streams.

At the end the ledger equals the engine's books.
"""

import json

import pytest

from benchmarks.ledger_chaos import run
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
