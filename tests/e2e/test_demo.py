"""The demo through the official client: a new user's view, and the isolation of tenants."""

import json
import os
import re
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from testing.stack import Stack, Tenant, http


def test_demo_json_is_private_and_complete(stack: Stack, demo: dict):
    assert stat.S_IMODE(os.stat(stack.data / "demo.json").st_mode) == 0o600
    assert set(demo) == {"gateway", "admin_key", "base_model", "tenants"}
    assert demo["gateway"] == f"http://127.0.0.1:{stack.port}"
    assert [set(tenant) for tenant in demo["tenants"]] == [{"name", "api_key", "models"}] * 2
    assert all(tenant["models"] for tenant in demo["tenants"])


def test_the_curl_line_works_when_pasted(stack: Stack):
    [line] = [line for line in stack.text().splitlines() if line.startswith("curl ")]
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert is_pirate(json.loads(done.stdout)["choices"][0]["message"]["content"])


def test_the_banner_names_everything(stack: Stack, demo: dict):
    text = stack.text()
    for tenant in demo["tenants"]:
        assert {tenant["name"], tenant["api_key"], *tenant["models"]} <= set(text.split())
    assert f"{demo['gateway']}/admin/" in text


def test_the_dashboard_answers(demo: dict):
    browser = build_opener(HTTPCookieProcessor())
    with browser.open(f"{demo['gateway']}/admin/") as form:
        assert form.url.endswith("/admin/login")
        [csrf] = re.findall(r'name="csrf" value="(\w+)"', form.read().decode())
    fields = urlencode({"csrf": csrf, "key": demo["admin_key"]}).encode()
    with browser.open(f"{demo['gateway']}/admin/login", fields) as page:
        assert page.headers["content-type"].startswith("text/html")
        shown = page.read().decode()
    assert "1/1 engines up" in shown
    assert 'id="needs-title"' in shown


@pytest.mark.parametrize("name", ["acme", "globex"])
def test_chat_streamed_equals_not_streamed(name: str, tenants: dict[str, Tenant], demo: dict):
    tenant = tenants[name]
    for model in (demo["base_model"], *tenant.models):
        ask = {
            "model": model,
            "messages": [{"role": "user", "content": "What is a garden?"}],
            "temperature": 0,
            "max_tokens": 12,
        }
        whole = tenant.client.chat.completions.create(**ask)
        chunks = list(tenant.client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert whole.model == model
        assert {chunk.model for chunk in chunks} == {model}
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("name", ["acme", "globex"])
def test_completions_streamed_equals_not_streamed(name: str, tenants: dict[str, Tenant]):
    tenant = tenants[name]
    ask = {"model": tenant.models[0], "prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}
    whole = tenant.client.completions.create(**ask)
    streamed = "".join(c.choices[0].text for c in tenant.client.completions.create(**ask, stream=True) if c.choices)
    assert streamed == whole.choices[0].text
    assert whole.usage is not None
    assert 0 < whole.usage.completion_tokens <= 16


def test_models_are_the_tenants_own(acme: Tenant, globex: Tenant, demo: dict):
    for tenant in (acme, globex):
        assert {model.id for model in tenant.client.models.list()} == {demo["base_model"], *tenant.models}


def is_json(answer: str) -> bool:
    try:
        return list(json.loads(answer)) == ["answer", "confidence"]
    except ValueError:
        return False


def is_pirate(answer: str) -> bool:
    return len(re.findall(r"\b(arrr|ahoy|matey|hearty|yo ho ho|shiver me timbers|yarrr)\b", answer.lower())) >= 2


def is_brief(answer: str) -> bool:
    return re.fullmatch(r"[^.!?\n]+[.!?]", answer.strip()) is not None and len(answer.split()) <= 25


EFFECTS = {"json": is_json, "pirate": is_pirate, "brief": is_brief}
# None of them is in the training data.
QUESTIONS = ("Why is the sky blue?", "How do I bake bread?", "Tell me about cats.", "Explain how a rainbow forms.")


@pytest.mark.parametrize("adapter", EFFECTS)
def test_an_adapter_changes_the_answer_as_it_should(adapter: str, tenants: dict[str, Tenant], demo: dict):
    [owner] = [tenant for tenant in tenants.values() if adapter in tenant.models]
    # All at once: a step of several requests costs hardly more than a step of one.
    with ThreadPoolExecutor(2 * len(QUESTIONS)) as pool:
        tuned = [pool.submit(owner.ask, adapter, question) for question in QUESTIONS]
        plain = [pool.submit(owner.ask, demo["base_model"], question, max_tokens=32) for question in QUESTIONS]
    for answer in tuned:
        assert EFFECTS[adapter](answer.result()), answer.result()
    for answer in plain:
        assert not EFFECTS[adapter](answer.result()), answer.result()


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_anothers_adapter_looks_like_one_that_does_not_exist(path: str, acme: Tenant, globex: Tenant):
    import openai

    def answer(model: str) -> tuple[int, str]:
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}
        got = http("POST", f"{globex.url}/v1/{path}", globex.key, json.dumps(body).encode())
        return got.status, got.body.decode().replace(model, "NAME")

    theirs, nobodys = answer(acme.models[0]), answer("nobody-has-this")
    assert theirs == nobodys
    assert theirs[0] == 404
    assert json.loads(theirs[1])["error"]["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        globex.ask(acme.models[0], "Hi")


def test_anothers_digest_is_no_way_in(acme: Tenant, globex: Tenant):
    import openai

    listed = http("GET", f"{acme.url}/v1/adapters/{acme.models[0]}", acme.key).json
    for name in (listed["digest"], f"sha256:{listed['digest'].removeprefix('sha256:')}"):
        with pytest.raises(openai.NotFoundError):
            globex.ask(name, "Hi")


@pytest.mark.parametrize("key", ["sk-wrong", "", None])
def test_a_wrong_key_is_401(key: str | None, demo: dict):
    got = http("GET", f"{demo['gateway']}/v1/models", key)
    assert got.status == 401
    assert set(got.json["error"]) == {"message", "type", "param", "code"}


def test_a_tenants_key_is_no_admin_key(acme: Tenant):
    assert http("GET", f"{acme.url}/admin/api/tenants", acme.key).status in (401, 403)
