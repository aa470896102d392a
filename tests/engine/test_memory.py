"""The division of an engine's memory, and errors that name the setting to change."""

from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.build import split_memory
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.token_rules import AllowedTokens, BannedWords
from engine.scheduling.request import NewRequest, SamplingParams
from kernels.cpu.platform import CpuPlatform
from testing.tiny import save_model
from wire.errors import BadRequest, ConfigError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "options", "kv_cache", "adapters"),
    [
        (None, {}, 2 * GIB, GIB),
        (None, {"kv_cache_memory": 5, "adapter_memory": 0}, 5, 0),
        (80 * GIB, {}, int(80 * GIB * 0.8) - 8 * GIB, 8 * GIB),
        (8 * GIB, {}, int(8 * GIB * 0.8) - 2 * GIB, 2 * GIB),  # 8 GiB of adapters once left -1.6 GiB for keys
        (8 * GIB, {"adapter_memory": 6 * GIB, "kv_cache_memory": GIB}, GIB, 6 * GIB),
    ],
)
def test_adapters_and_keys_share_what_the_weights_leave(
    free: int | None, options: dict[str, Any], kv_cache: int, adapters: int
) -> None:
    assert split_memory(EngineConfig(model="x", **options), free) == (kv_cache, adapters)


@pytest.mark.parametrize(
    ("free", "options", "field"),
    [
        (6 * GIB, {"adapter_memory": 8 * GIB}, "adapter_memory"),
        (8 * GIB, {"adapter_memory": 7 * GIB}, "adapter_memory"),
        (8 * GIB, {"kv_cache_memory": 7 * GIB}, "kv_cache_memory"),
        (0, {}, "adapter_memory"),
    ],
)
def test_more_than_there_is_names_the_setting_to_lower(free: int, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match="lower one of them, or use a smaller model") as found:
        split_memory(EngineConfig(model="x", **options), free)
    assert found.value.field == field


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder, max_model_len=256)
    return folder


def make(model: Path, request: pytest.FixtureRequest, **options: Any) -> Engine:
    host = HostCache(None, BaseShape.from_config_dir(model), 1 << 20, torch.float32)
    request.addfinalizer(host.close)
    engine = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", **options), host)
    request.addfinalizer(engine.close)
    return engine


@pytest.mark.parametrize("free", [0, 1 << 10, 1 << 14])
def test_an_engine_without_room_for_a_block_ends_with_a_config_error(
    free: int, model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine on a GPU almost filled by weights ends with a config error; the block count was once negative."""
    monkeypatch.setattr(CpuPlatform, "free_memory", lambda _: free)
    with pytest.raises(ConfigError) as found:
        make(model, request, max_model_len=256)
    assert found.value.field in ("kv_cache_memory", "adapter_memory")
    assert "lower" in found.value.message


HUGE = 2**31 - 1


@pytest.mark.parametrize(
    ("field", "prompt", "params"),
    [
        ("prompt", [5, HUGE], {}),
        ("prompt", [5, -1], {}),
        ("stop_token_ids", [5], {"stop_token_ids": (HUGE,)}),
        ("logit_bias", [5], {"logit_bias": {HUGE: 1.0}}),
        ("allowed_token_ids", [5], {"allowed": [HUGE]}),
        ("bad_words", [5], {"bad_words": [[3, HUGE]]}),
        ("bad_words", [5], {"bad_words": [[HUGE, 3]]}),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_before_anything_is_allocated(
    field: str, prompt: list[int], params: dict[str, Any], model: Path, request: pytest.FixtureRequest
) -> None:
    import tracemalloc

    engine = make(model, request, kv_cache_memory=1 << 20, adapter_memory=1 << 20)
    tracemalloc.start()
    try:
        made = dict(params)
        if "allowed" in made:
            made["allowed"] = AllowedTokens(made["allowed"])
        if "bad_words" in made:
            made["bad_words"] = BannedWords(made["bad_words"])
        with pytest.raises(BadRequest) as found:
            engine.add_request(NewRequest("x", prompt, SamplingParams(**made)))
        assert found.value.param == field
        assert tracemalloc.get_traced_memory()[1] < 1 << 17
    finally:
        tracemalloc.stop()


def test_threads_are_the_engines(model: Path, request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    try:
        make(model, request, kv_cache_memory=1 << 20, adapter_memory=1 << 20, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ConfigError, match="threads"):
        EngineConfig(model="x", threads=0)
