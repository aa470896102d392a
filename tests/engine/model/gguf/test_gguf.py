"""GGUF models: equal to the folder they were written from, and to transformers reading the same file."""

import dataclasses
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from engine.model.config import read_config
from engine.model.families import parse_model_config
from engine.model.gguf.blocks import KEPT
from engine.model.gguf.dense_folder import write_dense_folder
from engine.model.gguf.folder import write_folder
from engine.model.gguf.tokenizer import read_tokenizer
from engine.model.rope import rope_frequencies
from engine.model.tensor_files import NOT_FINITE
from engine.model.weights import open_weights
from kernels import reference
from testing import gguf_files, tiny
from wire.errors import ConfigError
from wire.text.tokenizer import Tokenizer, TokenizerError

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 2, "bos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {"model_type": "llama", "tie_word_embeddings": True}),
    "llama-untied": ("llama", {"model_type": "llama", "tie_word_embeddings": False}),
    "llama-bias": ("llama", {"model_type": "llama", "attention_bias": True, "mlp_bias": True}),
    "mistral": ("llama", {"model_type": "mistral", "sliding_window": 12}),
    "qwen2": ("qwen2", {"model_type": "qwen2"}),
    "qwen3": ("qwen3", {"model_type": "qwen3", "head_dim": 32}),
}
ROUNDED = [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]
K_QUANTS = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]

KEYS = [
    "general.architecture", "llama.block_count", "llama.context_length", "llama.embedding_length",
    "llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length",
    "llama.rope.dimension_count", "llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon",
    "llama.feed_forward_length", "tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges", "tokenizer.ggml.pre", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template",
]  # fmt: skip


def make(folder: Path, family: str) -> Path:
    import transformers

    options = {**SIZES, **FAMILIES[family][1]}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    )
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("llama"), "llama-untied")


