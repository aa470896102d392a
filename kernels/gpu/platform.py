"""`kernels.platform.Platform` of an NVIDIA GPU: streams, pinned memory, CUDA graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.ops import Ops


class CudaPlatform:
    name = "GPU"
    is_host = False
    has_ops = True
    # The matrix products wait for the weights up to about 200 rows, and launching a mixed step costs milliseconds.
    min_prompt_tokens = 256

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def ops(
        self,
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        kv_dtype: torch.dtype | None,
        lora_dtype: torch.dtype | None,
    ) -> Ops:
        from kernels.gpu.ops import TritonOps
        from kernels.gpu.scaled import CAPABILITY

        return TritonOps(fp8_products=torch.cuda.get_device_capability(self._device) >= CAPABILITY)

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def used_memory(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def watch_peak(self) -> Callable[[], int]:
        # Torch keeps every segment that a step needed, and so do libraries with their workspaces: nothing falls again
        # before `release_memory`.
        before = self.used_memory()
        return lambda: max(0, self.used_memory() - before)

    def release_memory(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, *, huge_pages: bool = False) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, device=self._device)

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def record_event(self) -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    def copy_stream(self) -> "CudaCopyStream":
        return CudaCopyStream(self._device)

    def capture(self, step: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], Tensor], Any]:
        # Run once outside the graph, so that kernels are compiled and libraries allocate their workspaces.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay, graph.pool()


class CudaCopyStream:
    """Copy stream on a CUDA stream of the lowest priority, which is also the default."""

    in_place = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def record_event(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event)

    def copy(self, target: Tensor, source: Tensor) -> Any:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event(blocking=True)  # a waiting thread sleeps, because the step loop needs the cores
        done.record(self._stream)
        return done

    def upload(self, tensor: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            return tensor.to(self._device)
