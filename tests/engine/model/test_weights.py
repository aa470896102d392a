"""Safetensors folders: reading into place, shards, damage, and the memory that reading takes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.model import tensor_files as weights_file
from engine.model.tensor_files import NOT_FINITE, is_finite
from engine.model.weights import open_weights
from wire.errors import ConfigError

CPU = torch.device("cpu")
TENSORS = {"a": torch.randn(5, 8), "b": torch.randn(3, 8).bfloat16(), "bias": torch.randn(5).half()}


def save(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def test_tensors_are_read_under_one_another_in_one_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_file, "CHUNK_BYTES", 64)  # two rows of `a` at a time
    seen: list[tuple[int, int]] = []
    with open_weights(save(tmp_path), torch.float32, CPU, lambda _, done, total: seen.append((done, total))) as source:
        assert torch.equal(source.fused([("a", 5), ("b", 3)], 8), torch.cat([TENSORS["a"], TENSORS["b"].float()]))
        source.finish()
        assert torch.equal(source.get("bias", 5), TENSORS["bias"].float())
        assert "c" not in source
    assert seen == [(160, 218), (208, 218), (218, 218), (218, 218)]


def test_what_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    with open_weights(save(tmp_path), torch.float32, CPU) as source:
        with pytest.raises(ConfigError, match=r"^model: \S*/model\.safetensors: tensor c: missing$"):
            source.get("c", 4)
        with pytest.raises(ConfigError, match=r"^model: \S*: tensor a: shape \(5, 8\), the config says \(8, 5\)"):
            source.get("a", 8, 5)
    save_file({"a": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with (
        open_weights(tmp_path, torch.float32, CPU) as source,
        pytest.raises(
            ConfigError, match=r"^model: \S*: tensor a: dtype I8 is not served; expected one of F32, F16, BF16$"
        ),
    ):
        source.get("a", 2, 2)


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(ConfigError, match=r"two\.safetensors is in the index but missing"), _open(tmp_path):
        pass
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    with _open(tmp_path) as source:
        assert {"a", "b"} == set(source.files)
        with pytest.raises(ConfigError, match=rf"^model: {re.escape(str(tmp_path))}: tensor c: missing$"):
            source.get("c", 4)
        with pytest.raises(ConfigError, match=r"^model: \S*/two\.safetensors: tensor b: shape"):
            source.get("b", 4)
    index.write_text("[]")
    with pytest.raises(ConfigError, match="is not an index of weights"), _open(tmp_path):
        pass


def _open(folder: Path):
    return open_weights(folder, torch.float32, CPU)


CUT = r"is not a safetensors file: its header is longer than the file or than 256 MiB"
ENDS = r"its tensors end at byte \d+, the file at \d+; is it cut off\?"


@pytest.mark.parametrize(
    ("size", "problem"),
    [(4, "is not a safetensors file: too short"), (8, CUT), (50, CUT), (300, ENDS), (-1, ENDS), (-100, ENDS)],
)
def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, size: int, problem: str) -> None:
    file = save(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ConfigError, match=rf"^model: \S*model\.safetensors: {problem}$"), _open(tmp_path):
        pass


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged or cut off: it is empty$"), _open(tmp_path):
        pass


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"<!DOCTYPE html><p>404</p>", CUT),
        (b"\xff" * 64, CUT),
        (b"\0" * 64, "is not valid JSON: "),
        (b"\x02" + b"\0" * 7 + b"[]", "is not a safetensors file: its header is not an object$"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"^model: \S*model\.safetensors: {problem}"), _open(tmp_path):
        pass


def test_a_git_lfs_pointer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match=r"is a Git LFS pointer .* run git lfs pull"), _open(tmp_path):
        pass


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 64]}, "its data_offsets .* do not fit"),
        ({"dtype": "F32", "shape": [4.0, 4], "data_offsets": [0, 64]}, "expected a shape of whole numbers"),
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [-64, 0]}, "its data_offsets .* do not fit"),
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [0.0, 64.0]}, "its data_offsets .* do not fit"),
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [0]}, "its data_offsets .* do not fit"),
        ({"dtype": "F32", "shape": [4, 5], "data_offsets": [0, 64]}, r"its data_offsets \[0, 64\] do not fit shape"),
        ({"dtype": "F32", "shape": [4, 3], "data_offsets": [16, 64]}, "its data overlaps another tensor's or leaves a"),
        ({"dtype": "F4", "shape": [4, 4], "data_offsets": [64, 0]}, "its data_offsets .* do not fit"),
        ({"dtype": ["F32"], "shape": [4, 4], "data_offsets": [0, 64]}, "expected the name of a dtype, got"),
        ({"dtype": "F32", "shape": "44", "data_offsets": [0, 64]}, "expected a shape of whole numbers"),
        ({"dtype": "F32", "data_offsets": [0, 64]}, "expected a shape of whole numbers"),
        ([], "expected an object with dtype, shape and data_offsets"),
    ],
)
def test_a_tensor_that_the_header_describes_wrongly_is_named(tmp_path: Path, entry: Any, problem: str) -> None:
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(ConfigError, match=rf"^model: \S*model\.safetensors: tensor a: {problem}"), _open(tmp_path):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (17, 21), (31, 63)])
def test_a_weight_that_is_no_number_is_refused_by_name(
    dtype: torch.dtype, value: float, place: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last place is in the last of several chunks."""
    monkeypatch.setattr(weights_file, "CHUNK_BYTES", 1024)
    weight = torch.randn(32, 64).to(dtype)
    weight[place] = value
    save_file(
        {"a.weight": torch.randn(32, 64), "b.weight": weight, "b.bias": torch.ones(32)}, tmp_path / "m.safetensors"
    )
    refusal = rf"^model: {re.escape(str(tmp_path / 'm.safetensors'))}: tensor b\.weight: {NOT_FINITE}$"
    for quantization in ("auto", "none", "int8", "int4"):
        with (
            open_weights(tmp_path, torch.bfloat16, CPU, quantization=quantization) as source,
            pytest.raises(ConfigError, match=refusal),
        ):
            source.linear([("a", 32), ("b", 32)], 64)
    with open_weights(tmp_path, torch.bfloat16, CPU) as source, pytest.raises(ConfigError, match=refusal):
        source.get("b.weight", 32, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_weights_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    """Their sums and squares are infinite."""
    weight = torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype)
    tensors = {"one": weight, "both": weight * torch.randn(64, 64).sign().to(dtype), "low": -weight}
    save_file(tensors, tmp_path / "model.safetensors")
    with open_weights(tmp_path, dtype, CPU) as source:
        for name, tensor in tensors.items():
            assert torch.equal(source.get(name, 64, 64), tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_every_pattern_of_bits_is_told_finite_or_not(dtype: torch.dtype) -> None:
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    every = torch.arange(1 << 8 * dtype.itemsize).to(bits).view(dtype)
    finite = every.float().isfinite()
    assert is_finite(every.view(bits)[finite].view(dtype))
    others = every.view(bits)[~finite]
    assert len(others) in (2, 256, 2048)
    for number in others:
        assert not is_finite(torch.stack((torch.zeros_like(number), number)).view(dtype)), number


def test_reading_for_a_size_reads_no_values(tmp_path: Path) -> None:
    save_file({"a": torch.full((4, 32), torch.nan)}, tmp_path / "model.safetensors")
    with open_weights(tmp_path, torch.float32, torch.device("meta")) as source:
        assert source.get("a", 4, 32).shape == (4, 32)


PEAK = """
import resource, sys, torch
from pathlib import Path
from engine.model.weights import open_weights
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with open_weights(Path(sys.argv[1]), torch.bfloat16, torch.device("cpu")) as source:
    before = peak()
    kept = [source.get(str(i), 1 << 12, 1 << 12) for i in range(6)]
    print(peak() - before, sum(t.nbytes for t in kept))
"""


@pytest.mark.usefixtures("takes_a_core")
def test_peak_memory_of_reading_is_that_of_the_tensors(tmp_path: Path) -> None:
    """Peak memory is that of the tensors: fp32 on disk, bf16 in memory, 384 MiB are read into 192 MiB."""
    save_file({str(i): torch.full((1 << 12, 1 << 12), float(i)) for i in range(6)}, tmp_path / "model.safetensors")
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    grown, held = map(int, run.stdout.split())
    assert held == 192 << 20
    assert grown < held + 2 * weights_file.CHUNK_BYTES