def tensors(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    with open_weights(path, dtype, CPU) as source:
        return {name: source.get(name, *file.entries[name].shape) for name, file in source.files.items()}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_file_gives_the_folder_s_tensors_and_config(family: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", family)
    file = gguf_files.write(folder, tmp_path / "model.gguf", architecture=FAMILIES[family][0])
    of_file, of_folder = tensors(file), tensors(folder)
    assert of_file.keys() == of_folder.keys()
    for name, tensor in of_folder.items():
        assert torch.equal(of_file[name], tensor), name
    found, expected = parse_model_config(read_config(file)), parse_model_config(read_config(folder))
    assert found.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    fields = [field.name for field in dataclasses.fields(expected) if field.name != "rms_norm_eps"]
    assert {name: getattr(found, name) for name in fields} == {name: getattr(expected, name) for name in fields}


@pytest.mark.parametrize("kind", ROUNDED + K_QUANTS, ids=lambda kind: kind.name)
def test_quantised_weights_are_what_transformers_makes_of_the_same_file(
    kind: Kind, llama: Path, tmp_path: Path
) -> None:
    import transformers

    file = gguf_files.write(llama, tmp_path / "model.gguf", kind)
    dense = transformers.GgufConfig(gguf_file=file.name, dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, quantization_config=dense, dtype=torch.float32
    )
    expected = model.state_dict()
    of_file = tensors(file)
    assert of_file.keys() == expected.keys()
    for name, tensor in of_file.items():
        assert torch.equal(tensor, expected[name]), name
    if kind in ROUNDED:
        original = tensors(llama)["model.layers.0.mlp.up_proj.weight"]
        assert (of_file["model.layers.0.mlp.up_proj.weight"] - original).abs().max() < 0.05
    assert parse_model_config(read_config(file)).dtype == "bfloat16"


@pytest.mark.parametrize("kind", sorted(KEPT))
def test_kept_blocks_have_the_values_of_the_dequantised_file(kind: str, llama: Path, tmp_path: Path) -> None:
    file = gguf_files.write(llama, tmp_path / "model.gguf", Kind[kind])
    expected = tensors(file)
    with open_weights(file, torch.bfloat16, CPU, quantization="auto") as source:
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):  # the first two have permuted rows
            module = f"model.layers.1.{name}"
            weight = expected[module + ".weight"]
            found = source.linear([(module, len(weight))], weight.shape[1])
            assert found.scheme.kind == ("int4" if "Q4" in kind else "int8")
            assert torch.equal(reference.dequantize(found), weight), name
        head = source.embedding("lm_head", *expected["lm_head.weight"].shape)
        assert torch.equal(reference.dequantize(head), expected["lm_head.weight"])


def test_other_types_and_mixtures_with_them_are_dequantised(llama: Path, tmp_path: Path) -> None:
    file = gguf_files.write(llama, tmp_path / "model.gguf", Kind.Q2_K)
    with open_weights(file, torch.float32, CPU, quantization="auto") as source:
        assert source.linear([("model.layers.0.mlp.up_proj", 512)], 256).scheme.kind == "dense"
    file = gguf_files.write(llama, tmp_path / "model.gguf", Kind.Q8_0)
    with open_weights(file, torch.float32, CPU, quantization="int8") as source:
        refusal = (
            r"^quantization: \S*/model\.gguf: tensor blk\.0\.ffn_up\.weight: quantised already; expected auto or none$"
        )
        with pytest.raises(ConfigError, match=refusal):
            source.linear([("model.layers.0.mlp.up_proj", 512)], 256)


def test_a_kept_block_whose_scale_is_not_finite_is_refused(llama: Path, tmp_path: Path) -> None:
    file = gguf_files.write(llama, tmp_path / "model.gguf", Kind.Q8_0)
    with open_weights(file, torch.float32, CPU) as source:
        entry = source.files["model.layers.0.mlp.up_proj.weight"].entries["model.layers.0.mlp.up_proj.weight"]
    content = bytearray(file.read_bytes())
    content[entry.start : entry.start + 2] = b"\x00\x7e"  # NaN
    file.write_bytes(content)
    with (
        open_weights(file, torch.float32, CPU, quantization="auto") as source,
        pytest.raises(ConfigError, match=rf"model\.gguf: tensor blk\.0\.ffn_up\.weight: {NOT_FINITE}$"),
    ):
        source.linear([("model.layers.0.mlp.up_proj", 512)], 256)


def test_rope_scaling_is_transformers_own(llama: Path, tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32.0}
    file = gguf_files.write(llama, tmp_path / "yarn.gguf", rope=yarn)
    rope = parse_model_config(read_config(file)).rope
    assert (rope.kind, rope.parameters["factor"]) == ("yarn", 4.0)
    file = gguf_files.write(llama, tmp_path / "linear.gguf", rope={"type": "linear", "factor": 2.0})
    rope = parse_model_config(read_config(file)).rope
    assert (rope.kind, rope.parameters["factor"]) == ("linear", 2.0)
    with pytest.raises(
        ConfigError, match=r"^model: \S*/long\.gguf: llama\.rope\.scaling\.type 'longrope' is not served"
    ):
        read_config(gguf_files.write(llama, tmp_path / "long.gguf", rope={"type": "longrope"}))


def test_llama_3_scaling_comes_as_divisors_of_the_frequencies(llama: Path, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    raw = read_config(llama)
    expected, _ = rope_frequencies(parse_model_config(raw | {"rope_parameters": scaling}).rope, 64)
    plain, _ = rope_frequencies(parse_model_config(raw).rope, 64)
    divisors = np.array(plain, np.float32) / np.array(expected, np.float32)
    file = gguf_files.write(llama, tmp_path / "model.gguf", extra={"rope_freqs.weight": divisors})
    config = parse_model_config(read_config(file))
    frequencies, factor = rope_frequencies(config.rope, config.head_dim)
    assert factor == 1.0
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert "model.norm.weight" in tensors(file)


@pytest.mark.parametrize("save", [tiny.save_byte_level_tokenizer, tiny.save_byte_fallback_tokenizer])
def test_the_tokenizer_is_the_folder_s(save: Any, llama: Path, tmp_path: Path) -> None:
    save(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(llama / name)
    found = read_tokenizer(gguf_files.write(tmp_path, tmp_path / "model.gguf", vocabulary=True))
    expected = Tokenizer.from_dir(tmp_path)
    for text in (*tiny.TEXTS, "  spaces   and\ttabs 2024", "<|start|>user\nHi<|end|>", "<think>two words</think>", ""):
        ids = expected.encode(text)
        assert found.encode(text) == ids, text
        assert found.decode(ids) == expected.decode(ids)
    chat = [{"role": "user", "content": "What is a fox?"}]
    assert found.encode_chat(chat) == expected.encode_chat(chat)
    assert (found.eos_token_ids, found.special_ids) == ({2}, expected.special_ids)


def test_a_folder_written_around_a_file_is_the_same_model(llama: Path, tmp_path: Path) -> None:
    tiny.save_byte_level_tokenizer(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(llama / name)
    file = gguf_files.write(tmp_path, tmp_path / "model.gguf", Kind.Q8_0, vocabulary=True)
    folder = tmp_path / "folder"
    write_folder(file, folder)
    assert parse_model_config(read_config(folder)) == parse_model_config(read_config(file))
    of_file, of_folder = tensors(file), tensors(folder)
    assert all(torch.equal(of_file[name], tensor) for name, tensor in of_folder.items())
    chat = [{"role": "user", "content": "What is a fox?"}]
    found, expected = Tokenizer.from_dir(folder), read_tokenizer(file)
    assert found.encode_chat(chat) == expected.encode_chat(chat)
    assert (found.eos_token_ids, found.special_ids) == (expected.eos_token_ids, expected.special_ids)
    (folder / "other.gguf").symlink_to(file)
    with pytest.raises(ConfigError, match=r"one \.gguf file, got 2 \.gguf files"):
        tensors(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_a_dense_folder_as_the_same_model(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, folder = make(tmp_path / "source", family), tmp_path / "dense"
    tiny.save_byte_level_tokenizer(source)
    file = gguf_files.write(source, tmp_path / "model.gguf", architecture=FAMILIES[family][0], vocabulary=True)
    write_dense_folder(file, folder)
    file.unlink()
    expected, found = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (source, folder))
    assert type(found) is type(expected)
    ids = torch.arange(20)[None] % SIZES["vocab_size"]
    # llama.cpp stores the norms' epsilon in single precision.
    torch.testing.assert_close(found(ids).logits, expected(ids).logits)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (folder, source)]
    chats = [each.apply_chat_template([{"role": "user", "content": "What is a fox?"}]) for each in tokenizers]
    assert chats[0]["input_ids"] == chats[1]["input_ids"]
    assert tokenizers[0].eos_token == tokenizers[1].eos_token


def test_quantised_weights_of_a_dense_folder_are_rounded_as_the_engine_rounds_them(llama: Path, tmp_path: Path) -> None:
    tiny.save_byte_level_tokenizer(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(llama / name)
    file = gguf_files.write(tmp_path, tmp_path / "model.gguf", Kind.Q4_1, vocabulary=True)
    write_dense_folder(file, tmp_path / "dense")
    stored = load_file(tmp_path / "dense/model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert all(torch.equal(stored[name], tensor.bfloat16()) for name, tensor in tensors(file).items())


def test_vocabularies_that_cannot_be_rebuilt_are_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no vocabulary; pass .* --tokenizer"):
        read_tokenizer(gguf_files.write(llama, tmp_path / "none.gguf"))
    tiny.save_byte_level_tokenizer(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(llama / name)
    file = gguf_files.write(tmp_path, tmp_path / "model.gguf", vocabulary=True)
    file.write_bytes(file.read_bytes().replace(b"gpt-2", b"gpt-9"))
    with pytest.raises(TokenizerError, match=r"'gpt-9' is unknown; expected one of gpt-2, .* --tokenizer"):
        read_tokenizer(file)


def test_what_we_do_not_serve_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    file = gguf_files.write(llama, tmp_path / "phi.gguf", architecture="phi3")
    with pytest.raises(ConfigError, match="architecture 'phi3' is not served; expected one of llama, qwen2, qwen3"):
        read_config(file)
    gate = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 256), np.float32)}
    with pytest.raises(ConfigError, match=r"^model: \S*: tensor blk\.0\.ffn_gate_inp\.weight: belongs to no decoder"):
        tensors(gguf_files.write(llama, tmp_path / "moe.gguf", extra=gate))


@pytest.fixture(scope="module")
def whole(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a file with its vocabulary."""
    folder = tmp_path_factory.mktemp("whole")
    tiny.save_byte_level_tokenizer(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(llama / name)
    return gguf_files.write(folder, folder / "model.gguf", vocabulary=True).read_bytes()


def load(file: Path) -> None:
    """Load everything that a server reads from a file."""
    config = parse_model_config(read_config(file))
    rope_frequencies(config.rope, config.head_dim)
    read_tokenizer(file)
    tensors(file)


def test_a_file_cut_off_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 8, 30, 200, 900, 2000, 20_000, len(whole) // 2, len(whole) - 64]:
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"^model: \S*cut\.gguf is damaged or cut off: "):
            load(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match=r"is a Git LFS pointer .* run git lfs pull"):
        load(file)
    file.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(ConfigError, match="GGUF version 1"):
        load(file)


def test_damaged_files_are_refused_never_crash(whole: bytes, tmp_path: Path) -> None:
    file, generator, refused = tmp_path / "bad.gguf", np.random.default_rng(0), 0
    header = whole.index(b"token_embd.weight") + 1000
    for _ in range(150):
        data = bytearray(whole)
        for at in generator.integers(0, header if generator.integers(2) else 1500, 4):
            data[at] = generator.integers(256)
        file.write_bytes(data)
        try:
            load(file)
        except (ConfigError, TokenizerError):
            refused += 1
    assert refused > 50


def test_values_of_another_kind_or_of_no_size_are_refused(whole: bytes, tmp_path: Path) -> None:
    """Each key's value is replaced by a string and a list longer than any file, and by infinity; all are refused."""
    values = struct.pack("<IQ", 8, 2**40), struct.pack("<IIQ", 9, 5, 2**40), struct.pack("<If", 6, float("inf"))
    file = tmp_path / "bad.gguf"
    for key in KEYS:
        at = whole.index(key.encode()) + len(key)
        for value in values:
            file.write_bytes(whole[:at] + value + whole[at + len(value) :])
            with pytest.raises((ConfigError, TokenizerError), match=re.escape(str(file))):
                load(file)


def test_weights_that_are_no_numbers_are_refused(llama: Path, tmp_path: Path) -> None:
    file = gguf_files.write(llama, tmp_path / "model.gguf")
    data = bytearray(file.read_bytes())
    data[-8:-4] = struct.pack("<f", float("nan"))
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"^model: \S*/model\.gguf: tensor (\w+\.)+weight: {NOT_FINITE}$"):
        tensors(file)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q2_K, Kind.Q6_K])
def test_blocks_that_are_no_numbers_are_refused_when_dequantised(kind: Kind, llama: Path, tmp_path: Path) -> None:
    file = gguf_files.write(llama, tmp_path / "model.gguf", kind)
    name = "model.layers.1.self_attn.q_proj.weight"
    with open_weights(file, torch.float32, CPU) as source:
        entry = source.files[name].entries[name]
    data = bytearray(file.read_bytes())
    data[entry.start : entry.start + 210] = b"\xff" * 210  # NaN, wherever the block has its scale
    file.write_bytes(data)
    with (
        open_weights(file, torch.float32, CPU) as source,
        pytest.raises(ConfigError, match=rf"tensor blk\.1\.attn_q\.weight: {NOT_FINITE}$"),
    ):
        source.get(name, *entry.shape)


def test_missing_and_misshapen_tensors_have_the_files_own_names(llama: Path, tmp_path: Path) -> None:
    file = gguf_files.write(llama, tmp_path / "model.gguf")
    with open_weights(file, torch.float32, CPU) as source:
        for name, own in (
            ("model.layers.7.mlp.gate_proj.weight", "blk.7.ffn_gate.weight"),
            ("model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"),
            ("other.weight", "other.weight"),
        ):
            with pytest.raises(ConfigError, match=rf"^model: \S*/model\.gguf: tensor {re.escape(own)}: missing$"):
                source.get(name, 4)
        with pytest.raises(ConfigError, match=r"tensor token_embd\.weight: shape \(96, 256\), the config says \(4,\)"):
            source.get("model.embed_tokens.weight", 4)
        file_of = source.files["model.norm.weight"]
        assert all(file_of.own_name(name) == entry.name for name, entry in file_of.entries.items())


def test_an_unknown_type_names_its_tensor(llama: Path, tmp_path: Path) -> None:
    file = gguf_files.write(llama, tmp_path / "model.gguf")
    data = bytearray(file.read_bytes())
    at = data.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight") + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", 4711)
    file.write_bytes(data)
    with pytest.raises(
        ConfigError, match=r"^model: \S*/model\.gguf: tensor blk\.1\.ffn_up\.weight: unknown type 4711: "
    ):
        tensors(file)
