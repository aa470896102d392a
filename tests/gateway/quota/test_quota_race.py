"""A small run of benchmarks/quota_race.py: killed gateways admit no token too many, and leak none."""

from pathlib import Path

from benchmarks.quota_race import race


async def test_processes_that_are_killed_neither_admit_too_much_nor_leak(redis_url: str, tmp_path: Path):
    report = await race(redis_url, processes=2, requests=400, kills=2, lease=1.5, folder=tmp_path)
    assert report["problems"] == []
    assert report["granted"] > 0
    assert report["refused"] > 0
