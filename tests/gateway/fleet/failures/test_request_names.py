"""Names of requests in the quarantine: one for a request, computed once, whatever the gateway changes in its body."""

import hmac
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.fleet.engines.own_requests import NamedBody
from gateway.fleet.failures.deaths import ONE_DEATH_SECONDS
from gateway.fleet.failures.quarantine import Quarantine, Quarantined
from testing.gateway.running import running, settings
from testing.gateway.upstream import Upstream
from tests.gateway.fleet.failures.test_quarantine import BODY, SECRET, Clock, die, engine


async def test_a_requests_names_are_computed_once(monkeypatch: pytest.MonkeyPatch):
    """A body of 8 MiB was hashed again before each engine, and at each death."""
    quarantine, body, hashed = Quarantine(100.0, SECRET, clock=(clock := Clock())), NamedBody(BODY), list[bytes]()
    for _ in range(2):
        die(quarantine, clock, engine(a=1), digests=["d"])

    def new(key: bytes, message: bytes, name: str) -> hmac.HMAC:
        hashed.append(message)
        return hmac.new(key, message, name)

    monkeypatch.setattr("gateway.fleet.failures.request_names.hmac", SimpleNamespace(new=new))
    for _ in range(2):
        with pytest.raises(Quarantined):
            await quarantine.check("a", ["d"], body)
    clock.now += ONE_DEATH_SECONDS
    quarantine.died(engine(a=1), "a", quarantine.suspects("a", ["d"], body))
    assert quarantine.suspects("a", ["d"], body).result() == body.suspects
    assert len(hashed) == 1


async def test_a_request_keeps_its_name_whatever_its_quota_leaves_of_it(
    tmp_path: Path, model_dir: Path, redis_url: str
):
    """Shortened in another way, it had another name and got further engines."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Upstream().serving()) for _ in range(3)]
        of = settings(tmp_path, model_dir, [each.url for each in engines], redis_url, redis_timeout=30.0)
        gateway = await stack.enter_async_context(running(of))
        acme = await gateway.tenant("acme", max_concurrent_tokens=20, on_token_limit="shorten")
        for each in engines:
            each.refuses = None
        assert (await acme.complete(max_tokens=30)).status == 502
        for each in engines:
            each.refuses = False
        limit = {"max_concurrent_tokens": 24}
        assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json=limit)).status == 200
        assert (await acme.complete(max_tokens=30)).error["code"] == "request_quarantined"
        [sent] = {body["max_tokens"] for each in engines for _, body in each.requests}
        assert sent < 20
        assert sum(len(each.requests) for each in engines) == 2
