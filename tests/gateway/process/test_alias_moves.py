"""An alias moves and a canary runs at a gateway of two workers; the benchmark has the same with 10,000 requests."""

from pathlib import Path

import pytest

from benchmarks.alias_moves import measure, stack


@pytest.mark.usefixtures("takes_a_core")
async def test_each_answer_has_a_version_that_the_alias_had(tmp_path: Path, model_dir: Path, redis_url: str):
    async with stack(tmp_path, redis_url, model_dir) as (gateway, double):
        result = await measure(gateway, double, tmp_path, requests=400, moves=5)
    assert result.failed == []
    assert result.answers == 1200
    assert (result.wrong, result.users_with_two_versions) == (0, 0)
    assert (result.moves, result.lost_swaps) == (5, 5)
    # Two workers take the versions in turn, each by itself.
    assert abs(result.share_in_turn - 0.05) <= 0.015
    assert result.old_versions_late == 0
