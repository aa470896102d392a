"""Grammars in a whole engine: blocks run out, requests are preempted, and every text stays the same."""

import json
from pathlib import Path

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from engine.structured.compiler import GrammarCompiler
from testing.engine import outputs_until_idle
from testing.tiny import save_model
from tests.engine.structured.schemas import fits
from wire.structured import GrammarSpec
from wire.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 12, "maxItems": 12
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    return folder


def run(model: Path, num_blocks: int) -> tuple[list[str], int]:
    """Run six constrained and two free requests at once; return their texts and the number of preemptions."""
    host = HostCache(None, BaseShape.from_config_dir(model), 1 << 20, torch.float32)
    bytes_per_block = 2 * 2 * 2 * 16 * 4 * 16  # keys and values, layers, heads, head_dim, fp32, tokens
    config = EngineConfig(
        model=str(model), dtype="float32", device="cpu", max_model_len=160, max_lora_rank=8, adapter_memory=4 << 20,
        kv_cache_memory=num_blocks * bytes_per_block, max_num_batched_tokens=64, max_num_seqs=8,
    )  # fmt: skip
    engine = Engine(config, host)
    try:
        tokenizer = Tokenizer.from_dir(model)
        compiler = GrammarCompiler(tokenizer.to_json, engine.model_config.vocab_size, engine.eos_token_ids)
        grammar = compiler.compile(GrammarSpec("json", json.dumps(SCHEMA)))
        for i in range(8):
            params = SamplingParams(max_tokens=140, seed=i, grammar=grammar if i < 6 else None, ignore_eos=i >= 6)
            engine.add_request(NewRequest(str(i), [5, 6, 7, 8 + i], params))
        tokens: dict[str, list[int]] = {str(i): [] for i in range(8)}
        for output in outputs_until_idle(engine):
            tokens[output.request_id] += output.token_ids
            assert output.error is None
        assert engine.state().num_free_blocks == num_blocks
        return [tokenizer.decode(ids) for ids in tokens.values()], engine.state().num_preemptions
    finally:
        engine.close()
        host.close()


def test_preemption_changes_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are admitted while blocks are free, so that they preempt each other."""
    monkeypatch.setattr("engine.scheduling.block_demand.BlockDemand.peak", lambda self, sizes: 0)
    expected, never = run(model, 100)
    texts, often = run(model, 12)
    assert (never, often > 0) == (0, True)
    assert texts == expected
    assert all(fits(json.loads(text), SCHEMA) for text in texts[:6])
