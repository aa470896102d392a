"""Fleets of engines of several kinds: a request that one kind does not serve goes to another."""

from pathlib import Path

from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream
from testing.gateway.vllm_double import VllmDouble
from tests.gateway.api.adapters.test_adapters import files, push
from tests.gateway.fleet.kinds.test_vllm import key_file


async def test_a_mixture_is_served_by_our_engine_wherever_its_home_is(tmp_path: Path, model_dir: Path, redis_url: str):
    async with Upstream().serving() as ours, VllmDouble().serving() as vllm:
        engines = [f"vllm+{vllm.url}?key_file={key_file(tmp_path)}", ours.url]
        async with running(settings(tmp_path, model_dir, engines, redis_url, redis_timeout=30.0)) as gateway:
            acme = await gateway.tenant("acme")
            for seed, name in enumerate(("a", "b")):
                assert (await push(acme, name, files(seed))).status == 201
            # Mixtures of different weights have different homes.
            mixtures = [f"a*0.{tenth}+b*0.5" for tenth in range(1, 9)]
            for mixture in mixtures:
                got = await acme.complete(model=mixture, max_tokens=2)
                assert (got.status, got.json["model"]) == (200, mixture), got.body
            assert len(ours.requests) == len(mixtures)
            assert all("sha256:" in body["model"] and "*" in body["model"] for _, body in ours.requests)
            assert vllm.requests == []

            async def all_billed() -> bool:
                return sum(row["requests"] for row in await acme.usage()) == len(mixtures)

            await until(all_billed)
            # Without our engine, the client learns that the other does not serve mixtures.
            ours.refuses = (503, "engine_unavailable")
            got = await acme.complete(model=mixtures[0], max_tokens=2)
            assert (got.status, got.error["param"]) == (400, "model")
            assert "mixtures" in got.error["message"]
