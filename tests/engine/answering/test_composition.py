"""Mixtures and activated LoRAs over HTTP, against peft: `add_weighted_adapter("cat")`, and its aLoRA."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from engine.answering.activation import adapter_start
from engine.scheduling.request import NEVER
from testing.engine import Client, RunningServer
from testing.peft_twin import PeftTwin

pytestmark = pytest.mark.heavy
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CALL = [40, 41, 42]
ADAPTERS: dict[str, dict[str, Any]] = {
    "x": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "y": {"r": 3, "lora_alpha": 5, "target_modules": ["up_proj", "down_proj", "q_proj"], "use_rslora": True},
    "z": {"r": 6, "lora_alpha": 3, "target_modules": ALL, "rank_pattern": {"q_proj": 9}},
    "w": {"r": 12, "lora_alpha": 12, "target_modules": ["q_proj"]},
    "called": {"r": 8, "lora_alpha": 8, "target_modules": ALL, "alora_invocation_tokens": CALL},
    "called-2": {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "lm_head"], "alora_invocation_tokens": CALL},
}
MIXTURES = {
    "x*0.7+y*0.3": ("xy", [0.7, 0.3]),
    "z*-1.5+x*2": ("zx", [-1.5, 2.0]),
    "z*1e-1+y*-.4+x*0": ("zyx", [0.1, -0.4, 0.0]),
}
INTERNAL = {"x-loraplex-internal-token": "secret"}
PROMPT = [(7 * i) % 200 + 50 for i in range(45)]
# A second occurrence, which counts, in the middle of a block of 16; and an incomplete one behind it.
INVOKED = [*PROMPT[:10], *CALL, *PROMPT[:25], *CALL, 60, 61, 40, 41]


@pytest.fixture(scope="module")
def twin(model: Path, tmp_path_factory: pytest.TempPathFactory) -> PeftTwin:
    twin = PeftTwin(model, tmp_path_factory.mktemp("adapters"), ADAPTERS)
    for name, (parts, weights) in MIXTURES.items():
        twin.model.add_weighted_adapter(list(parts), weights, name.replace(".", "_"), combination_type="cat")
    return twin


@pytest.fixture(scope="module")
def server(model: Path, twin: PeftTwin):
    # Room for two or three adapters, so that the tests evict and reload.
    running = RunningServer(model, config={"adapter_memory": 600_000, "max_num_seqs": 8}, internal_token="secret")
    yield running
    running.close()


@pytest.fixture(autouse=True)
async def loaded(client: Client, twin: PeftTwin) -> dict[str, str]:
    for name, path in twin.paths.items():
        async with client.session.post(
            f"{client.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}, headers=INTERNAL
        ) as response:
            assert response.status == 200, await response.text()
    _, listed = await client.get("/v1/models", headers=INTERNAL)
    return {entry["id"]: entry["root"] for entry in listed["data"]}


async def ask(client: Client, model: str, prompt: list[int], tenant_id: str = "t", **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **fields}
    body |= {"return_token_ids": True}
    headers = {**INTERNAL, "x-loraplex-tenant": tenant_id}
    async with client.session.post(f"{client.url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
    choice = answer["choices"][0]
    return {
        "tokens": choice["token_ids"],
        "cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
        "receipt": answer["loraplex"]["adapter_digest"],
        "prompt": choice.get("prompt_logprobs"),
    }


def prompt_logprobs(answer: dict[str, Any], prompt: list[int]) -> list[float]:
    return [entry[str(t)]["logprob"] for entry, t in zip(answer["prompt"][1:], prompt[1:], strict=True)]


async def test_mixtures_equal_peft_beside_their_parts(
    client: Client, server: RunningServer, twin: PeftTwin, loaded: dict[str, str]
):
    """Requests for mixtures, parts and the base model share batches, and evict each other's pages."""
    models = [*MIXTURES, *"xyz", "tiny"]
    for _ in range(2):
        answers = await asyncio.gather(*(ask(client, model, PROMPT, prompt_logprobs=0) for model in models))
        for model, answer in zip(models, answers, strict=True):
            name = None if model == "tiny" else model.replace(".", "_")
            assert prompt_logprobs(answer, PROMPT) == pytest.approx(twin.logprobs(name, PROMPT), abs=2e-4), model
    receipts = [answer["receipt"] for answer in answers]
    assert len(set(receipts)) == len(models), "a mixture's receipt is its own digest"
    by_digest = "+".join(f"{loaded[name]}*{weight}" for name, weight in (("y", ".3"), ("x", "0.70")))
    assert (await ask(client, by_digest, PROMPT))["receipt"] == receipts[0], "the same parts and weights"
    held = server.core.host_cache._mixtures
    deadline = time.monotonic() + 30
    while (held._used, held._held) != ({}, {}):
        assert time.monotonic() < deadline, "host memory is free once no request uses a mixture"
        await asyncio.sleep(0.02)


