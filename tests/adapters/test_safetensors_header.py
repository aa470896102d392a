"""The reader of safetensors headers: what the safetensors library writes is read, for every dtype that it has."""

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import _TYPES, save

from adapters.checkpoint import open_checkpoint
from adapters.manifest import AdapterError
from adapters.safetensors_header import DTYPE_BYTES, Entry, HeaderError, read_header
from engine.model.weights import open_weights
from kernels.dtypes import RAW_DTYPES
from testing.adapter_files import pack, write
from wire.errors import ConfigError

MIB = 1 << 20


def entries(raw: bytes) -> list[Entry]:
    return read_header(io.BytesIO(raw), len(raw), MIB)


def test_tensors_of_any_shape_come_in_the_order_of_their_data() -> None:
    tensors = {"scalar": torch.tensor(1.5), "none": torch.zeros(0, 3), "cube": torch.randn(2, 3, 4).half()}
    raw = save(tensors, metadata={"format": "pt"})
    read = entries(raw)
    assert {entry.name: entry.shape for entry in read} == {"scalar": (), "none": (0, 3), "cube": (2, 3, 4)}
    assert read[-1].end == len(raw)
    for entry in read:
        assert raw[entry.start : entry.end] == tensors[entry.name].numpy().tobytes()


def test_the_widths_of_dtypes_are_those_of_the_safetensors_library_and_of_the_engine() -> None:
    for table in (_TYPES, RAW_DTYPES):
        assert {name: DTYPE_BYTES[name] for name in table} == {name: dtype.itemsize for name, dtype in table.items()}


def test_a_tensor_of_an_unknown_dtype_may_have_any_size() -> None:
    [entry] = entries(pack({"a": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}}, bytes(8)))
    assert (entry.dtype, entry.num_bytes) == ("F4", 8)


def test_a_longer_header_than_the_caller_allows_is_refused_unread() -> None:
    raw = pack(b"{}".ljust(MIB + 8), b"")
    with pytest.raises(HeaderError, match="its header is longer than the file or than 1 MiB"):
        entries(raw)
    assert read_header(io.BytesIO(raw), len(raw), 2 * MIB) == []


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"1234", "is not a safetensors file: too short"),
        (pack([], b""), "is not a safetensors file: its header is not an object"),
        (pack(b'{"a": {}, "a": {}}', b""), "the key 'a' appears twice"),
        (pack({"a": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}, bytes(5)), "its tensors end at byte"),
    ],
)
def test_an_upload_and_a_base_model_are_refused_in_the_same_words(tmp_path: Path, raw: bytes, problem: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    with (
        pytest.raises(ConfigError, match=rf"model\.safetensors: .*{problem}"),
        open_weights(tmp_path, torch.float32, torch.device("cpu")),
    ):
        pass
    with pytest.raises(AdapterError, match=problem):
        open_checkpoint(write(tmp_path / "adapter", raw))
