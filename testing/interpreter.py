"""Take needless work out of Triton's interpreter. Results and errors stay the same (triton 3.5 to 3.9)."""

import dataclasses
import functools
import os
from types import ModuleType
from typing import Any


def repeated(*values: Any) -> Any:
    """Return a case of a parameter grid that takes the same path through a kernel as another case.

    A GPU always runs it. The interpreter, which takes seconds, runs it only in `make test-all`.
    """
    import pytest  # a bare machine may lack it

    return pytest.param(*values, marks=pytest.mark.slow if os.environ["TRITON_INTERPRET"] == "1" else ())


def speed_up() -> None:
    """Halve the time of interpreted kernels. Do nothing if Triton's internals are unexpected."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter

        patch, np_dtype, builder = (
            interpreter._patch_builtin,
            interpreter._get_np_dtype,
            interpreter.interpreter_builder,
        )
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        signature = patch.__code__.co_varnames[: patch.__code__.co_argcount]
    except (AttributeError, ImportError, TypeError):
        return
    if hasattr(np_dtype, "scalars") or signature != ("pkg", "builder", "scope"):
        return
    # Each sum of integers is computed a second time in 64 bits, and the check of its range is then left out: `debug` is
    # off, as in a compiled kernel.
    if not options.debug:
        builder.options = options
    interpreter._patch_builtin = _patch_known_builtins(tl, interpreter)
    interpreter._get_np_dtype = _with_memory(tl, np_dtype)
    tl.block_type.__init__ = _with_known_shapes(tl, tl.block_type.__init__)


def _patch_known_builtins(tl: Any, interpreter: ModuleType) -> Any:
    """Return `_patch_builtin` with the members found once; each call of a device function searches them again."""
    packages = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor, tl.core.tensor_descriptor_base)
    names = {id(each): [n for n in dir(each) if tl.core.is_builtin(getattr(each, n, None))] for each in packages}
    search = interpreter._patch_builtin

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in names:
            search(package, builder, scope)
            return
        for name in names[id(package)]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    return patch


def _with_memory(tl: Any, np_dtype: Any) -> Any:
    """Return `_get_np_dtype` with a memory for scalars: it builds its table of all types in each call."""
    scalars = functools.cache(np_dtype)

    def remembering(dtype: Any) -> Any:
        if isinstance(dtype, tl.block_type):
            dtype = dtype.element_ty
        # Types of pointers have no hash.
        return np_dtype(dtype) if isinstance(dtype, tl.pointer_type) else scalars(dtype)

    remembering.scalars = scalars  # type: ignore[attr-defined]
    return remembering


def _with_known_shapes(tl: Any, check: Any) -> Any:
    """Return `block_type.__init__` with a memory for shapes: it checks and prints the shape of every value."""
    known: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in known:
            check(self, element_ty, shape)
            known[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = known[key]
        self.name = f"<{text}, {element_ty}>"

    return __init__
