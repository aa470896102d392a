"""Fixtures of the kernel tests: compiled on a GPU, in Triton's interpreter elsewhere (see tests/conftest.py)."""

import numpy as np
import pytest
import torch
import triton.language as tl

from kernels.gpu import attention_work
from kernels.threads import usable_cpus


@pytest.fixture(autouse=True)
def as_many_threads_as_cores():
    """Compute with a team of threads, also in the processes of `pytest -n` (see tests/conftest.py)."""
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cpus())
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def divide_attention_among_more_programs(monkeypatch):
    """Cut tiles as on 4 multiprocessors: a tile has first, middle and last pieces. Other tests have 2 and take less."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(attention_work, "_num_sms", lambda device: 4)


@pytest.fixture(autouse=True)
def round_fp8_as_hardware_does(monkeypatch):
    """Round as hardware does; Triton's interpreter loses a carry into the next power of two (125 becomes 64)."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_float(value, input_dtype, output_dtype, rounding_mode):
        if output_dtype == tl.float8e4nv and input_dtype == tl.float32:
            narrow = torch.from_numpy(np.ascontiguousarray(value).view(np.float32)).to(torch.float8_e4m3fn)
            return narrow.view(torch.uint8).numpy().reshape(value.shape)
        return convert(value, input_dtype, output_dtype, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
