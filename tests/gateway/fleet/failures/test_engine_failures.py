"""Real engines whose steps fail: the request that is the cause fails two engines, and no more."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from gateway.api.uploads import validating
from gateway.fleet.adapter_probes import AdapterProber, NotProbed
from testing.adapter_files import upload_form
from testing.engine import RunningServer
from testing.gateway.running import Client, Gateway, running, settings, until
from testing.gateway.upstream import TOKEN
from testing.tiny import save_adapter, save_model

CAUSE = 666


class Panic(BaseException):
    """A BaseException, like pyo3's PanicException."""


def failing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def fail(plan: Any) -> Any:
        if any(request.params.seed == CAUSE for request in plan):
            raise Panic("of Rust")
        return forward(plan)

    return fail


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_step_fails_is_quarantined_after_two_engines(
    stream: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, redis_url: str, starts_servers: None
):
    """The gateway took the engines' answers for refusals and asked every further engine."""
    model = tmp_path_factory.mktemp("model")
    save_model(model)
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(RunningServer(model, internal_token=TOKEN))) for _ in range(3)]
        for each in engines:
            runner = each.core.engine.runner
            runner.forward = failing(runner.forward)  # type: ignore[method-assign]
        of = settings(tmp_path, model, [each.url for each in engines], redis_url, base_model="tiny", redis_timeout=30.0)
        async with running(of) as gateway:
            acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
            body = {"model": "tiny", "prompt": "a", "max_tokens": 4, "stream": stream}
            got = await acme.complete(**body, seed=CAUSE)
            assert (got.status, got.error["code"]) == (502, "engine_error"), got.body
            assert sum(each.server._core is not None and each.server._core.failure is not None for each in engines) == 2
            got = await acme.complete(**body, seed=CAUSE)
            assert (got.status, got.error["code"]) == (422, "request_quarantined")
            assert (await acme.complete(**body)).status == 200
            assert (await other.complete(**body)).status == 200


def failing_beside_probes(
    forward: Callable[..., Any], begun: set[str], url: str, over: threading.Event
) -> Callable[..., Any]:
    """Return a slow step that fails if a probe is in it, from a step with the cause until `over`.

    begun: gets `url` with the cause. A probe may have a step to itself while the cause is in the engine.
    """

    def fail(plan: Any) -> Any:
        time.sleep(0.02)
        if any(request.params.seed == CAUSE for request in plan):
            begun.add(url)
        if url in begun and not over.is_set() and any(request.params.keep_logits for request in plan):
            raise Panic("of Rust")
        return forward(plan)

    return fail


async def test_a_tenant_that_fails_engines_during_probes_gets_no_adapter_of_another_refused(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    redis_url: str,
    starts_servers: None,
    monkeypatch: pytest.MonkeyPatch,
):
    """Two engines died during probes of the adapter, so it was refused."""
    monkeypatch.setattr(validating, "SEARCH_SECONDS", 0.1)
    monkeypatch.setattr(validating, "CLAIM_SECONDS", 0.1)
    unprobed = note_unprobed(monkeypatch)

    async def has_waited() -> bool:
        return any("each engine now has other tenants' requests" in reason for reason in unprobed)

    model, store = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("store")
    save_model(model)
    save_adapter(tmp_path / "adapter")
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(RunningServer(model, store, internal_token=TOKEN))) for _ in range(2)]
        begun, over = set[str](), threading.Event()
        for each in engines:
            runner = each.core.engine.runner
            runner.forward = failing_beside_probes(runner.forward, begun, each.url, over)  # type: ignore[method-assign]
        given = {"adapter_store": str(store), "base_model": "tiny", "redis_timeout": 30.0}
        of = settings(tmp_path, model, [each.url for each in engines], redis_url, **given)
        async with running(of) as gateway:
            acme, hostile = await gateway.tenant("acme"), await gateway.tenant("hostile")
            attack = [asyncio.create_task(keep_running(hostile, number)) for number in range(8)]

            async def are_begun() -> bool:
                return begun == {each.url for each in engines}

            await until(are_begun)
            pushed = await acme.call("POST", "/v1/adapters", data=upload_form(tmp_path / "adapter", "pirate"))
            assert (pushed.status, pushed.json["state"]) == (202, "validating")
            await until(lambda: has_faults(gateway))
            # The next attempts find an engine that has only the other tenant's requests.
            await until(has_waited)
            assert [each["state"] for each in await versions(acme)] == ["validating"]
            # The failed engine's last report may arrive after the probe's end and mark it as up until the next check.
            await gateway.engines_up(1)
            over.set()
            for each in attack:
                each.cancel()

            async def is_ready() -> bool:
                return [each["state"] for each in await versions(acme)] == ["ready"]

            await until(is_ready)


def note_unprobed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the reasons for which adapters were not probed, to which later ones are added."""
    reasons, probe = list[str](), AdapterProber.probe

    async def note(*given: Any) -> Any:
        try:
            return await probe(*given)
        except NotProbed as error:
            reasons.append(str(error))
            raise

    monkeypatch.setattr(AdapterProber, "probe", note)
    return reasons


async def keep_running(tenant: Client, number: int) -> None:
    await tenant.complete(model="tiny", prompt=f"{number}", max_tokens=3000, ignore_eos=True, stream=True, seed=CAUSE)


async def versions(client: Client) -> list[dict[str, Any]]:
    return (await client.get("/v1/adapters/pirate/versions")).json["data"]


async def has_faults(gateway: Gateway) -> bool:
    return bool(await gateway.engine_faults())
