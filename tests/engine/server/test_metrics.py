"""What Prometheus sees of an engine beyond what other tests look at."""

import aiohttp

from tests.engine.server.running import Client, RunningServer


async def test_adapters_that_cannot_be_loaded_are_counted(
    client: Client, session: aiohttp.ClientSession, server: RunningServer
):
    async def failures() -> float:
        async with session.get(f"{server.url}/metrics") as response:
            page = await response.text()
        [line] = [line for line in page.splitlines() if line.startswith("loraplex_engine_adapter_load_failures_total ")]
        return float(line.split()[1])

    before = await failures()
    status, _ = await client.post("/v1/completions", {"model": f"sha256:{'0' * 64}", "prompt": "Hi"})
    assert status == 404
    assert await failures() == before + 1
    await client.complete(prompt="Hi", max_tokens=1)
    assert await failures() == before + 1
