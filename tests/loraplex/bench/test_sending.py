"""A single request against hostile servers."""

import aiohttp
import pytest
from aiohttp import web

from loraplex.bench.load import PlannedRequest, Target
from loraplex.bench.sending import Sample, Sender
from testing.serving import serving

pytestmark = pytest.mark.usefixtures("starts_servers")

# A colour, a window's title, an erased line, and a reversal of the writing direction.
HOSTILE = "\x1b[31mred \x1b]0;title\x07\x9b2K \u202eabc\nlpx_secret"


@pytest.mark.parametrize("form", ["refusal", "event", "no JSON"])
async def test_no_control_characters_of_a_server_are_in_a_failure(form):
    async def complete(request: web.Request) -> web.Response:
        if form == "refusal":
            return web.Response(status=500, text=HOSTILE)
        event = b'{"error": "\\u001b[31mred \\u202eabc lpx_secret"}' if form == "event" else HOSTILE.encode()
        return web.Response(body=b"data: " + event.replace(b"\n", b"\ndata: ") + b"\n\n")

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    sample = Sample(PlannedRequest("all", 0, None, Target("acme", "lpx_secret", "m"), 1, 1), 0.0)
    async with serving(app) as url, aiohttp.ClientSession() as session:
        await Sender(session, url, "completions", ignore_eos=True, timeout=60).send(sample, "word", {})
    assert sample.error is not None
    assert sample.error.kind == {"refusal": "http 500", "event": "stream", "no JSON": "protocol"}[form]
    assert (sample.error.kind + sample.error.text).isprintable()
    assert "lpx_secret" not in sample.error.text
    if form != "no JSON":
        assert r"\x1b[31mred " in sample.error.text
        assert r"\u202eabc" in sample.error.text
