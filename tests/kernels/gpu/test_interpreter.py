"""Triton's interpreter as the tests use it."""

import math
import os
from itertools import product
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import IncompatibleTypeErrorImpl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "1", reason="kernels are compiled here")

DTYPES = [tl.int1, tl.int32, tl.int64, tl.uint8, tl.float16, tl.bfloat16, tl.float32, tl.float64]
TYPES = [*DTYPES, tl.float8e4nv, tl.pointer_type(tl.float32), tl.pointer_type(tl.int32)]
NUMBERS = [0, 1, -1, 2, 300, 2**31, 2**40, -(2**31), True, False, 0.0, -0.0, 0.5, -2.0, 1e300, math.inf, math.nan]
FLAGS = [{}, {"div_or_mod": True}, {"arithmetic_check": False}, {"allow_lhs_ptr": True, "allow_rhs_ptr": True}]


def test_the_interpreter_does_no_needless_work():
    """The tests of kernels and of engines with Triton take three times as long without it."""
    assert hasattr(interpreter._get_np_dtype, "scalars"), "tests/conftest.py calls testing.interpreter.speed_up"


def value(dtype: Any, shape: tuple[int, ...]) -> Any:
    data = np.ones(shape or (1,), interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def outcome(check: Any, lhs: Any, rhs: Any, flags: dict[str, bool]) -> Any:
    """Return types, shapes and bytes of both operands, or the kind of error."""
    try:
        found = check(interpreter.interpreter_semantic, lhs, rhs, **flags)
    except (ArithmeticError, AssertionError, AttributeError, TypeError, ValueError, IncompatibleTypeErrorImpl) as error:
        return type(error)
    return [(str(each.type), each.handle.dtype.name, each.handle.data.tobytes()) for each in found]


def test_operands_are_what_tritons_own_function_makes_of_them():
    """Each pair comes twice: the second time its types, and the tensor of its number, are known."""
    quick = type(interpreter.interpreter_semantic).binary_op_type_checking_impl
    values = [value(dtype, shape) for dtype, shape in product(TYPES, [(), (4,), (2, 4)])]
    pairs = [*product(values, values), *product(values, NUMBERS), *product(NUMBERS, values), *product(NUMBERS, NUMBERS)]
    refused = 0
    with np.errstate(over="ignore"):
        for (lhs, rhs), flags in product(pairs, FLAGS):
            expected = outcome(quick.__wrapped__, lhs, rhs, flags)
            found = [outcome(quick, lhs, rhs, flags) for _ in range(2)]
            assert found == [expected, expected], (lhs.__class__, rhs, flags)
            refused += isinstance(expected, type)
    assert refused > 100


def test_an_array_wider_than_its_type_is_refused():
    with pytest.raises(ValueError, match="exceeds dtype primitive_bitwidth"):
        interpreter.TensorHandle(np.zeros(4, np.int64), tl.int32)
    assert interpreter.TensorHandle(np.zeros(4, np.bool_), tl.int1).attr == {}
    interpreter.TensorHandle(np.zeros(4, np.uint64), tl.pointer_type(tl.int8))
