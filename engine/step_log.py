"""Sums of the engine's steps by second of the clock, with the least time that the device needed for them."""

import time
from collections import deque
from typing import NamedTuple

from engine.model.config import ModelConfig
from engine.state import SecondSums
from kernels.roofline import Roofline

# Number of past seconds that a report contains. A gateway reads a report every second, so a late one misses none.
RECENT = 5


class StepWork(NamedTuple):
    """Work of a step by its size. Norms and the products of attention and LoRA are left out, so it is a lower bound.

    layer_elements, head_elements: numbers of the matrices' elements. weight_bytes: bytes of the matrices in memory.
    kv_bytes: bytes of a token's keys and values in all layers.
    """

    layer_elements: int
    head_elements: int
    weight_bytes: int
    kv_bytes: int

    @classmethod
    def of(cls, model: ModelConfig, weight_bytes: int, kv_bytes: int) -> "StepWork":
        attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
        layer = model.hidden_size * (attention + 3 * model.intermediate_size)
        return cls(model.num_layers * layer, model.vocab_size * model.hidden_size, weight_bytes, kv_bytes)

    def seconds(
        self, roofline: Roofline, *, rows: float, decodes: float, context: float, adapter_bytes: int = 0
    ) -> float:
        """Return the least time of a step. context: tokens of its requests, whose keys and values it reads.
        adapter_bytes: bytes of the adapter pages that it reads.
        """
        flops = 2 * (self.layer_elements * rows + self.head_elements * decodes)
        return roofline.seconds(self.weight_bytes + context * self.kv_bytes + adapter_bytes, flops)


class StepLog:
    """Log of the steps. Only the core's thread writes and reads it. roofline: None until it is measured."""

    def __init__(self, work: StepWork) -> None:
        self.work = work
        self.roofline: Roofline | None = None
        # The second in progress and those before it.
        self._seconds: deque[SecondSums] = deque(maxlen=RECENT + 1)

    def add(self, seconds: float, *, decodes: int, prompt_tokens: int, context: int) -> None:
        """Count a step that has just ended. A step counts in the second of its end."""
        now = int(time.time())
        if not self._seconds or self._seconds[-1].at != now:
            self._seconds.append(SecondSums(now, roofline=None if self.roofline is None else 0.0))
        sums = self._seconds[-1]
        sums.steps += 1
        sums.seconds += seconds
        sums.longest = max(sums.longest, seconds)
        sums.prompt_tokens += prompt_tokens
        sums.decodes += decodes
        if self.roofline is not None and sums.roofline is not None:
            rows = decodes + prompt_tokens
            least = self.work.seconds(self.roofline, rows=rows, decodes=decodes, context=context)
            # If the device was busy while its roofline was measured, `least` may exceed the real time.
            sums.roofline += min(seconds, least)

    def recent(self) -> tuple[SecondSums, ...]:
        """Return the last seconds that have ended and had steps, the oldest first."""
        now = int(time.time())
        return tuple(each for each in self._seconds if each.at < now)[-RECENT:]
