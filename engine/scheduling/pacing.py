"""Bound the prompt work of a step beside running streams, so that a long prompt does not stall them.

Learns two times from past steps: the duration of a step of decodes alone, and the time that each further row adds, be
it a prompt's token or another stream's. A mixed step then gets as many prompt tokens as stretch it to `stretch` times
the decode step (Sarathi-Serve's chunk budget, Agrawal et al., OSDI 2024, measured while serving instead of profiled).
Has no clock: the engine passes the times.

A mixed step may also have a fixed cost, the same for 4 prompt tokens and for 400: on a GPU it is launched kernel by
kernel, while a decode step is one graph. Such a cost looks like expensive rows, and ever smaller chunks would pay it
ever more often. So the pacer sometimes tries a chunk of double size. If most of the time does not grow with it, the
larger size becomes the least chunk, up to the size at which the rows cost about as much as the rest. A regression over
past steps cannot separate the two costs: chunks are cut so that steps take equally long, so large chunks are those of
cheap rows.
"""

from collections import deque
from typing import NamedTuple

# A prompt must come forward however slow the machine looks. No more than a few tokens: at thousands of keys before them
# 16 made steps of 8 streams on two CPU cores three times as long, 4 leave them within the stretch that is asked for.
LEAST_CHUNK = 4
# Steps with prompts in them after which one goes without: the machine and the streams may have changed since the last.
STEPS_UNTIL_ALONE = 16
# The room beside the streams grows with this power of the patience: 32 times where prompts weigh twice as much. The sum
# of all waiting would be least with no room below 1 and all of it above; this keeps streams moving near the middle.
STEEPNESS = 5
_MEMORY = 0.9  # weight of the past in each moving average
# Marginal cost of a row as a share of its average cost. Below the first bound the fixed cost dominates and chunks
# double; above the second it is negligible and the learnt least chunk is dropped.
MOSTLY_FIXED, HARDLY_FIXED = 0.5, 0.8
# Steps with prompts between two trials of a double chunk: few while trials succeed, doubled after each failure, so that
# streams on a machine without a fixed cost see almost no trials.
FIRST_TRIAL, LAST_TRIAL = 2, 4096


class _Step(NamedTuple):
    """A step with prompts: prompt tokens, rows beyond the usual decodes, seconds beyond the decode step."""

    tokens: int
    rows: float
    spent: float


class Pacer:
    """stretch: how much longer a decode step may get for the prompts' sake; 2 = twice as long."""

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._decode_seconds: float | None = None
        self._decodes = 0.0  # streams in the steps that decode_seconds was learnt from
        # Sums, not an average of quotients: a slow step with few rows in it would count for as much as one with many.
        self._rows = 0.0
        self._spent = 0.0
        self._steps_since_alone = 0
        self._least_chunk = LEAST_CHUNK
        self._recent: deque[_Step] = deque(maxlen=4)
        self._steps_since_trial = 0
        self._trial_interval = FIRST_TRIAL

    def prompt_budget(self, num_decodes: int, most: int, patience: float = 1.0) -> int:
        """Return the prompt tokens that a step with so many decodes may compute, at most `most`.

        patience: weight of the prompts against the streams (defined by `Scheduler`); values below 1 count as 1. Above
        1, delaying the streams costs less in total than delaying the prompts.
        """
        if self._steps_since_alone >= STEPS_UNTIL_ALONE:
            return 0
        if self._decode_seconds is None or not self._rows:
            return min(most, LEAST_CHUNK)
        each = max(self._spent / self._rows, 1e-3 * self._decode_seconds)
        # The number of streams may have moved on since a step was theirs alone.
        grown = self._decode_seconds + (num_decodes - self._decodes) * each
        room = (self._stretch - 1) * max(patience, 1.0) ** STEEPNESS * max(grown, 0.5 * self._decode_seconds)
        chunk = max(self._least_chunk, int(room / each))
        if self._is_trial_due:
            chunk *= 2
        elif self._steps_since_alone == STEPS_UNTIL_ALONE - 3 and chunk == self._least_chunk > LEAST_CHUNK:
            chunk //= 2  # the fixed cost may be gone
        return min(most, chunk)

    def observe(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
        """Record that a step took `seconds` for so many decoding requests and prompt tokens."""
        if num_decodes and not num_prompt_tokens:
            self._steps_since_alone = 0
            self._decode_seconds = _average(self._decode_seconds, seconds)
            self._decodes = _average(self._decodes or None, num_decodes)
            return
        rows, spent = float(num_prompt_tokens), seconds
        # Beside no decodes the weights' reading is in the time as well, which errs on the streams' side.
        if num_decodes and self._decode_seconds is not None:
            rows, spent = rows + num_decodes - self._decodes, seconds - self._decode_seconds
            self._compare(_Step(num_prompt_tokens, rows, spent))
        self._steps_since_alone += bool(num_decodes)
        if rows >= 1:
            self._rows = _MEMORY * self._rows + rows
            self._spent = _MEMORY * self._spent + spent

    @property
    def _is_trial_due(self) -> bool:
        """Return whether the next chunk is a trial. Never true twice in a row, so that each trial follows a usual
        step.
        """
        is_due = self._steps_since_trial >= self._trial_interval and len(self._recent) >= FIRST_TRIAL
        return is_due and self._steps_since_alone % 2 == 0 and self._steps_since_alone > 0

    def _compare(self, step: _Step) -> None:
        """Learn the least chunk from a step whose size differs from the steps before it.

        Compares it with the quickest of these: a step that lost its core to another program looks expensive and must
        not make a double chunk look cheap.
        """
        usual = min(self._recent, key=lambda before: before.spent, default=step)
        if usual.tokens < 1.6 * step.tokens and step.tokens < 1.6 * usual.tokens:
            self._recent.append(step)
            self._steps_since_trial += 1
            return
        each = usual.spent / max(usual.rows, 1.0)
        # When streams come or go, steps with other token counts can have equal rows: these say nothing about the cost.
        wider = step.rows - usual.rows
        share = (step.spent - usual.spent) / wider / each if each > 0 and wider else 1.0
        if step.tokens < usual.tokens:
            if usual.tokens <= self._least_chunk and share > HARDLY_FIXED:
                self._set_least_chunk(step)
        elif not self._is_trial_due:
            self._recent.clear()  # another prompt's chunk, or a change of patience
        elif share < MOSTLY_FIXED:
            self._set_least_chunk(step)
            self._trial_interval = FIRST_TRIAL
        else:
            self._trial_interval = min(2 * self._trial_interval, LAST_TRIAL)
        self._steps_since_trial = 0

    def _set_least_chunk(self, step: _Step) -> None:
        """Make the step's size the least chunk and forget the usual steps, which had other sizes."""
        self._least_chunk = max(LEAST_CHUNK, step.tokens)
        self._recent.clear()
        self._recent.append(step)


def _average(old: float | None, new: float) -> float:
    return new if old is None else _MEMORY * old + (1 - _MEMORY) * new
