"""Adapter files: the digest covers the content that matters, and every broken file is refused by name."""

import json
import os
import struct

import pytest

from adapters.checkpoint import DTYPES, _pair, open_checkpoint
from adapters.manifest import AdapterError, AdapterNotFound, BaseShape
from kernels.dtypes import FILE_DTYPES
from testing.adapter_files import BASE, CONFIG, header_of, key, pack, safetensors, tensors, write
from wire.bounded_dict import BoundedDict


def refusal(folder) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        open_checkpoint(folder)
    return caught.value


def digest(folder, content=None, config=None) -> str:
    return open_checkpoint(write(folder, content, config)).digest


def test_what_a_checkpoint_says(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path))
    assert list(checkpoint.modules) == [(0, "q_proj"), (0, "v_proj"), (2, "down_proj")]
    assert {(m.rank, m.scale) for m in checkpoint.modules.values()} == {(4, 2.0)}
    assert checkpoint.modules[0, "q_proj"].a.shape == (4, 16)
    assert checkpoint.modules[2, "down_proj"].b.shape == (16, 4)
    assert checkpoint.rank == 4
    assert checkpoint.num_bytes == sum(len(data) for _, _, data in tensors().values())
    assert len(checkpoint.digest) == 64
    checkpoint.check_base(BASE)


def test_adapters_of_one_recipe_are_parsed_once_and_read_the_same(tmp_path, monkeypatch):
    """Only the tensors differ. A header or config with another byte is parsed anew."""
    monkeypatch.setattr("adapters.checkpoint._parsed", BoundedDict(2))
    parsed = []
    monkeypatch.setattr("adapters.checkpoint._pair", lambda *read: (parsed.append(read), _pair(*read))[1])
    found = [open_checkpoint(write(tmp_path / str(seed), tensors(seed=seed))) for seed in range(3)]
    assert len(parsed) == 1
    assert len({checkpoint.digest for checkpoint in found}) == 3
    assert {checkpoint.folder.name for checkpoint in found} == {"0", "1", "2"}
    monkeypatch.setattr("adapters.checkpoint._MAX_CACHED_BYTES", 0)
    for checkpoint in found:
        assert open_checkpoint(checkpoint.folder) == checkpoint
    assert len(parsed) == 4
    monkeypatch.undo()
    scaled = open_checkpoint(write(tmp_path / "scaled", tensors(), {**CONFIG, "lora_alpha": 16}))
    assert {module.scale for module in scaled.modules.values()} == {4.0}


def test_a_longer_file_with_a_known_header_is_refused(tmp_path):
    weights = write(tmp_path) / "adapter_model.safetensors"
    open_checkpoint(tmp_path)
    weights.write_bytes(weights.read_bytes() + b"\0")
    assert "its tensors end at byte" in refusal(tmp_path).message


def test_the_digest_does_not_see_order_or_provenance(tmp_path):
    expected = digest(tmp_path / "a")
    backwards = dict(reversed(tensors().items()))
    assert digest(tmp_path / "b", backwards) == expected
    reported = {"lora_dropout": 0.1, "base_model_name_or_path": "x", "inference_mode": True, "init_lora_weights": False}
    config = dict(reversed({**CONFIG, **reported}.items()))
    assert digest(tmp_path / "c", config=config) == expected
    assert digest(tmp_path / "d", config=json.dumps(CONFIG, indent=4).encode()) == expected
    named = {name.replace(".weight", ".default.weight"): value for name, value in tensors().items()}
    assert digest(tmp_path / "e", named) == expected
    padded = pack(json.dumps(header_of(tensors())).encode() + b"   ", b"".join(t[2] for t in tensors().values()))
    assert digest(tmp_path / "f", padded) == expected


def test_the_digest_changes_with_any_byte(tmp_path):
    expected, content = digest(tmp_path), tensors()
    for name, (dtype, shape, data) in content.items():
        for at in (0, len(data) // 2, len(data) - 4):
            changed = bytearray(data)
            changed[at] ^= 1
            assert digest(tmp_path, {**content, name: (dtype, shape, bytes(changed))}) != expected


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"alpha_pattern": {"v_proj": 1}},
        {"alpha_pattern": {r"layers\.2.*": 1}},
    ],
)
def test_the_digest_changes_with_the_scale(tmp_path, change):
    assert digest(tmp_path / "a", config={**CONFIG, **change}) != digest(tmp_path / "b")


def test_the_digest_changes_with_the_modules_and_dtype(tmp_path):
    content = tensors()
    moved = {name.replace("layers.2", "layers.1"): value for name, value in content.items()}
    renamed = {name.replace("q_proj", "o_proj"): value for name, value in content.items()}
    half = {
        name: ("BF16", [s[0], s[1] * 2], data) for name, (_, s, data) in tensors(rank=4).items() if "lora_A" in name
    }
    half |= {name: value for name, value in content.items() if "lora_B" in name}
    config = {**CONFIG, "target_modules": "all-linear"}
    digests = {digest(tmp_path / str(i), c, config) for i, c in enumerate((content, moved, renamed, half))}
    assert len(digests) == 4


