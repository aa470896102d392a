"""Keys and values, and adapters, in 8 bits: half the memory, nearly the same logits."""

from pathlib import Path

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from kernels.gpu.ops import TritonOps
from testing.engine import outputs_until_idle
from testing.tiny import save_adapter, save_model
from wire.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder, max_model_len=256)
    save_adapter(folder / "adapter", rank=5)
    return folder


def run(model: Path, kv_cache_dtype: str, n: int = 8, lora_dtype: str | None = None) -> tuple[list[float], int]:
    """Return the log-probabilities of a prompt in several chunks, with `n` tokens decoded after it; and the blocks.

    With a lora_dtype, the prompt uses the adapter, and the second value is its pages.
    """
    host = HostCache(None, BaseShape.from_config_dir(model), 1 << 20, torch.float32)
    config = EngineConfig(
        model=str(model), dtype="float32", device="cpu", max_lora_rank=8, adapter_memory=4 << 20, max_num_seqs=4,
        kv_cache_memory=1 << 20, max_num_batched_tokens=16, kv_cache_dtype=kv_cache_dtype,
        lora_dtype=lora_dtype or "auto",
    )  # fmt: skip
    engine = Engine(config, host)
    try:
        params = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, prompt_logprobs=0, logprobs=0)
        adapter = host.add_path(model / "adapter") if lora_dtype else None
        engine.add_request(NewRequest("x", [3 + 5 * i % 350 for i in range(40)], params, adapter_digest=adapter))
        found: list[float] = []
        for output in outputs_until_idle(engine):
            assert output.error is None
            found += [entry.logprob for entry in output.prompt_logprobs or [] if entry is not None]
        state = engine.state()
        return found, state.num_adapter_pages if lora_dtype else state.num_blocks
    finally:
        engine.close()
        host.close()


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_8_bits_change_the_logprobs_little_and_hold_more_blocks(model: Path, dtype: str) -> None:
    expected, blocks = run(model, "auto")
    found, more_blocks = run(model, dtype)
    assert more_blocks == blocks * 64 // (16 + 4)  # 16 elements of a head: 4 bytes each, or 1 and a scale of 4
    assert len(found) == len(expected) == 39
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=0.5, rtol=0)
    assert found != expected, "the cache was not used"


@pytest.mark.heavy
def test_the_gpu_kernels_serve_it_as_plain_torch_does(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = run(model, "int8", n=2)
    monkeypatch.setattr("engine.build.pick_ops", lambda *_: TritonOps())
    found, _ = run(model, "int8", n=2)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-3, rtol=0)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_adapters_of_8_bits_change_the_logprobs_little_and_take_less_room(
    model: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _ = run(model, "auto", 2)
    expected, pages = run(model, "auto", 2, "auto")
    found, more_pages = run(model, "auto", 2, dtype)
    assert more_pages > 3 * pages
    changed = torch.tensor(expected) - torch.tensor(base)
    assert 0 < (torch.tensor(found) - torch.tensor(expected)).norm() < 0.3 * changed.norm()
    monkeypatch.setattr("engine.build.pick_ops", lambda *_: TritonOps())
    on_gpu, _ = run(model, "auto", 2, dtype)
    torch.testing.assert_close(torch.tensor(on_gpu), torch.tensor(found), atol=1e-3, rtol=0)


def test_another_dtype_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: expected one of auto, fp8_e4m3, int8, got 'int4'"):
        EngineConfig(model="m", kv_cache_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lora_dtype: expected one of auto, fp8_e4m3, int8, got 'bfloat16'"):
        EngineConfig(model="m", lora_dtype="bfloat16")  # type: ignore[arg-type]
