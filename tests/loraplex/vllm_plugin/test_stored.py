"""The vLLM plugin's part without vLLM: adapters by digest from a store, held in place, and errors that name the reason.

`tests/gateway/fleet/kinds/test_vllm_real.py` runs the plugin in a real vLLM.
"""

import json
import os
from pathlib import Path

import pytest

from adapters.local_copies import LocalCopies
from adapters.open_store import open_store
from adapters.store import DirectoryStore, put
from engine.probing.base_digest import base_digest
from loraplex.vllm_plugin.stored import AdapterRefused, AdapterUnavailable, StoredAdapters, open_adapters
from testing.adapter_files import BASE, write
from testing.gateway.running import MODEL_CONFIG
from testing.s3_server import S3Server

ON = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def save_base(folder: Path, **changes: int) -> str:
    """Save a base model's files without tensors and return the folder's name."""
    folder.mkdir()
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG | sizes | changes))
    (folder / "model.safetensors").write_bytes(b"weights of " + folder.name.encode())
    return str(folder)


def test_an_adapter_is_held_by_its_digest_and_checked_against_the_base(tmp_path: Path):
    store = DirectoryStore(tmp_path / "store")
    digest, model = store.put(write(tmp_path / "a"), BASE).digest, save_base(tmp_path / "base")
    adapters = StoredAdapters(store)
    held = adapters.hold(digest, model)
    assert held is not None
    assert held.folder == store.folder(digest)
    held.release()
    assert adapters.hold("0" * 64, model) is None
    with pytest.raises(AdapterRefused, match="base model has 1 layers"):
        adapters.hold(digest, save_base(tmp_path / "other", num_hidden_layers=1))
    # The digest is checked again whenever the files change.
    weights = store.folder(digest) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    # The clock of a file system may have steps of 10 ms.
    os.utime(weights, ns=(weights.stat().st_atime_ns, weights.stat().st_mtime_ns + 10**9))
    with pytest.raises(AdapterUnavailable, match="damaged: adapter: its files have changed"):
        adapters.hold(digest, model)


def test_only_the_expected_base_model_is_served(tmp_path: Path):
    right, wrong = save_base(tmp_path / "right"), save_base(tmp_path / "wrong")
    digest = base_digest(Path(right))
    adapters = StoredAdapters(DirectoryStore(tmp_path / "store"), digest)
    assert adapters.check_base(right).digest == digest
    for model in (wrong, "nobody/such-model"):
        with pytest.raises(AdapterUnavailable, match=f"LORAPLEX_BASE_DIGEST: expected {digest}"):
            adapters.check_base(model)


def test_an_activated_lora_is_refused(tmp_path: Path):
    store = DirectoryStore(tmp_path / "store")
    folder = write(tmp_path / "a")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"alora_invocation_tokens": [1, 2]}))
    with pytest.raises(AdapterRefused, match="activated LoRA"):
        StoredAdapters(store).hold(store.put(folder, BASE).digest, save_base(tmp_path / "base"))


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"LORAPLEX_ADAPTER_STORE": "/nowhere"} | ON, "LORAPLEX_ADAPTER_STORE: no such folder"),
        ({"LORAPLEX_ADAPTER_STORE": "ftp://x"} | ON, "LORAPLEX_ADAPTER_STORE: .*got scheme 'ftp'"),
        ({"LORAPLEX_ADAPTER_STORE": "/tmp"}, "only with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"LORAPLEX_ADAPTER_STORE": "/tmp", "LORAPLEX_BASE_DIGEST": "x"} | ON, "LORAPLEX_BASE_DIGEST: expected 64"),
        ({"LORAPLEX_ADAPTER_STORE": "/tmp", "LORAPLEX_ADAPTER_CACHE_BYTES": "1G"} | ON, "CACHE_BYTES: .*got '1G'"),
    ],
)
def test_a_bad_setting_is_named(environment: dict[str, str], words: str):
    with pytest.raises(ValueError, match=words):
        open_adapters(environment)


def test_without_a_store_there_is_no_plugin():
    assert open_adapters({}) is None


def test_an_adapter_in_a_bucket_has_a_local_copy_while_it_is_held(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    url = s3.url("store/vllm-plugin")
    digest = put(open_store(url, tmp_path / "writer", 1 << 30), write(tmp_path / "a"), BASE).digest
    environment = {"LORAPLEX_ADAPTER_STORE": url, "LORAPLEX_ADAPTER_CACHE": str(tmp_path / "copies")} | ON
    adapters = open_adapters(environment)
    assert adapters is not None
    held = adapters.hold(digest, save_base(tmp_path / "base"))
    assert held is not None
    copies = LocalCopies(tmp_path / "copies", 1 << 30)
    # vLLM may read the folder again at any time, so no other process removes it meanwhile.
    assert (copies.remove(digest), held.folder.is_dir()) == (False, True)
    held.release()
    assert (copies.remove(digest), held.folder.is_dir()) == (True, False)
