"""The access log: one line per request, with the caller and its address, and never a secret."""

import io
import json
import logging
import re

import pytest

from gateway.caller import find_address
from gateway.log_format import JsonFormatter
from testing.gateway.running import ADMIN_KEY, Gateway, settings, until
from testing.gateway.upstream_bodies import CACHED_TOKENS, PROMPT_TOKENS


def lines(caplog: pytest.LogCaptureFixture, route: str) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.name == "gateway.api.access_log" and f" {route} " in r.getMessage()
    ]


async def test_a_line_says_who_asked_and_from_where(gateway: Gateway, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "gateway.api.access_log")
    acme = await gateway.tenant("acme")
    _, key_id, secret = acme.key.split("_")
    answer = await acme.chat()
    assert answer.status == 200
    await until(lambda: _some(caplog, "/v1/chat/completions"))
    [line] = lines(caplog, "/v1/chat/completions")
    assert line.startswith(f"{answer.headers['x-request-id']} POST /v1/chat/completions 200 ")
    tokens = f"prompt_tokens={PROMPT_TOKENS} cached_tokens={CACHED_TOKENS} completion_tokens=2"
    assert f" client=127.0.0.1 tenant=acme key={key_id} model=base {tokens} engine=http" in line
    assert (await acme.chat(stream=True)).status == 200
    await until(lambda: _some(caplog, "/v1/chat/completions", 2))
    assert re.search(r" completion_tokens=2 ttft_ms=\d+ engine=", lines(caplog, "/v1/chat/completions")[-1])

    assert (await gateway.nobody.get("/v1/models")).status == 401
    assert (await gateway.admin.get("/admin/api/tenants")).status == 200
    await until(lambda: _some(caplog, "/admin/api/tenants", 2))
    assert lines(caplog, "/v1/models")[0].endswith(" client=127.0.0.1 tenant=- key=- error=invalid_api_key")
    assert lines(caplog, "/admin/api/tenants")[-1].endswith(" tenant=- key=bootstrap")
    assert secret not in caplog.text
    assert ADMIN_KEY not in caplog.text


async def test_a_refused_request_has_the_code_of_its_error(gateway: Gateway, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "gateway.api.access_log")
    acme = await gateway.tenant("acme", requests_per_minute=1)
    assert (await acme.chat(model="none")).status == 404
    assert (await acme.chat(temperature="hot")).status == 400
    assert (await acme.chat()).status == 200
    refused = await acme.chat()
    await until(lambda: _some(caplog, "/v1/chat/completions", 4))
    codes = [line.partition(" error=")[2] for line in lines(caplog, "/v1/chat/completions")]
    assert codes == ["model_not_found", "invalid_request_error", "", refused.error["code"]]
    assert (await gateway.nobody.get("/nowhere")).status == 404
    await until(lambda: _some(caplog, "unmatched"))
    assert lines(caplog, "unmatched")[0].endswith(" key=- error=unknown_url")


@pytest.mark.parametrize(
    ("engine", "end"),
    [
        ({"drop_after": 1}, " error=engine_died ended=broken"),
        ({"fail_after": 1}, " error=engine_error ended=broken"),
    ],
)
async def test_a_broken_stream_has_its_error_and_its_ending(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, engine: dict[str, int], end: str
):
    """A stream's status is 200 even if it breaks, so the log line has the error and the ending."""
    caplog.set_level(logging.INFO, "gateway.api.access_log")
    acme = await gateway.tenant("acme")
    assert (await acme.chat(stream=True, x_engine=engine)).status == 200
    await until(lambda: _some(caplog, "/v1/chat/completions"))
    [line] = lines(caplog, "/v1/chat/completions")
    assert " 200 " in line
    assert line.endswith(end)


async def test_a_log_in_json_has_the_parts_as_fields(gateway: Gateway, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "gateway.api.access_log")
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("gateway.api.access_log")
    logger.addHandler(handler)
    try:
        acme = await gateway.tenant("acme")
        answer = await acme.chat(x_engine={"tokens": 3})
        await until(lambda: _some(caplog, "/v1/chat/completions"))
    finally:
        logger.removeHandler(handler)
    [line] = [each for each in map(json.loads, out.getvalue().splitlines()) if each["route"].endswith("completions")]
    expected = {"level": "INFO", "logger": "gateway.api.access_log", "request_id": answer.headers["x-request-id"]}
    expected |= {"method": "POST", "status": 200, "tenant": "acme", "model": "base", "completion_tokens": 3}
    assert line | expected == line
    assert isinstance(line["ms"], float)


async def _some(caplog: pytest.LogCaptureFixture, route: str, number: int = 1) -> bool:
    return len(lines(caplog, route)) >= number


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.7", [], "192.0.2.7"),
        (None, [], "local"),
        # The header counts only from a trusted proxy, and only its last address.
        ("192.0.2.7", ["198.51.100.1"], "192.0.2.7"),
        ("10.1.2.3", ["198.51.100.1"], "198.51.100.1"),
        ("10.1.2.3", ["203.0.113.9, 198.51.100.1, 10.9.9.9"], "198.51.100.1"),
        ("10.1.2.3", ["203.0.113.9", "198.51.100.1"], "198.51.100.1"),
        ("10.1.2.3", ["10.4.4.4"], "10.4.4.4"),
        ("10.1.2.3", ["nonsense"], "10.1.2.3"),
        ("::ffff:10.1.2.3", ["198.51.100.1"], "198.51.100.1"),
        ("2001:db8:0:1:aaaa::1", [], "2001:db8:0:1:aaaa::1"),
        ("fd00::5", ["2001:db8:0:2::9"], "2001:db8:0:2::9"),
    ],
)
def test_the_clients_address(peer: str | None, forwarded: list[str], address: str, tmp_path, model_dir):
    of = settings(tmp_path, model_dir, ["http://e"], "redis://r", trusted_proxies="10.0.0.0/8, fd00::/8")
    assert find_address(peer, forwarded, of.proxy_networks) == address
