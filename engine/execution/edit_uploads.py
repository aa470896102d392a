"""Logit edits of a step, uploaded to the device only if they changed. Owned by the engine's thread."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.execution.transfer import upload

# Value of a ban in `Edits`, which is not read.
BAN = 0.0


class Edits:
    """(row, token, value) triples of many rows. Each (row, token) has one value."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, np.ndarray, np.ndarray | float]] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, row: int, ids: np.ndarray, values: np.ndarray | float) -> None:
        self._parts.append((row, ids, values))

    def upload(self, device: torch.device) -> list[Tensor]:
        lengths = [len(ids) for _, ids, _ in self._parts]
        values = [np.broadcast_to(np.asarray(v, np.float32), len(ids)) for _, ids, v in self._parts]
        rows = np.repeat([row for row, _, _ in self._parts], lengths)
        return upload(device, [rows, np.concatenate([ids for _, ids, _ in self._parts]), np.concatenate(values)])

    def upload_unless(self, kept: "Uploaded", device: torch.device) -> "Uploaded":
        """Return `kept` if its arrays are these very arrays, in the same rows; else upload. An array must not change
        once it is added.
        """
        if len(kept.parts) == len(self._parts) and all(
            row == old_row and ids is old_ids and values is old_values
            for (row, ids, values), (old_row, old_ids, old_values) in zip(self._parts, kept.parts, strict=True)
        ):
            return kept
        return Uploaded(self._parts, self.upload(device))


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Edits and their tensors on the device. It keeps the arrays, so that no other array can take their identity."""

    parts: list[tuple[int, np.ndarray, np.ndarray | float]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class KeptEdits:
    """Edits of the latest step that had some, on the device. A step of the same requests uploads nothing."""

    biased: Uploaded = field(default_factory=Uploaded)
    banned: Uploaded = field(default_factory=Uploaded)
