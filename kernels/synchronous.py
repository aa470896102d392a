"""Common part of the platforms whose calls return when their work is done: the host and the simulated device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Done:
    """Event without work before it."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class SynchronousCopyStream:
    """Copy stream without work to wait for.

    A copy does nothing: the source is the target, or the target has no memory.
    """

    def record_event(self) -> Done:
        return Done()

    def wait(self, event: Any) -> None:
        pass

    def copy(self, target: Tensor, source: Tensor) -> Done:
        return Done()


class SynchronousPlatform:
    def __init__(self, device: torch.device | None = None) -> None:
        """device: the only one of its kind."""

    def is_available(self) -> bool:
        return True

    def release_memory(self) -> None:
        pass

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def record_event(self) -> Done:
        return Done()

    def capture(self, step: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], Tensor], Any]:
        return step, pool
