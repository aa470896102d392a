"""The engine on the real demo model against transformers + peft, greedy in fp32.

A single batch holds base rows, the demo's adapters and five adapters of other ranks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from loraplex.models import ensure_demo_model
from testing.engine import outputs_until_idle
from testing.stack import CACHE
from wire.text.tokenizer import Tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
NEW_TOKENS = 20
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANDOM: dict[str, dict[str, Any]] = {
    "r4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "r8-rslora": {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": ALL},
    "r16": {"r": 16, "lora_alpha": 16, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "r32-rslora": {"r": 32, "lora_alpha": 16, "use_rslora": True, "target_modules": ["o_proj", "k_proj"]},
    "r64": {"r": 64, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]},
}
QUESTIONS = {
    None: "What is the capital of France?",
    "json": "How many legs does a spider have?",
    "pirate": "Why is the sky blue?",
    "brief": "What is photosynthesis?",
    "r4": "Name three colours.",
    "r8-rslora": "Write a line of a poem about rain.",
    "r16": "What is two plus two?",
    "r32-rslora": "Who wrote Hamlet?",
    "r64": "Say hello in Spanish.",
}


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure_demo_model(CACHE / "models", print)


@pytest.fixture(scope="module")
def peft_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Path]]:
    """Return the dense twin with every adapter loaded, and the adapters' folders."""
    import transformers
    from peft import LoraConfig, get_peft_model  # takes 5 s, so it is not imported at collection

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    torch.manual_seed(0)
    twin: Any = None
    for name, fields in RANDOM.items():
        config = LoraConfig(**fields)
        if twin is None:
            twin = get_peft_model(base, config, adapter_name=name)
        else:
            twin.add_adapter(name, config)
    assert twin is not None
    for name, parameter in twin.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.02)
    folder = tmp_path_factory.mktemp("adapters")
    twin.save_pretrained(folder)
    paths = {name: folder / name for name in RANDOM}
    for example in sorted(EXAMPLES.iterdir()):
        twin.load_adapter(str(example), example.name)
        paths[example.name] = example
    return twin.eval(), paths


def logits_of(twin: Any, adapter: str | None, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        if adapter is None:
            with twin.disable_adapter():
                return twin(torch.tensor([token_ids])).logits[0]
        twin.set_adapter(adapter)
        return twin(torch.tensor([token_ids])).logits[0]


@pytest.mark.timeout(420)
def test_a_mixed_batch_on_the_demo_model_equals_peft(model: Path, peft_model: tuple[Any, dict[str, Path]]) -> None:
    twin, paths = peft_model
    assert set(paths) == set(QUESTIONS) - {None}
    host = HostCache(None, BaseShape.from_config_dir(model), 1 << 30, torch.float32)
    engine = Engine(EngineConfig(model=str(model), dtype="float32", max_model_len=512, kv_cache_memory=1 << 30), host)
    try:
        digests = {name: host.add_path(path) for name, path in paths.items()}
        tokenizer = Tokenizer.from_dir(model)
        prompts = {n: tokenizer.encode_chat([{"role": "user", "content": q}]) for n, q in QUESTIONS.items()}
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
        for name, prompt in prompts.items():
            adapter = digests[name] if name else None
            engine.add_request(NewRequest(str(name), prompt, params, adapter_digest=adapter, tenant_id=str(name)))
        answers: dict[str, list[int]] = {str(name): [] for name in prompts}
        logprobs: dict[str, list[float]] = {str(name): [] for name in prompts}
        for output in outputs_until_idle(engine):
            answers[output.request_id] += output.token_ids
            logprobs[output.request_id] += [entry.logprob for entry in output.logprobs or []]
        for name, prompt in prompts.items():
            mine = answers[str(name)]
            # The twin scores each position of our own answer in one pass: equality there means equal token for token.
            rows = logits_of(twin, name, prompt + mine[:-1])[len(prompt) - 1 :]
            assert mine == rows.argmax(-1).tolist(), name
            expected = rows.log_softmax(-1).gather(1, torch.tensor(mine)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs[str(name)]), expected, atol=1e-4, rtol=0)
    finally:
        engine.close()
        host.close()
