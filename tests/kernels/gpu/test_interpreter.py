"""Triton's interpreter as the tests use it."""

import os

import pytest
from triton.runtime import interpreter


@pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="kernels are compiled here")
def test_the_interpreter_does_no_needless_work():
    """The tests of kernels and of engines with Triton take 2.5 times as long without it."""
    assert hasattr(interpreter._get_np_dtype, "scalars"), "tests/conftest.py calls testing.interpreter.speed_up"
