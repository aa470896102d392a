"""`loraplex up --engine vllm`: the server's command, its own key, and its address for the gateway."""

import json
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from loraplex.cli import main
from loraplex.up import vllm
from loraplex.up.config import UpConfig
from loraplex.up.datadir import DataDir
from loraplex.up.device_assignment import Pin
from loraplex.up.display import Display
from loraplex.up.local import LocalService
from testing.ports import free_port


def test_the_operators_flags_replace_the_defaults_and_bound_the_gateway(tmp_path: Path):
    program = tmp_path / "vllm"
    program.touch(stat.S_IRWXU)
    config = UpConfig(
        model="/models/tiny", engine="vllm", vllm_program=str(program),
        engine_args="--max-num-seqs 8 --max-cpu-loras=4 --tensor-parallel-size 2",
    )  # fmt: skip
    command = vllm.command(config, "tiny", "/models/tiny", 8001)
    assert command[:5] == (str(program), "serve", "/models/tiny", "--served-model-name", "tiny")
    assert command[-3:] == ("--max-cpu-loras=4", "--tensor-parallel-size", "2")
    assert vllm.address(config, "http://127.0.0.1:8001") == (
        "vllm+http://127.0.0.1:8001?requests=8&adapters=4&max_rank=64&key_env=VLLM_API_KEY"
    )


def test_a_server_gets_a_key_of_its_own_and_the_store(tmp_path: Path):
    own = vllm.environment(tmp_path, "the-internal-token", {})
    assert own["LORAPLEX_ADAPTER_STORE"] == str(tmp_path)
    assert own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "the-internal-token" not in str(own)
    assert vllm.key("the-internal-token")["VLLM_API_KEY"] == own["VLLM_API_KEY"]
    assert vllm.key("another")["VLLM_API_KEY"] != own["VLLM_API_KEY"]


async def test_a_server_inherits_no_secret_of_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Settings of the gateway may stand in the shell's environment; a server may run a model's own code."""
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\nimport json, os\nprint(json.dumps(dict(os.environ)))\n")
    program.chmod(0o700)
    for name in ("KEY_PEPPER", "ADMIN_KEY", "INTERNAL_TOKEN", "DATABASE_URL", "REDIS_URL", "SMTP_URL"):
        monkeypatch.setenv(f"LORAPLEX_{name}", "hush")
    monkeypatch.setenv("LORAPLEX_ADAPTER_CACHE_BYTES", "12345")
    config = UpConfig(model="/models/tiny", served_model_name="tiny", engine="vllm", vllm_program=str(program))
    service = LocalService(config, DataDir.open(tmp_path / "data"), Display())
    try:
        child = await service._start_engine("engine", Pin(), "http://127.0.0.1:8397", "tiny", "/models/tiny")
        await child.process.wait()
        given = json.loads(child.log.read_text())
    finally:
        await service.stop()
    assert [name for name, text in given.items() if text == "hush"] == []
    assert given["LORAPLEX_ADAPTER_CACHE_BYTES"] == "12345"
    assert given["LORAPLEX_ADAPTER_STORE"] == str(tmp_path / "data" / "adapters")
    assert given["VLLM_API_KEY"] == vllm.key(service.secrets.internal_token)["VLLM_API_KEY"]


@pytest.mark.usefixtures("starts_servers")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "vllm", "--vllm-program", "/nowhere/vllm"], "found no program '/nowhere/vllm'"),
        (["--engine", "vllm", "--sleep-after", "5"], "--sleep-after: works with our own engine only"),
        (["--engine", "tgi"], "'tgi' is not one of 'loraplex', 'vllm'"),
    ],
)
def test_a_missing_program_is_one_line(arguments: list[str], words: str):
    done = CliRunner().invoke(main, ["up", "--model", "/models/tiny", "--port", str(free_port()), *arguments])
    assert done.exit_code != 0
    assert words in done.output
    assert done.output.count("\n") == 1
