"""Double of CUDA graphs for kernels in Triton's interpreter: records the work of a step and repeats exactly that."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

Step = Callable[[], Tensor]

# Operations that read the device's values on the host, which a CUDA graph cannot contain.
WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten._unique2.default,
}


def check_no_wait(func: Any, args: Any) -> None:
    """Assert that an operation does not wait for the device: it reads no value, and selects by no mask."""
    assert func not in WAITING, f"{func} waits for the device"
    if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        indices = [index for index in args[1] if index is not None]
        assert not any(index.dtype in (torch.bool, torch.uint8) for index in indices), f"{func} by a mask waits"


# Methods that read a value; `to` does so only if its target is the host. In inference mode torch shows a dispatch mode
# none of them. It never shows a copy to the CPU of a tensor that is already there.
READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "to")


@contextmanager
def no_reads(is_watched: Callable[[], bool]) -> Iterator[None]:
    """Assert in the block that no method reads a tensor's value while `is_watched`."""
    originals = {name: getattr(Tensor, name) for name in READS}

    def checked(name: str) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_read = name != "to" or _names_host(*args[:1], kwargs.get("device"))
            assert not (is_read and is_watched()), f"{name} waits for the device"
            return originals[name](tensor, *args, **kwargs)

        return read

    for name in READS:
        setattr(Tensor, name, checked(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)


def _names_host(*targets: Any) -> bool:
    return any(isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu" for target in targets)


class UncompiledMode(TorchDispatchMode):
    """Mode whose first operation does not import the compiler of torch, which takes a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap `__torch_dispatch__` so that the compiler, which nothing here uses, leaves it out.
        return False


class _Watching(UncompiledMode):
    """Mode in whose context no method reads a tensor's value, except while the mode is disabled."""

    def __enter__(self) -> Any:
        self._block = no_reads(lambda: self.is_watching and _get_current_dispatch_mode() is self)
        self._block.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._block.__exit__(*error)

    @property
    def is_watching(self) -> bool:
        return True


class NothingWaits(_Watching):
    """Asserts that no operation of torch in its context waits for the device. Kernel launches are not looked into."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_no_wait(func, args)
        return func(*args, **kwargs or {})


class _Recorder(_Watching):
    """Appends every operation of torch to `work`, as a call that repeats it on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []
        self._is_launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_launching:  # the interpreter's own
            return func(*args, **kwargs)
        check_no_wait(func, args)
        result = func(*args, **kwargs)
        self.work.append(lambda: _repeat(func, args, kwargs, result))
        return result

    @property
    def is_watching(self) -> bool:
        return not self._is_launching

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Record kernel launches too."""
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def recording(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._is_launching = True
            try:
                launch(executor, *args, **kwargs)
            finally:
                self._is_launching = False
            self.work.append(lambda: launch(executor, *args, **kwargs))

        GridExecutor.__call__ = recording
        try:
            yield
        finally:
            GridExecutor.__call__ = launch


def _repeat(func: Any, args: Any, kwargs: Any, before: Any) -> None:
    """Run an operation again and put its results where the first run put them."""
    results = zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True)
    for old, new in results:
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class RecordingPlatform:
    """`kernels.platform.Platform` of the CPU whose graphs repeat recorded work; `step` itself is called once."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def capture(self, step: Step, pool: Any) -> tuple[Step, Any]:
        with _Recorder() as recorder, recorder.launches():
            result = step()

        def replay() -> Tensor:
            for repeat in recorder.work:
                repeat()
            return result

        return replay, pool