def test_a_scale_says_all_there_is_of_rank_pattern(tmp_path):
    plain = digest(tmp_path / "a")
    assert (
        digest(tmp_path / "b", config={**CONFIG, "r": 8, "lora_alpha": 8, "rank_pattern": {"proj": 1, ".*": 4}})
        == plain
    )


HEADER = header_of(tensors())
DATA = b"".join(t[2] for t in tensors().values())
FIRST, SECOND = list(HEADER)[:2]


def changed(name: str, **fields) -> dict:
    return {**HEADER, name: {**HEADER[name], **fields}}


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        (b"", "adapter_model.safetensors", "empty"),
        (b"1234", "adapter_model.safetensors", "too short"),
        (b"\x80\x02}q\x00." * 20, "adapter_model.safetensors", "longer than the file"),
        (struct.pack("<Q", 1 << 63) + b"{}", "adapter_model.safetensors", "longer than the file"),
        (pack(b"{", b""), "adapter_model.safetensors", "not valid JSON"),
        (pack(b"\xff\xfe", b""), "adapter_model.safetensors", "not valid JSON"),
        (pack(b"[" * 200_000, b""), "adapter_model.safetensors", "not valid JSON"),
        (pack([], b""), "adapter_model.safetensors", "not an object"),
        (pack({}, b""), "adapter_model.safetensors", "no LoRA tensors"),
        (pack(b'{"a": {}, "a": {}}', b""), "adapter_model.safetensors", "twice"),
        (pack({FIRST: 3}, b""), FIRST, "expected an object"),
        (pack(HEADER, DATA[:-1]), "adapter_model.safetensors", "cut off"),
        (pack(HEADER, DATA + b"\0"), "adapter_model.safetensors", "cut off"),
        (pack(changed(FIRST, dtype="F64"), DATA), FIRST, "expected dtype F32, F16, BF16, got 'F64'"),
        (pack(changed(FIRST, dtype=["F32"]), DATA), FIRST, "expected dtype"),
        (pack(changed(FIRST, shape=[4, 17]), DATA), FIRST, "do not fit"),
        (pack(changed(FIRST, shape=[64]), DATA), FIRST, "two dimensions"),
        (pack(changed(FIRST, shape=[4, True]), DATA), FIRST, "two dimensions"),
        (pack(changed(FIRST, shape=[-4, -16]), DATA), FIRST, "two dimensions"),
        (pack(changed(FIRST, shape=[0, 16], data_offsets=[0, 0]), DATA), FIRST, "two dimensions"),
        (pack(changed(FIRST, data_offsets=[-256, 0]), DATA), FIRST, "do not fit"),
        (pack(changed(FIRST, data_offsets=None), DATA), FIRST, "do not fit"),
        (pack(changed(SECOND, data_offsets=HEADER[FIRST]["data_offsets"]), DATA), SECOND, "overlaps"),
        (pack(changed(SECOND, data_offsets=[4096, 4352]), DATA), list(HEADER)[2], "leaves a gap"),
    ],
)
def test_broken_weights_are_refused(tmp_path, raw, field, message):
    error = refusal(write(tmp_path, raw))
    assert error.field == field
    assert message in error.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.lm_head.lora_A.weight", "target_modules do not select"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "target_modules do not select"),
        ("base_model.model.model.embed_tokens.lora_A.weight", "not served"),
        ("base_model.model.lm_head.modules_to_save.weight", "not served"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA's magnitude vectors"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight", "DoRA's magnitude vectors"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "a bias on LoRA B"),
        ("base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight", "not served"),
        ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", "not served"),
        ("base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight", "not served"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "not served"),
        (key(0, "k_proj", "A"), "target_modules do not select"),
        (key(0, "q_proj", "A", ".default"), "twice"),
    ],
)
def test_tensors_that_we_would_not_apply_are_refused(tmp_path, name, message):
    content = {**tensors(), name: tensors()[FIRST]}
    error = refusal(write(tmp_path, content))
    assert error.field in (name, FIRST)
    assert message in error.message


def test_dora_and_bias_are_named_before_their_shape(tmp_path):
    """DoRA and bias tensors are vectors in any config, and the error names them before it checks shapes."""
    content, prefix = tensors(), "base_model.model.model.layers.0.self_attn.q_proj."
    vector = ("F32", [16], content[key(0, "q_proj", "B")][2][:64])
    for name, message in (
        ("lora_magnitude_vector", "DoRA's magnitude vectors are not served"),
        ("lora_B.bias", "a bias on LoRA B is not served"),
    ):
        error = refusal(write(tmp_path, {**content, prefix + name: vector}))
        assert (error.field, error.message) == (prefix + name, message)


@pytest.mark.parametrize("missing", list(tensors()))
def test_half_a_pair_is_refused(tmp_path, missing):
    error = refusal(write(tmp_path, {name: value for name, value in tensors().items() if name != missing}))
    assert "is missing" in error.message
    assert missing.removesuffix(".weight").endswith(error.field)


