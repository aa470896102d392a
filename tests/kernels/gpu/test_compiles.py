"""Every kernel compiles for an H200 and an A100 without a GPU: on tensor cores, no tile spilled, none per length."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.stack import CACHE

pytestmark = pytest.mark.timeout(300)  # one process compiles everything the first time, 60 s to 150 s

KERNELS = {
    "_attend",
    "_expand",
    "_list_work",
    "_merge",
    "_multiply",
    "_penalise",
    "_forbid",
    "_keep",
    "_choose",
    "_rms_norm",
    "_round_rows",
    "_rope_and_write_kv",
    "_route",
    "_sample",
    "_scale_sums",
    "_shrink",
    "_gate_and_mul",
}
# Bytes that one block may use, by compute capability.
SHARED_MEMORY = {90: 227 * 1024, 80: 163 * 1024}
# Bytes of spilled registers for a thread: a few scalars outside of the inner loops, but no part of a tile.
FEW = 32


@pytest.fixture(scope="module")
def variants() -> list[dict]:
    return compiled(90)


def compiled(architecture: int, *types: str) -> list[dict]:
    script = Path(__file__).with_name("compile_for_hopper.py")
    return run_compiler(str(script), str(architecture), *types)


def run_compiler(*command: str) -> list[dict]:
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        # Triton's cache key of a kernel covers its source, options and compiler, so only changed kernels are compiled.
        "TRITON_CACHE_DIR": str(CACHE / "triton"),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    result = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_every_kernel_compiles_without_spilling(variants):
    assert {variant["kernel"] for variant in variants} == KERNELS
    assert [variant for variant in variants if variant["stack"] > FEW] == []
    assert all(variant["shared"] <= SHARED_MEMORY[90] for variant in variants)


def test_kernels_that_launch_early_wait_for_the_kernel_before(variants):
    """Programmatic dependent launch: shrink behind a product, expand behind shrink, merge behind attention."""
    for kernel in ("_shrink", "_expand", "_merge"):
        assert all(v["launches early"] and v["waits"] >= 1 for v in variants if v["kernel"] == kernel)
    others = [v for v in variants if v["kernel"] not in ("_shrink", "_expand", "_merge")]
    assert not any(v["launches early"] or v["waits"] for v in others)


@pytest.mark.slow
def test_every_type_of_8_bits_compiles(variants):
    every = compiled(90, "all")
    assert len(every) > len(variants)
    test_every_kernel_compiles_without_spilling(every)
    test_kernels_that_launch_early_wait_for_the_kernel_before(every)
    test_other_lengths_compile_nothing(every)


@pytest.mark.slow
def test_every_kernel_compiles_for_an_a100():
    variants = compiled(80, "all")
    assert not any(v["launches early"] or v["waits"] for v in variants)
    assert {variant["kernel"] for variant in variants} == KERNELS
    # Prompts' tiles of Gemma's heads of 256 spill 280 bytes.
    assert [variant for variant in variants if variant["stack"] > 9 * FEW] == []
    assert all(variant["shared"] <= SHARED_MEMORY[80] for variant in variants)
    assert [variant for variant in variants if variant["label"] == "other lengths"] == []
    assert all(v["mma"] > 0 for v in variants if v["kernel"] in ("_shrink", "_expand", "_attend"))


def test_prefill_runs_on_warpgroup_tensor_cores_and_decode_on_small_ones(variants):
    for kernel in ("_shrink", "_expand", "_attend"):
        decode, prefill = [v for v in variants if v["kernel"] == kernel and v["label"] == "first"][:2]
        assert decode["mma"] > 0
        assert decode["wgmma"] == 0
        assert prefill["wgmma"] > 0


def test_other_lengths_compile_nothing(variants):
    """New lengths and table positions in a buffer compile nothing; a compilation in a request would take seconds."""
    assert [variant for variant in variants if variant["label"] == "other lengths"] == []


QUICK = ("fp32", "defaults", "drafts")


@pytest.fixture(scope="module")
def counted() -> dict[str, dict]:
    return dict(zip(QUICK, run_compiler("-m", "tests.kernels.gpu.compile_while_serving", *QUICK), strict=True))


@pytest.mark.parametrize("case", QUICK)
def test_a_serving_engine_compiles_nothing(case, counted):
    """Fuzzed requests need no variant of a kernel that the engine did not launch before it was ready: prompts and
    decodes in graphs and without, adapters, cached prefixes, penalties, masks, top-k and top-p, log-probabilities of
    prompts. "defaults": 256 requests and 8,192 tokens a step. "drafts": with speculative decoding.
    """
    check_serving(case, counted[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["awq", "draft model", "gemma2", "grammars", "int4", "outside", "qwen3"])
def test_other_models_and_features_compile_nothing_while_serving(case):
    """The cases that test_the_variants_of_a_serving_engine_compile lacks: `CASES` of compile_while_serving.py."""
    [found] = run_compiler("-m", "tests.kernels.gpu.compile_while_serving", case)
    check_serving(case, found)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fp32", "8 bits", "fp8 base", "int8 base", "drafts"])
def test_the_variants_of_a_serving_engine_compile(case):
    """The same with Triton's compiler. "8 bits": also in bf16, with keys, values and adapters of 8 bits. "fp8 base" and
    "int8 base": in bf16, with a checkpoint of 8 bits (W8A8).
    """
    [found] = run_compiler("-m", "tests.kernels.gpu.compile_while_serving", "--compile", case)
    check_serving(case, found)


def check_serving(case: str, found: dict) -> None:
    assert found["serving"] == {}
    assert found["steps"] > 20
    assert {"_attend", "_expand", "_list_work", "_penalise", "_forbid", "_choose"} <= found["ready"].keys()
    assert ("_round_rows" in found["ready"]) == (case in ("fp8 base", "int8 base"))
    assert ("_scale_sums" in found["ready"]) == (case == "int8 base")
    # The number depends on the measured times of steps.
    assert (found["drafted"] > 0) == (case in ("drafts", "draft model"))
    assert found["cached"] > 0
