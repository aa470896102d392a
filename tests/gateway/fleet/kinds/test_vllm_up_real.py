"""`loraplex up --engine vllm` with a real vLLM on a CPU. Not in CI: needs your own installation of vLLM.

LORAPLEX_VLLM=VENV/bin/vllm python -m pytest -m slow tests/gateway/fleet/kinds/test_vllm_up_real.py
"""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from testing.engine import RunningServer
from testing.stack import CACHE, Stack, Tenant, data_dir, http
from tests.e2e.test_uploads import files, push

VLLM = os.environ.get("LORAPLEX_VLLM")
START_SECONDS = 600.0
# Half of the precision would let greedy answers of two engines differ.
ENGINE_ARGS = "--dtype float32 --max-model-len 1024 --max-num-seqs 4 --max-loras 2 --max-cpu-loras 4 --max-lora-rank 16"
# The command's Python path names this checkout, whose packages vLLM's environment may have in another version.
ENVIRONMENT = {"PYTHONPATH": "", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
QUESTION, TOKENS = "Why is the sky blue?", 12


def own_answers(model: Path, store: Path, digest: str) -> tuple[str, str]:
    """Return our engine's greedy answers with an adapter of the store and without it."""
    config = {"served_model_name": "base", "kv_cache_memory": 64 << 20, "adapter_memory": 64 << 20}
    said = []
    with closing(RunningServer(model, store, config)) as server:
        for name in (digest, "base"):
            messages = [{"role": "user", "content": QUESTION}]
            body = {"model": name, "messages": messages, "temperature": 0, "max_tokens": TOKENS}
            got = http("POST", f"{server.url}/v1/chat/completions", data=json.dumps(body).encode())
            assert got.status == 200, got.body
            said.append(got.json["choices"][0]["message"]["content"])
    return said[0], said[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("starts_servers", "takes_a_core")
@pytest.mark.skipif(VLLM is None, reason="LORAPLEX_VLLM names no vLLM")
def test_the_command_starts_a_vllm_that_answers_like_our_engine(tmp_path: Path):
    assert VLLM is not None
    arguments = ("--demo", "--engine", "vllm", "--vllm-program", VLLM, "--engine-args", ENGINE_ARGS)
    stack = Stack(data_dir(tmp_path / "data"), *arguments, environment=ENVIRONMENT)
    try:
        stack.wait_ready(START_SECONDS)
        [found] = [tenant for tenant in stack.demo["tenants"] if tenant["name"] == "globex"]
        globex = Tenant("globex", found["api_key"], (), f"http://127.0.0.1:{stack.port}")
        uploaded = push(globex, {"name": b"uploaded"} | files("pirate"))
        assert (uploaded.status, uploaded.json["state"]) == (201, "ready")
        said = globex.ask("uploaded", QUESTION, max_tokens=TOKENS)
    finally:
        stopped = stack.stop()
    assert stopped == 0, stack.text()
    model = CACHE / "models" / "SmolLM2-135M-Instruct"
    expected, without = own_answers(model, stack.data / "adapters", uploaded.json["digest"])
    assert said == expected != without