@pytest.mark.parametrize("change", [{"r": 8}, {"rank_pattern": {"down_proj": 2}}])
def test_a_rank_that_is_not_the_configs_is_refused(tmp_path, change):
    assert "its rank is 4" in refusal(write(tmp_path, config={**CONFIG, **change})).message


BAD = {
    "F32": [b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\x01\x00\xc0\x7f"],
    "BF16": [b"\x80\x7f", b"\x80\xff", b"\xc0\x7f"],
    "F16": [b"\x00\x7c", b"\x00\xfc", b"\x01\x7e"],
}


@pytest.mark.parametrize(("dtype", "bad"), [(dtype, bad) for dtype, values in BAD.items() for bad in values])
def test_nan_and_infinity_are_refused(tmp_path, dtype, bad):
    name, width = key(0, "q_proj", "A"), len(bad)
    largest = {"F32": b"\xff\xff\x7f\x7e", "BF16": b"\x7f\x7e", "F16": b"\xff\x7b"}[dtype]
    for at in (0, 31, 63):
        data = bytearray(largest * 64)
        assert open_checkpoint(write(tmp_path, {**tensors(), name: (dtype, [4, 16], bytes(data))})).rank == 4
        data[at * width : (at + 1) * width] = bad
        error = refusal(write(tmp_path, {**tensors(), name: (dtype, [4, 16], bytes(data))}))
        assert (error.field, error.message) == (name, "holds NaN or infinite values")


def test_a_header_of_more_than_2_mib_is_not_parsed(tmp_path, monkeypatch):
    """The header is as long as it states, and valid but for its length."""
    parsed, loads = [], json.loads

    def load(text, **options):
        parsed.append(len(text))
        return loads(text, **options)

    monkeypatch.setattr("adapters.safetensors_header.json.loads", load)
    header = json.dumps(HEADER).encode()
    for size in (2 << 20, (2 << 20) + 8):
        folder = write(tmp_path / str(size), pack(header.ljust(size), DATA))
        if size == 2 << 20:
            assert open_checkpoint(folder).rank == 4
            assert parsed.pop() == size
            continue
        error = refusal(folder)
        assert (error.field, error.message) == (
            "adapter_model.safetensors",
            "is not a safetensors file: its header is longer than the file or than 2 MiB",
        )
        assert max(parsed) < 1000


def test_the_last_number_of_a_large_tensor_is_looked_at(tmp_path):
    wide = BaseShape(1, {**BASE.projections, "q_proj": (16, 1 << 17)})
    content = tensors(((0, "q_proj"),), base=wide)
    dtype, shape, data = content[key(0, "q_proj", "A")]
    assert len(data) > 1 << 20
    assert open_checkpoint(write(tmp_path, content)).rank == 4
    content[key(0, "q_proj", "A")] = (dtype, shape, data[:-4] + b"\x00\x00\xc0\x7f")
    assert "NaN" in refusal(write(tmp_path, content)).message


def test_a_file_that_is_cut_off_while_it_is_read_is_refused(tmp_path, monkeypatch):
    wide = BaseShape(1, {**BASE.projections, "q_proj": (16, 1 << 13)})
    weights = write(tmp_path, tensors(((0, "q_proj"),), base=wide)) / "adapter_model.safetensors"

    def cut(*read):
        os.truncate(weights, weights.stat().st_size - 64)
        return _pair(*read)

    monkeypatch.setattr("adapters.checkpoint._pair", cut)
    assert refusal(tmp_path).message == "the file was cut off while it was read"


def test_missing_files(tmp_path):
    assert isinstance(refusal(tmp_path / "nothing"), AdapterNotFound)
    assert refusal(tmp_path).field == "adapter_config.json"
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert refusal(tmp_path).field == "adapter_model.safetensors"
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x02.")
    error = refusal(tmp_path)
    assert (error.field, "pickled" in error.message) == ("adapter_model.bin", True)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[1, 2]", b'{"r": 1, "r": 2}', b"{" + b" " * (1 << 20) + b"}"])
def test_broken_configs(tmp_path, raw):
    assert refusal(write(tmp_path, config=raw)).field == "adapter_config.json"


def test_an_adapter_of_another_base_is_refused(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path))
    with pytest.raises(AdapterError, match="the base model has 2 layers"):
        checkpoint.check_base(BaseShape(2, BASE.projections))
    with pytest.raises(AdapterError, match="q_proj maps 16 features to 16, the base model's 32 to 16"):
        checkpoint.check_base(BaseShape(3, {**BASE.projections, "q_proj": (16, 32)}))


def test_a_file_made_by_safetensors_reads_the_same(tmp_path):
    import torch
    from safetensors.torch import save_file

    content = tensors()
    values = {
        name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(s) for name, (_, s, data) in content.items()
    }
    expected = digest(tmp_path / "ours")
    write(tmp_path / "theirs", safetensors(content))
    save_file(values, tmp_path / "theirs" / "adapter_model.safetensors", metadata={"format": "pt"})
    assert open_checkpoint(tmp_path / "theirs").digest == expected


def test_adapters_have_the_dtypes_that_engines_read() -> None:
    assert tuple(FILE_DTYPES) == DTYPES
