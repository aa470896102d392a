"""The division of an engine's memory, and errors that name the setting to change."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.sampling_tables import seat_bytes
from engine.memory import Needs, Share, adapter_bytes, count_blocks, fixed_kv_cache, host_adapter_bytes
from engine.scheduling.request import NewRequest, SamplingParams
from engine.scheduling.token_rules import AllowedTokens, BannedWords
from kernels.cgroups import memory_limit
from kernels.cpu.platform import CpuPlatform
from kernels.platform import platform_of
from testing.card import Card
from testing.engine import outputs_until_idle
from testing.tiny import save_model
from wire.errors import BadRequest, ConfigError

GIB = 1 << 30


MIB = 1 << 20


def share(utilization: float = 0.9, total: int = 80 * GIB, before: int = 0) -> Share:
    return Share("GPU", total, before, utilization)


@pytest.mark.parametrize(
    ("options", "place", "expected"),
    [
        ({"adapter_memory": 0}, None, 0),
        ({}, share(), 8 * GIB),
        ({}, share(total=24 * GIB), (int(24 * GIB * 0.9) - 16 * GIB) // 4),
        ({"adapter_memory": 5}, share(), 5),
    ],
)
def test_adapters_get_a_quarter_of_what_the_weights_leave(
    options: dict[str, Any], place: Share | None, expected: int
) -> None:
    assert adapter_bytes(EngineConfig(model="x", **options), place, 16 * GIB, CpuPlatform()) == expected


@pytest.mark.parametrize(
    ("total", "used", "expected"),
    [
        (24 * GIB, GIB, (2 * GIB, GIB, 4 * GIB)),
        (4 * GIB, GIB, (3 * GIB // 4, 3 * GIB // 8, 3 * GIB // 4)),
        (4 * GIB, 5 * GIB, (1, 1, 1)),
    ],
)
def test_the_cpus_defaults_fit_a_small_container(
    total: int, used: int, expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "total_memory", lambda _: total)
    config, cpu = EngineConfig(model="x"), CpuPlatform()
    adapters = adapter_bytes(config, None, used, cpu)
    assert (fixed_kv_cache(config, cpu, used), adapters) == expected[:2]
    assert host_adapter_bytes(config, adapters, cpu, cpu, used) == expected[2]
    given = EngineConfig(model="x", kv_cache_memory=7, adapter_memory=8, host_adapter_memory=9)
    assert (fixed_kv_cache(given, cpu, used), adapter_bytes(given, None, used, cpu)) == (7, 8)
    assert host_adapter_bytes(given, adapters, cpu, cpu, used) == 9


@pytest.mark.parametrize("engines", [1, 2, 8])
def test_engines_of_one_host_stay_within_its_memory(engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU each has a copy of the model; on GPUs each has as many adapters in the host's memory as it may."""
    total, used = 24 * GIB, GIB
    monkeypatch.setattr(CpuPlatform, "total_memory", lambda _: total)
    config, cpu = EngineConfig(model="x", engines_on_host=engines), CpuPlatform()
    adapters = adapter_bytes(config, None, used, cpu)
    tiers = fixed_kv_cache(config, cpu, used) + adapters + host_adapter_bytes(config, adapters, cpu, cpu, used)
    assert engines * (used + tiers) <= total
    on_gpu = host_adapter_bytes(config, 16 * GIB, platform_of(torch.device("cuda")), cpu, used)
    assert on_gpu == total // 2 // engines


def test_sizes_that_are_given_are_not_divided_among_the_hosts_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "total_memory", lambda _: 4 * GIB)
    given = {"kv_cache_memory": 3 * GIB, "adapter_memory": 2 * GIB, "host_adapter_memory": GIB}
    config, cpu = EngineConfig(model="x", engines_on_host=8, **given), CpuPlatform()
    assert fixed_kv_cache(config, cpu, GIB) == 3 * GIB
    assert adapter_bytes(config, None, GIB, cpu) == 2 * GIB
    assert host_adapter_bytes(config, 2 * GIB, cpu, cpu, GIB) == GIB


