"""Start of an activated LoRA (aLoRA; Greenewald et al. 2025) in a prompt."""

from collections.abc import Sequence

import numpy as np

from engine.scheduling.request import NEVER


def adapter_start(prompt: Sequence[int], invocation: Sequence[int]) -> int:
    """Return the position of the first token that uses the adapter: 0 without an invocation, NEVER if it is missing.

    The adapter applies from the first token of the last complete occurrence, as in PEFT. Generated tokens are not
    searched.
    """
    if not invocation:
        return 0
    num_starts = len(prompt) - len(invocation) + 1
    if num_starts < 1:
        return NEVER
    tokens, found = np.asarray(prompt, np.int64), np.ones(num_starts, np.bool_)
    for i, token in enumerate(invocation):
        found &= tokens[i : i + num_starts] == token
    starts = np.flatnonzero(found)
    return int(starts[-1]) if len(starts) else NEVER
