"""Pages of engines: every figure that an engine reports, in the table, in its file and on the engine's own page."""

import csv
import html
import io
import re
from typing import Any

import pytest

from gateway.fleet import history
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.history import EngineHistory
from testing.gateway.running import Gateway, until
from testing.gateway.upstream import Upstream

REPORTED = {
    "waiting": 7,
    "kv_blocks_total": 200,
    "kv_blocks_free": 150,
    "adapter_pages_total": 50,
    "adapter_pages_free": 20,
    "prefix_query_tokens": 1000,
    "prefix_hit_tokens": 400,
    "adapter_loads": 12,
    "adapter_evictions": 4,
    "preemptions": 2,
    "generated_tokens": 100,
}


def plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


@pytest.fixture
async def gateway(serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield a gateway that has two samples of the engine, 5 s apart: rates do not depend on the machine."""
    sample, seen = EngineHistory.sample, list[int]()

    def sample_once(self: EngineHistory, engine: EngineRecord, _: float) -> None:
        generated = engine.state.reported.get("generated_tokens")
        if generated is not None and generated not in seen:
            seen.append(generated)
            sample(self, engine, 5.0 * len(seen))

    monkeypatch.setattr(EngineHistory, "sample", sample_once)
    monkeypatch.setattr(history, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(history, "SAMPLE_SECONDS", 0.05)
    upstream.running, upstream.seats, upstream.version = 3, 8, "1.2"
    upstream.resident = [f"sha256:{'d' * 64}"]
    upstream.reported = {**REPORTED}

    async def is_sampled() -> bool:
        return len(seen) == number

    async with serve() as gateway:
        number = 1
        await until(is_sampled)
        upstream.reported = {**REPORTED, "generated_tokens": 1100}
        number = 2
        await until(is_sampled)
        yield gateway


async def test_every_figure_of_an_engine_is_shown(gateway: Gateway, upstream: Upstream):
    async with gateway.browser() as browser:
        page = (await browser.get("/admin/engines")).body.decode().split("<main")[1]
        file = (await browser.get("/admin/engines?format=csv")).body.decode()
        one = (await browser.get(f"/admin/engines/one?url={upstream.url}")).body.decode()
    [body] = re.findall(r'id="engines">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    heads = [plain(each) for each in re.findall(r'<th scope="col"[^>]*>(.*?)</th>', page, re.DOTALL)]
    cells = [plain(each) for each in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", body, re.DOTALL)]
    shown = dict(zip(heads, cells, strict=True))
    assert shown.pop("Engine") == f"{upstream.url} base · loraplex 1.2"
    assert re.fullmatch(r"up (now|\d+ \w+ ago)", shown.pop("State"))
    assert shown == {
        "Running": "3 / 8",
        "Queue": "7",
        "Tokens/s": "200",
        "KV cache": "25 %",
        "Prefix hits": "40 %",
        "Adapter pages": "60 %",
        "Adapters": "1",
        "Loads": "12 4 evicted",
        "Act": f"Drain {upstream.url}",
    }
    [row] = csv.DictReader(io.StringIO(file))
    assert row == {
        **{"url": upstream.url, "state": "up", "base": "base", "kind": "loraplex", "version": "1.2"},
        **{"running": "3", "waiting": "7", "slots": "8", "tokens": "200.0", "kv_used": "0.25", "hits": "0.4"},
        **{"pages_used": "0.6", "resident": "1", "loads": "12", "evictions": "4", "preemptions": "2"},
        **{"drained": "false", "died_at": ""},
    }
    tiles = re.findall(r'<div class="tile">(.*?)</div>', one, re.DOTALL)
    assert [plain(each).removesuffix(" –") for each in tiles] == [
        *("Running 3 of 8", "Queue 7 requests", "Tokens 200 per s", "KV cache 25 %", "Prefix hits 40 %"),
        *("Adapters 1 on the device", "Adapter pages 60 %", "Preemptions 2"),
    ]


async def test_the_health_history_is_sorted(gateway: Gateway, upstream: Upstream):
    upstream.healthy = False
    path = f"/admin/engines/one?url={upstream.url}"

    async def is_down() -> bool:
        return b"down" in (await browser.get(f"{path}&format=csv")).body

    async with gateway.browser() as browser:
        await until(is_down)
        for sort, states in (("", ["down", "up"]), ("at", ["up", "down"]), ("-state", ["up", "down"])):
            page = (await browser.get(f"{path}&sort={sort}")).body.decode()
            [body] = re.findall(r'id="health-history">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
            assert [each for each in re.findall(r"<td[^>]*>(\w+)</td>", body) if each in states] == states, sort
        assert (await browser.get(f"{path}&sort=size")).status == 400
