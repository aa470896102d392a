"""A GPU's memory and launches at the seam of `kernels.platform.Platform`, without a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.cpu.platform import CpuPlatform
from kernels.ops import Ops
from kernels.platform import Platform, platform_of


class Card(CpuPlatform):
    """A device that computes on the CPU and whose memory is counted.

    total, others: its bytes, and those in use by other processes. weights: bytes of a loaded model. activations: the
    peak of a step. is_host: as in Platform; a card of its own has the defaults of a GPU, graphs and a warm-up.
    """

    name = "card"

    def __init__(
        self, total: int, *, weights: int = 0, others: int = 0, activations: int = 0, is_host: bool = False
    ) -> None:
        self.total, self.others, self.weights, self.activations = total, others, weights, activations
        self.is_host = is_host
        self.is_loaded = False

    def total_memory(self) -> int:
        return self.total

    def used_memory(self) -> int:
        return self.others + self.weights * self.is_loaded

    def watch_peak(self) -> Callable[[], int]:
        return lambda: self.activations

    def install(self, monkeypatch: pytest.MonkeyPatch, ops: Callable[[], Ops] | None = None) -> None:
        """Let engines find this card as the device `cpu`. ops: makes those that it computes with."""

        def with_card(device: torch.device) -> Platform:
            return self if device.type == "cpu" else platform_of(device)

        def load(device: torch.device, *sizes: Any) -> Ops:
            self.is_loaded = True  # the weights follow
            return self.ops(*sizes) if ops is None else ops()

        monkeypatch.setattr("engine.build.platform_of", with_card)
        monkeypatch.setattr("engine.build.pick_ops", load)
