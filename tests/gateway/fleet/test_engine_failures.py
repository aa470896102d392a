"""Real engines whose steps fail: the request that is the cause fails two engines, and no more."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from testing.engine import RunningServer
from testing.gateway.running import running, settings
from testing.gateway.upstream import TOKEN
from testing.tiny import save_model

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
