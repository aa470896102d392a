"""Data of logit edits that is kept between steps, so that a step's cost does not depend on the length of the text.
Owned by the engine's thread.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.execution.transfer import upload

# Value of a ban in `Edits`, which is not read.
BAN = 0.0


class TokenCounts:
    """The distinct tokens of a growing list, from `start` on, and the number of each."""

    __slots__ = ("_counts", "_next", "_places", "_tokens")

    def __init__(self, start: int) -> None:
        self._next = start
        self._places: dict[int, int] = {}
        self._tokens = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)

    def update(self, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Count the tokens since the last call. Return the tokens and their counts; the next call changes both."""
        if not self._places and len(token_ids) > self._next:
            self._tokens, self._counts = np.unique(np.array(token_ids[self._next :], np.int64), return_counts=True)
            self._places = {token: place for place, token in enumerate(self._tokens.tolist())}
        else:
            for token in token_ids[self._next :]:
                self._add(token)
        self._next = len(token_ids)
        return self._tokens[: len(self._places)], self._counts[: len(self._places)]

    def _add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            room = max(64, place)
            self._tokens = np.concatenate((self._tokens, np.zeros(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.int64)))
        self._tokens[place] = token
        self._counts[place] += 1


class LogitEdits:
    """Edits of one request's logits.

    bias_ids, bias: `logit_bias`.
    ends: tokens that are banned before `min_tokens`.
    all, output: token counts of prompt and answer together, and of the answer alone.
    """

    __slots__ = ("all", "bias", "bias_ids", "ends", "output")

    def __init__(self, bias: Mapping[int, float], ends: Iterable[int], num_prompt_tokens: int) -> None:
        self.bias_ids = np.array(list(bias), np.int64)
        self.bias = np.array(list(bias.values()), np.float32)
        self.ends = np.array(sorted(ends), np.int64)
        self.all = TokenCounts(0)
        self.output = TokenCounts(num_prompt_tokens)


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