NEEDS = Needs(weights=16 * GIB, adapters=8 * GIB, activations=3 * GIB, graphs=GIB)


@pytest.mark.parametrize(
    ("options", "place", "blocks"),
    [
        ({}, share(), (int(80 * GIB * 0.9) - 28 * GIB) // (2 * MIB)),
        ({}, share(utilization=0.5), 12 * GIB // (2 * MIB)),
        ({}, share(utilization=0.5, before=GIB), 12 * GIB // (2 * MIB)),  # the share is of the total
        ({"kv_cache_memory": GIB}, share(utilization=0.1), 512),  # as in vLLM, given bytes replace the share
        ({"kv_cache_memory": 52 * GIB}, share(), 26 * 1024),
    ],
)
def test_the_kv_cache_gets_what_is_left(options: dict[str, Any], place: Share, blocks: int) -> None:
    assert count_blocks(EngineConfig(model="x", **options), place, NEEDS, 2 * MIB, least=256) == blocks


@pytest.mark.parametrize(
    ("options", "place", "field", "message"),
    [
        (
            {},
            share(utilization=0.35),
            "gpu_memory_utilization",
            "the model does not fit: 0.35 of this GPU's 81920 MiB is 28672 MiB, of which weights 16384 MiB, adapters "
            "8192 MiB, activations 3072 MiB, CUDA graphs 1024 MiB; this leaves 0 MiB for 0 KV blocks of 2048 KiB, and "
            "at least 256 are needed",
        ),
        ({}, share(utilization=0.355), "gpu_memory_utilization", "leaves 409 MiB for 204 KV blocks"),
        (
            {"kv_cache_memory": 52 * GIB},
            share(before=GIB),
            "kv_cache_memory",
            "expected at most 52224 MiB, got 53248 MiB: of this GPU's 81920 MiB, other processes use 1024 MiB",
        ),
    ],
)
def test_too_little_is_an_error_with_all_sizes(options: dict[str, Any], place: Share, field: str, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        count_blocks(EngineConfig(model="x", **options), place, NEEDS, 2 * MIB, least=256)
    assert found.value.field == field
    assert message in found.value.message


def test_weights_beyond_the_share_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"0\.1 of this GPU's 81920 MiB is 8192 MiB, of which weights 16384 MiB"):
        adapter_bytes(EngineConfig(model="x"), share(utilization=0.1), 16 * GIB, CpuPlatform())


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


def test_activations_are_measured_before_the_kv_blocks_are_counted(
    model: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Card(100 * MIB, weights=30 * MIB, activations=10 * MIB).install(monkeypatch)
    with caplog.at_level("INFO"):
        engine = make(model, request, adapter_memory=8 * MIB, max_num_seqs=4, enforce_eager=True)
    left = 90 * MIB - 30 * MIB - 10 * MIB - 10 * MIB
    assert engine.runner.seat_bytes == 0
    shape = engine.runner.decoder.kv[0].k.shape
    per_block = 2 * engine.model_config.num_layers * shape[1] * shape[2] * shape[3] * 4
    assert engine.scheduler.cache.num_blocks == shape[0] == left // per_block
    assert "weights 30 MiB, adapters 10 MiB, activations 10 MiB, KV cache 40 MiB" in caplog.text
    monkeypatch.undo()
    # The steps of the warm-up left nothing behind: a request is answered as by an engine that was not measured.
    plain = make(model, request, kv_cache_memory=1 << 20, adapter_memory=8 * MIB, max_num_seqs=4)
    answers = []
    for each in (engine, plain):
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        each.add_request(NewRequest("x", [5, 6, 7], params))
        answers.append([token for output in outputs_until_idle(each) for token in output.token_ids])
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]


def test_the_tables_by_seat_are_counted(
    model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU, token counts and allowed tokens have a row for each seat: these 700 seats take 1.1 MiB."""
    card = Card(100 * MIB, weights=30 * MIB, activations=10 * MIB)
    card.install(monkeypatch)
    monkeypatch.setattr("engine.execution.runner.platform_of", lambda _: card)
    options = {"adapter_memory": 8 * MIB, "max_num_batched_tokens": 700, "enforce_eager": True}
    with caplog.at_level("INFO"):
        engine = make(model, request, max_num_seqs=700, **options)
    model_config = engine.model_config
    tables = seat_bytes(700, model_config.vocab_size)
    assert MIB < tables == engine.runner.seat_bytes
    kv = engine.runner.decoder.kv[0].k
    left = 90 * MIB - 30 * MIB - 10 * MIB - 10 * MIB - tables
    assert engine.scheduler.cache.num_blocks == left // (2 * model_config.num_layers * kv[0].nbytes)
    assert "activations 10 MiB, tables by seat 1 MiB, KV cache 38 MiB" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "options", "field", "message"),
    [
        ({"others": 20}, {}, "gpu_memory_utilization", "expected at most 0.67, got 0.9: other processes use 20 MiB"),
        ({"total": 40}, {}, "gpu_memory_utilization", "the model does not fit: 0.9 of this card's 40 MiB is 36 MiB"),
        ({"activations": 30}, {}, "gpu_memory_utilization", "activations 30 MiB; this leaves 0 MiB"),
        ({}, {"kv_cache_memory": 30 * MIB}, "kv_cache_memory", "expected at most 20 MiB, got 30 MiB"),
        ({}, {"kv_cache_memory": 61 * MIB}, "kv_cache_memory", "expected at most the 60 MiB that this card has"),
    ],
)
def test_an_engine_that_does_not_fit_says_which_size_to_change(
    sizes: dict[str, int],
    options: dict[str, Any],
    field: str,
    message: str,
    model: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = {name: size * MIB for name, size in {"total": 60, "weights": 30, **sizes}.items()}
    Card(card.pop("total"), **card).install(monkeypatch)
    with pytest.raises(ConfigError) as found:
        make(model, request, adapter_memory=8 * MIB, enforce_eager=True, **options)
    assert found.value.field == field
    assert message in found.value.message


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_engine_on_the_cpu_stays_within_its_share(model: Path, request: pytest.FixtureRequest) -> None:
    """Measured by the process's own pages: what is resident, the peak of a step, and a KV cache of the rest."""
    platform = CpuPlatform()
    wanted = platform.used_memory() + 300 * MIB
    utilization = wanted / platform.total_memory()
    engine = make(model, request, gpu_memory_utilization=utilization, adapter_memory=40 * MIB, max_num_seqs=4)
    cache = engine.runner.decoder.kv
    kv_bytes = sum(each.k.nbytes + each.v.nbytes for each in cache)
    assert 100 * MIB < kv_bytes <= 250 * MIB
    for each in cache:  # the pages exist only once they are written
        each.k.fill_(1), each.v.fill_(1)
    assert platform.used_memory() <= wanted


PEAK = """
import torch
from kernels.cpu.platform import CpuPlatform
peak = CpuPlatform().watch_peak()
torch.ones(64 << 20, dtype=torch.uint8)
print(peak())
"""


def test_a_peak_is_seen_after_its_memory_is_free() -> None:
    """In a new process: memory of earlier tests that is freed meanwhile hides the peak."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=100)
    assert 60 * MIB <= int(done.stdout) <= 200 * MIB


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/pod/x\n", "sys/fs/cgroup/pod/memory.max": "4096\n",
          "sys/fs/cgroup/pod/x/memory.max": "8192\n"}, 4096),
        ({"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/memory.max": "512\n"}, 512),
        ({"proc/self/cgroup": "5:memory:/x\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "777\n"}, 777),
    ],
)  # fmt: skip
def test_a_containers_limit_is_the_machines_memory(files: dict[str, str], limit: int | None, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert memory_limit(tmp_path) == limit


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
