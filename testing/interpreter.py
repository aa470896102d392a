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
    """Divide the time of interpreted kernels by five. Do nothing if Triton's internals are unexpected."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter

        patch, np_dtype, builder = (
            interpreter._patch_builtin,
            interpreter._get_np_dtype,
            interpreter.interpreter_builder,
        )
        options = dataclasses.replace(builder.options, sanitize_overflow=False)
        semantic = type(interpreter.interpreter_semantic)
        patch_lang, broadcast, unwrap, operands = (
            interpreter._patch_lang,
            semantic.broadcast_impl_value,
            tl.core._unwrap_if_constexpr,
            semantic.binary_op_type_checking_impl,
        )
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
    interpreter._patch_lang = _patch_once(tl, patch_lang)
    interpreter._get_np_dtype = _WithMemory(tl, np_dtype)
    tl.block_type.__init__ = _with_known_shapes(tl, tl.block_type.__init__)
    tl.dtype.__eq__ = _with_identity(tl.dtype.__eq__)
    tl.core._unwrap_if_constexpr = _with_plain_values(tl, unwrap)
    tl.tensor.__init__ = _with_shared_shapes(tl, tl.tensor.__init__)
    semantic.broadcast_impl_value = _with_equal_shapes(broadcast)
    semantic.binary_op_type_checking_impl = _with_known_operands(tl, operands)
    interpreter.TensorHandle.__init__ = _checking_handle(tl)
    tl.dtype.is_int = _is_int(tl)


def _patch_known_builtins(tl: Any, interpreter: ModuleType) -> Any:
    """Return `_patch_builtin` with the members found once; each launch searches them again."""
    packages = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor, tl.core.tensor_descriptor_base)
    names = {id(each): [n for n in dir(each) if tl.core.is_builtin(getattr(each, n, None))] for each in packages}
    search, semantic = interpreter._patch_builtin, interpreter.interpreter_semantic
    checked = tl.core.builtin(search).__code__

    @functools.cache
    def interpreted(member: Any) -> Any:
        # `builtin` checks in each call that `_semantic` is there.
        call = member.__wrapped__ if member.__code__ is checked else member

        def with_semantic(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return call(*args, **kwargs)

        return with_semantic

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in names:
            search(package, builder, scope)
            return
        for name in names[id(package)]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                scope.set_attr(package, name, interpreted(member))

    return patch


def _patch_once(tl: Any, patch: Any) -> Any:
    """Return `_patch_lang` that patches a package once in a launch; each call of a device function does it again."""
    active: set[frozenset[int]] = set()
    packages = functools.cache(
        lambda fn: frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
    )

    def patch_lang(fn: Any) -> Any:
        key = packages(fn)
        if key in active:
            return None
        is_launch = not active
        scope = patch(fn)
        active.add(key)
        if is_launch:
            restore = scope.restore

            def end() -> None:
                active.clear()
                restore()

            scope.restore = end
        return scope

    return patch_lang


class _WithMemory:
    """Cache of `_get_np_dtype` for scalars. The function builds its table of all types in each call."""

    def __init__(self, tl: Any, np_dtype: Any) -> None:
        self._block, self._pointer, self._np_dtype = tl.block_type, tl.pointer_type, np_dtype
        self.scalars = functools.cache(np_dtype)

    def __call__(self, dtype: Any) -> Any:
        if isinstance(dtype, self._block):
            dtype = dtype.element_ty
        # Types of pointers have no hash.
        return self._np_dtype(dtype) if isinstance(dtype, self._pointer) else self.scalars(dtype)


def _with_known_shapes(tl: Any, check: Any) -> Any:
    """Return `block_type.__init__` with a memory for shapes: it checks and prints the shape of every value."""
    known: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_shape: dict[int, tuple[Any, int, str]] = {}  # by the id of a shape in `known`

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        found = of_shape.get(id(shape))
        if found is None:
            key = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
            if key not in known:
                check(self, element_ty, shape)
                known[key] = self.shape, self.numel, str(self.shape)
                of_shape[id(self.shape)] = known[key]
            found = known[key]
        self.element_ty = element_ty
        self.shape, self.numel, text = found
        self.name = f"<{text}, {element_ty}>"

    return __init__


def _with_shared_shapes(tl: Any, make: Any) -> Any:
    """Return `tensor.__init__` that makes the shape and the number of elements once for each shape."""
    known: dict[int, tuple[Any, Any, Any]] = {}
    scalar, no_shape = tl.constexpr(1), tl.core.tuple([])

    def __init__(self: Any, handle: Any, type: Any) -> None:
        if not type.is_block():
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = scalar, no_shape
            return
        found = known.get(id(type.shape))
        if found is None:
            make(self, handle, type)
            # Stores the shape too, so that its id is not reused.
            known[id(type.shape)] = self.shape, self.numel, type.shape
            return
        self.handle, self.type, self.dtype = handle, type, type.element_ty
        self.shape, self.numel, _ = found

    return __init__


def _with_equal_shapes(broadcast: Any) -> Any:
    """Return `broadcast_impl_value` that returns operands of one shape as they are."""

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_impl_value


def _with_known_operands(tl: Any, check: Any) -> Any:
    """Return `binary_op_type_checking_impl` that casts no operands of types which needed no cast before, and that makes
    the tensor of a Python number once for each type and shape beside it. Both took a third of a kernel's time.
    """
    tensor, plain = tl.tensor, set[tuple[Any, ...]]()
    constants: dict[tuple[Any, ...], Any] = {}

    def constant_key(number: Any, beside: Any, *options: Any) -> tuple[Any, ...]:
        # 0, 0.0, -0.0 and False are equal. Shapes are shared by all tensors that have them.
        return number or str(number), type(number), beside.dtype.name, id(beside.shape), *options

    @functools.wraps(check)
    def operands(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> tuple[Any, Any]:
        if type(lhs) is tensor and type(rhs) is tensor:
            key: tuple[Any, ...] = lhs.dtype.name, rhs.dtype.name, flags, *named.items()
            if key in plain:
                return self.broadcast_impl_value(lhs, rhs)
            found = check(self, lhs, rhs, *flags, **named)
            if (found[0].dtype.name, found[1].dtype.name) == key[:2]:
                plain.add(key)
            return found
        if type(lhs) is tensor and type(rhs) in (int, float, bool):
            key = constant_key(rhs, lhs, "right", flags, *named.items())
            if key in constants:
                return lhs, constants[key]
            found = check(self, lhs, rhs, *flags, **named)
            if found[0] is lhs:
                constants[key] = found[1]
        elif type(rhs) is tensor and type(lhs) in (int, float, bool):
            key = constant_key(lhs, rhs, "left", flags, *named.items())
            if key in constants:
                return constants[key], rhs
            found = check(self, lhs, rhs, *flags, **named)
            if found[1] is rhs:
                constants[key] = found[0]
        else:
            return check(self, lhs, rhs, *flags, **named)
        if len(constants) > 4096:
            constants.clear()
        return found

    return operands


def _checking_handle(tl: Any) -> Any:
    """Return `TensorHandle.__init__` with its check of the array's type in line, without two more calls."""
    pointer = tl.pointer_type

    def __init__(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1 and type(dtype) is not pointer and 8 * data.itemsize > dtype.primitive_bitwidth:
            self.__post_init__()

    return __init__


def _is_int(tl: Any) -> Any:
    """Return `dtype.is_int` with one set of all names, which each call would join from two lists."""
    names = frozenset((*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES))
    return lambda self: self.name in names


def _with_identity(equals: Any) -> Any:
    """Return `dtype.__eq__` that compares the names of two objects only."""
    return lambda self, other: self is other or equals(self, other)


def _with_plain_values(tl: Any, unwrap: Any) -> Any:
    """Return `_unwrap_if_constexpr` that does not ask of a common type whether it is a list or a tuple."""
    plain = frozenset((int, bool, float, str, type(None), tl.tensor, tl.dtype))

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    return unwrap_if_constexpr