async def test_blocks_of_one_weighting_are_not_anothers(client: Client):
    first = await ask(client, "x*0.7+z*0.3", PROMPT)
    assert (await ask(client, "z*0.30+x*0.7", PROMPT))["cached"] == 32
    other = await ask(client, "x*-0.7+z*0.3", PROMPT)
    assert other["cached"] == 0
    assert other["tokens"] != first["tokens"]
    assert (await ask(client, "x*0.7+z*0.3", PROMPT))["tokens"] == first["tokens"]


@pytest.mark.parametrize(
    ("asked", "status", "message"),
    [
        ("x*0.5+missing*0.5", 404, "'missing' does not exist"),
        ("x*0.5+tiny*0.5", 400, "got the base model 'tiny'"),
        ("x*0.5+y*much", 400, "in the term 'y*much'"),
        ("z*1+w*0.1", 400, "the ranks of its adapters add up to 21, the limit is 16"),
        ("x*1+called*1", 400, "is an activated LoRA, which cannot be a part"),
    ],
)
async def test_a_mixture_that_cannot_be_made_is_refused(client: Client, asked: str, status: int, message: str):
    found, answer = await client.post(
        "/v1/completions", {"model": asked, "prompt": PROMPT, "max_tokens": 1}, headers=INTERNAL
    )
    assert (found, answer["error"]["param"]) == (status, "model")
    assert message in answer["error"]["message"]


async def test_an_activated_lora_equals_peft(client: Client, twin: PeftTwin):
    prompts = {"invoked": INVOKED, "at the end": [*PROMPT, *CALL], "at once": [*CALL, *PROMPT], "never": PROMPT}
    assert [adapter_start(p, CALL) for p in prompts.values()] == [38, 45, 0, NEVER]
    jobs = [(name, prompt) for name in ("called", "called-2") for prompt in prompts.values()]
    for _ in range(2):  # the second time from cached blocks
        answers = await asyncio.gather(*(ask(client, name, prompt) for name, prompt in jobs))
        for (name, prompt), answer in zip(jobs, answers, strict=True):
            assert answer["tokens"] == twin.generate(name, prompt, 6), (name, len(prompt))
    answers = await asyncio.gather(*(ask(client, name, prompt, prompt_logprobs=0) for name, prompt in jobs))
    for (name, prompt), answer in zip(jobs, answers, strict=True):
        assert prompt_logprobs(answer, prompt) == pytest.approx(twin.logprobs(name, prompt), abs=2e-4), name
    assert (await ask(client, "called", PROMPT))["tokens"] == (await ask(client, "tiny", PROMPT))["tokens"]


async def test_blocks_before_the_invocation_are_the_base_models_of_one_tenant(client: Client, twin: PeftTwin):
    for tenant_id, first in (("one", 0), ("other", 0)):
        assert (await ask(client, "tiny", INVOKED, tenant_id))["cached"] == first, "no other tenant's blocks"
        for name in ("called", "called-2"):
            answer = await ask(client, name, INVOKED, tenant_id)
            assert answer["cached"] == 32, "the base model's blocks before token 38"
            assert answer["tokens"] == twin.generate(name, INVOKED, 6)
            # The adapter's own block, from token 32 on, is found as well when the same prompt returns.
            longer = [*INVOKED, *range(70, 80)]
            await ask(client, name, longer, tenant_id)
            assert (await ask(client, name, longer, tenant_id))["cached"] == 48
    # An earlier occurrence is a base row once a later one invokes: blocks of the shorter prompt do not fit.
    short = [*PROMPT[:20], *CALL, *PROMPT[:25]]
    await ask(client, "called", short, "third")
    answer = await ask(client, "called", [*short, *CALL, 60], "third")
    assert answer["cached"] == 16
    assert answer["tokens"] == twin.generate("called", [*short, *CALL, 60], 6)
