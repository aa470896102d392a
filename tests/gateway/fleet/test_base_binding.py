"""Versions that are bound to a base model run only in engines that serve it."""

from pathlib import Path

from testing.gateway.running import running_alone, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push

PROBE = "/v1/adapters/{}/versions/1/probe"


async def test_a_version_runs_only_on_its_base(tmp_path: Path, model_dir: Path, redis_url: str):
    old, new = Upstream(), Upstream()
    old.base_digest, new.base_digest = "a" * 64, "b" * 64
    # Only the old engine can probe at first.
    old.probe_status = 200
    async with old.serving(), new.serving():
        of = settings(tmp_path, model_dir, [old.url, new.url], redis_url, redis_timeout=30.0, adapter_probe="required")
        async with running_alone(of) as gateway:
            acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
            names = [f"bound-{number}" for number in range(6)]
            for seed, name in enumerate(names):
                assert (await push(acme, name, files(seed))).status == 201
            assert (await push(globex, names[0], files(0))).status == 201

            # About half of the adapters prefer the new engine.
            for name in (*names, f"{names[0]}*0.5+{names[1]}*0.5"):
                assert (await acme.complete(model=name, max_tokens=2)).status == 200
            assert (len(old.requests), len(new.requests)) == (7, 0)

            old.draining = True

            async def is_refused() -> bool:
                return (await acme.complete(model=names[0], max_tokens=2)).status == 503

            await until(is_refused)
            for name in (*names, f"{names[0]}*0.5+{names[1]}*0.5"):
                got = await acme.complete(model=name, max_tokens=2)
                assert (got.status, got.error["code"]) == (503, "base_unavailable"), got.body
                assert "base model" in got.error["message"]
            assert (await acme.complete(max_tokens=2)).status == 200, "the base model itself has an engine"

            # A probe on the new base binds the version to it, for its own tenant only.
            new.probe_status = 200

            async def is_verified() -> bool:
                return (await acme.post(PROBE.format(names[0]))).status == 200

            await until(is_verified)
            assert (await acme.complete(model=names[0], max_tokens=2)).status == 200
            for client, name in ((acme, names[1]), (acme, f"{names[0]}*0.5+{names[1]}*0.5"), (globex, names[0])):
                assert (await client.complete(model=name, max_tokens=2)).error["code"] == "base_unavailable"

            # An engine that reports no digest serves every version.
            new.base_digest = None
            new.instance = "two"

            async def is_served() -> bool:
                return (await acme.complete(model=names[1], max_tokens=2)).status == 200

            await until(is_served)
