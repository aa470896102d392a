"""Activated LoRA: a request goes to the engine that has the base model's blocks of its conversation."""

from pathlib import Path

from testing.gateway.running import BASE_MODEL, Gateway, running, save_model, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push

CONTEXT = 1024


async def resident(gateway: Gateway) -> bool:
    listed = (await gateway.admin.get("/admin/api/engines")).json["data"]
    return any(engine["resident"] for engine in listed)


async def test_an_activated_turn_follows_the_base_turn(tmp_path: Path, redis_url: str):
    async with Upstream().serving() as one, Upstream().serving() as two:
        of = settings(
            tmp_path, save_model(tmp_path / "model", CONTEXT), [one.url, two.url], redis_url, redis_timeout=30.0
        )
        async with running(of) as gateway:
            acme = await gateway.tenant("acme")
            pushed = await push(acme, "judge", files(0))
            digest = pushed.json["digest"].removeprefix("sha256:")
            # The first engine holds the adapter.
            one.resident = one.activated = [digest]
            await until(lambda: resident(gateway))
            # The engines' order for a conversation follows from their ports, so a few may all go to one engine.
            for number in range(60):
                context = f"conversation {number} " + "x" * 400
                assert (await acme.complete(model=BASE_MODEL, prompt=context, max_tokens=2)).status == 200
                by = one if context == (one.requests or [({}, {"prompt": ""})])[-1][1]["prompt"] else two
                assert (await acme.complete(model="judge", prompt=context, max_tokens=2)).status == 200
                assert by.requests[-1][1]["model"] == f"sha256:{digest}"
                assert by.requests[-1][1]["prompt"] == context
                if number >= 5 and one.requests and two.requests:
                    break
            assert one.requests
            assert two.requests
            # A short prompt is computed again sooner than the adapter is loaded.
            before = len(two.requests)
            for number in range(6):
                assert (await acme.complete(model="judge", prompt=f"short {number}", max_tokens=2)).status == 200
            assert len(two.requests) == before
