"""Versions that the operator pinned, on their engines."""

import asyncio
from pathlib import Path

import pytest

from testing.gateway.running import running_alone, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push


async def test_a_pinned_version_is_kept_by_one_engine_and_the_next_when_that_leaves(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.fleet.routing.pinning.SECONDS", 0.1)
    async with Upstream().serving() as one, Upstream().serving() as two:
        of = settings(tmp_path, model_dir, [one.url, two.url], redis_url, redis_timeout=30.0)
        async with running_alone(of) as gateway:
            acme = await gateway.tenant("acme")
            pushed = await push(acme, "pirate", files(0))
            version = "/adapters/pirate/versions/1"
            # Only an operator pins.
            refused = await acme.call("PATCH", f"/v1{version}", json={"pinned": True})
            assert refused.status == 403
            assert not one.pins + two.pins
            path = f"/admin/api/tenants/acme{version}"
            assert (await gateway.admin.call("PATCH", path, json={"pinned": True})).status == 200

            async def pinned() -> bool:
                return bool(one.pins or two.pins)

            await until(pinned)
            home, other = (one, two) if one.pins else (two, one)
            assert home.pins[-1] == [pushed.json["digest"]]
            assert not other.pins
            # A request goes where the adapter is.
            assert (await acme.complete(model="pirate", max_tokens=2)).status == 200
            assert len(home.requests) == 1
            home.draining = True

            async def moved() -> bool:
                return bool(other.pins)

            await until(moved)
            assert (await gateway.admin.call("PATCH", path, json={"pinned": False})).status == 200
            await until(lambda: ended(other))


async def test_a_pinned_version_is_kept_by_engines_of_its_base_model_only(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.fleet.routing.pinning.SECONDS", 0.05)
    old, new = Upstream(), Upstream()
    old.base_digest, new.base_digest = "a" * 64, "b" * 64
    # Versions are bound to the base of the engine that probes them.
    old.probe_status = 200
    async with old.serving(), new.serving():
        of = settings(tmp_path, model_dir, [old.url, new.url], redis_url, redis_timeout=30.0, adapter_probe="required")
        async with running_alone(of) as gateway:
            acme = await gateway.tenant("acme")
            pushed = [(await push(acme, f"bound-{seed}", files(seed))).json["digest"] for seed in range(6)]
            for seed in range(6):
                path = f"/admin/api/tenants/acme/adapters/bound-{seed}/versions/1"
                assert (await gateway.admin.call("PATCH", path, json={"pinned": True})).status == 200

            async def all_are_kept() -> bool:
                return bool(old.pins) and sorted(old.pins[-1]) == sorted(pushed)

            # About half of the adapters prefer the new engine.
            await until(all_are_kept)
            assert not new.pins
            # Without an engine of their base, no engine keeps them.
            old.draining = True
            await until(lambda: ended(old))
            assert not new.pins


async def ended(engine: Upstream) -> bool:
    """Return whether no pins have come for a while."""
    engine.pins.clear()
    await asyncio.sleep(0.4)
    return not engine.pins
