"""Refusals of new structured output forms by the gateway, while the engines compile none for the tenant."""

import json
from typing import Any

import pytest

from gateway.api.requests import structured_output_forms as forms
from gateway.api.requests.structured_output_forms import MAX_KNOWN, MAX_TENANTS, Forms, form_of
from testing.gateway.running import Gateway
from testing.gateway.upstream import Upstream


def regex(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": text}}


@pytest.fixture
def rare_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no new form pass during a test's refusal."""
    monkeypatch.setattr(forms, "PROBE_SECONDS", 60.0)


async def test_after_a_refusal_new_forms_do_not_reach_the_engine(
    gateway: Gateway, upstream: Upstream, rare_probes: None
):
    acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
    assert (await acme.complete(**regex("known"))).status == 200
    upstream.compiles = False
    through_engine = await acme.complete(**regex("new"))
    sent = len(upstream.requests)
    for stream in (False, True):
        got = await acme.complete(**regex("another"), stream=stream)
        assert (got.status, got.error["code"], got.error["type"]) == (429, "engine_share_used", "concurrency")
        assert got.headers["Retry-After"] == through_engine.headers["Retry-After"] == "7"
    assert len(upstream.requests) == sent
    # Compiled forms, requests without a form and other tenants are served.
    assert (await acme.complete(**regex("known"))).status == 200
    assert (await acme.complete(response_format={"type": "text"})).status == 200
    assert (await acme.complete()).status == 200
    upstream.compiles = True
    assert (await other.complete(**regex("new"))).status == 200


async def test_a_new_form_that_an_engine_serves_ends_the_refusals(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(forms, "PROBE_SECONDS", 0.0)
    acme = await gateway.tenant("acme")
    upstream.compiles = False
    assert (await acme.complete(**regex("a"))).status == 429
    upstream.compiles = True
    monkeypatch.setattr(forms, "PROBE_SECONDS", 60.0)
    assert [(await acme.complete(**regex(text))).status for text in "abc"] == [200, 200, 200]


async def test_only_one_new_form_at_a_time_passes_during_a_refusal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forms, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(forms, "ANSWER_SECONDS", 60.0)
    tenants, share = Forms(), None
    tenants.refused("acme", b"a", 7)

    async def passes(text: str) -> bool:
        try:
            await tenants.read("acme", json.dumps(regex(text)).encode(), share)  # type: ignore[arg-type]
        except forms.EngineShareUsed:
            return False
        return True

    assert [await passes(text) for text in "bcd"] == [True, False, False]


async def test_a_form_that_is_no_longer_compiled_is_new_again(gateway: Gateway, upstream: Upstream, rare_probes: None):
    acme = await gateway.tenant("acme")
    assert (await acme.complete(**regex("known"))).status == 200
    upstream.compiles = False
    upstream.compiled.clear()
    assert [(await acme.complete(**regex("known"))).status for _ in range(3)] == [429, 429, 429]
    assert len(upstream.requests) == 2


@pytest.mark.parametrize(
    ("body", "has_form"),
    [
        (b'{"prompt": "a"}', False),
        (b'{"guided_json": null, "structured_outputs": null, "response_format": null}', False),
        (b'{"response_format": {"type": "text"}}', False),
        (b'{"response_format": {"type": "json_object"}}', True),
        (b'{"guided_regex": "a"}', True),
        # JSON allows escapes in names.
        (b'{"\\u0067uided_regex": "a"}', True),
        (b'{"tools": [{}]}', False),
        (b'{"tools": [{}], "tool_choice": "auto"}', False),
        (b'{"tools": [{}], "tool_choice": "required"}', True),
        (b'{"guided_regex": "a"', False),
        (b"[1]", False),
        (b'{"response_format": 5}', False),
        (b'{"response_format": {"type": "\xff"}}', False),
    ],
)
def test_the_form_of_a_body(body: bytes, has_form: bool):
    assert (form_of(body) is not None) == has_form


def test_a_form_is_independent_of_the_prompt_and_of_spaces_between_fields():
    one = form_of(b'{"prompt": "a", "guided_regex": "x"}')
    assert one == form_of(b'{"guided_regex":"x","prompt":"b"}')
    assert one != form_of(b'{"guided_regex":"y","prompt":"b"}')
    assert one != form_of(b'{"guided_json":"x","prompt":"b"}')


def test_forms_and_tenants_are_bounded():
    tenants = Forms()
    for i in range(MAX_TENANTS + 10):
        tenants.served(f"{i}", b"a")
    for i in range(MAX_KNOWN + 10):
        tenants.served("acme", b"%d" % i)
    assert len(tenants._tenants) == MAX_TENANTS
    assert len(tenants._tenants["acme"].known) == MAX_KNOWN
