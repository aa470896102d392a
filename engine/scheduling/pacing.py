"""Pacer of prompt work: bounds the prompt tokens in a step with decodes, so that a long prompt does not stall them.

It learns two times from past steps: the duration of a step with decodes only, and the time that each further row adds,
whether a prompt token or another decode. A mixed step then gets as many prompt tokens as make it `stretch` times as
long as the decode step (Sarathi-Serve's chunk budget, Agrawal et al., OSDI 2024, measured while serving instead of
profiled). The pacer has no clock: the engine passes the times.

A mixed step may also have a fixed cost, the same for 4 prompt tokens and for 400: on a GPU it is launched kernel by
kernel, while a decode step is one graph. A fixed cost looks like expensive rows, so chunks would shrink, and more
chunks would pay it more often. The pacer therefore sometimes tries a chunk of double size. If most of the step's time
does not grow with the chunk, the larger size becomes the minimum, up to the size at which the rows cost about as
much as the rest. A regression over past steps cannot separate the two costs: chunks are sized so that steps take
equally long, so large chunks have cheap rows.
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

# Minimum prompt tokens, so that a prompt makes progress however slow the machine seems. With thousands of keys before
# them, 16 tokens make steps of 8 decodes on two CPU cores three times as long; 4 keep them within `stretch`.
MIN_PROMPT_TOKENS = 4
# Number of steps with prompts after which one step has decodes only, because the decode time that was learnt may be out
# of date.
STEPS_UNTIL_ALONE = 16
# The room for prompts grows with this power of their pressure: 32 times at pressure 2. The total
# waiting time is least if prompts get no room below pressure 1 and all of it above; a steep power approximates this and
# still lets decodes run.
STEEPNESS = 5
# A step may have MIN_ROWS rows (streams and prompt tokens) even if it then exceeds its target, as long as they take at
# most MAX_STEP_S seconds. Smaller steps would consist mostly of their fixed cost.
MIN_ROWS, MAX_STEP_S = 112, 0.25
# Rows of a step for each free seat for which a request waits. Only requests that do take a seat get them: others may
# wait for blocks or for their adapter. The prompts that replace the streams that end have `streams * prompt / answer`
# tokens in each step. So with one row for each free seat, and prompts as long as answers,
# half of the seats would stay empty; with three rows, a quarter.
ROWS_TO_FILL = 3
_MEMORY = 0.9  # weight of the past in each moving average
# Marginal cost of a row as a share of its average cost. Below the first bound the fixed cost dominates and chunks
# double; above the second it is negligible and the learnt minimum is dropped.
MOSTLY_FIXED, HARDLY_FIXED = 0.5, 0.8
# Number of steps with prompts between two trials of a double chunk. It is small while trials succeed and doubles after
# each failure, so that decodes on a machine without a fixed cost see almost no trials.
FIRST_TRIAL, LAST_TRIAL = 2, 4096


class _Step(NamedTuple):
    """A step with prompts: prompt tokens, rows beyond the usual decodes, seconds beyond the decode step."""

    tokens: int
    rows: float
    spent: float


@dataclass(slots=True)
class PromptBudget:
    """Prompt tokens that a step may compute. Each limit counts all planned prompt tokens.

    paced: limit for prompts in general. joining: limit for requests that take a free seat in this step. most: limit for
    prompts of light tenants (`Policy.heavier`).
    """

    paced: int
    joining: int
    most: int
    num_planned: int = 0

    @property
    def is_spent(self) -> bool:
        return self.num_planned >= self.most

    def room(self, *, is_light: bool, joins: bool) -> int:
        limit = self.most if is_light else self.joining if joins else self.paced
        return limit - self.num_planned


def prompt_pressure(prompts: Counter[str], streams: Counter[str]) -> float:
    """Return how strongly waiting prompts should slow down decoding: per tenant `(2 * prompts - 1) / streams`, the
    minimum over tenants with decoding streams. A tenant's decodes are slowed only for its own prompts.

    Prompts after the first count twice, because a delayed stream is usually still ahead of its reader. A single prompt,
    however long, gives at most 1, which does not slow decodes beyond `stretch`.
    """
    return min((2 * prompts[tenant_id] - 1) / number for tenant_id, number in streams.items()) if streams else 1.0


def filling_rows(num_running: int, num_joining: int) -> int:
    """Return the rows of a step that fills free seats: one for each running request, `ROWS_TO_FILL` for each free seat.

    num_joining: number of free seats for which requests wait.
    """
    return num_running + ROWS_TO_FILL * num_joining


class Pacer:
    """Prompt tokens of a step, of all its prompts together, from measured step times.

    stretch: limit of a decode step's slow-down by prompts, as a factor. floor: minimum prompt tokens, even if they slow
    decodes beyond `stretch`.
    """

    def __init__(self, stretch: float, floor: int = MIN_PROMPT_TOKENS) -> None:
        self._stretch = stretch
        self._floor = floor
        self._decode_seconds: float | None = None
        self._decodes = 0.0  # average number of decodes in the steps behind decode_seconds
        # Sums, not an average of quotients, in which a slow step with few rows would count as much as one with many.
        self._rows = 0.0
        self._spent = 0.0
        self._steps_since_alone = 0
        self._min_tokens = floor
        self._recent: deque[_Step] = deque(maxlen=4)
        self._steps_since_trial = 0
        self._trial_interval = FIRST_TRIAL

    def paced_tokens(self, num_decodes: int, most: int, prompt_pressure: float = 1.0) -> int:
        """Return the number of prompt tokens that a step with `num_decodes` decodes may compute, at most `most`.

        prompt_pressure: see the function of this name; values below 1 count as 1. Above 1, delaying the decodes costs
        less in total than delaying the prompts.
        """
        if self._steps_since_alone >= STEPS_UNTIL_ALONE:
            return 0
        if self._decode_seconds is None or not self._rows:
            return min(most, self._floor)
        each = self._each
        # Corrects for decodes that joined or left since the last step without prompts.
        grown = self._decode_seconds + (num_decodes - self._decodes) * each
        room = (self._stretch - 1) * max(prompt_pressure, 1.0) ** STEEPNESS * max(grown, 0.5 * self._decode_seconds)
        chunk = max(self._min_tokens, int(room / each))
        if self._is_trial_due:
            chunk *= 2
        elif self._steps_since_alone == STEPS_UNTIL_ALONE - 3 and chunk == self._min_tokens > self._floor:
            chunk = max(self._floor, chunk // 2)  # the fixed cost may be gone
        return min(most, chunk)

    def budget(
        self, num_decodes: int, most: int, prompt_pressure: float, target: float | None, filling_rows: int = 0
    ) -> PromptBudget:
        """Return the budget of a step with `num_decodes` decodes.

        target: time in seconds that light tenants' prompts may take, and up to which `prompt_pressure` may enlarge the
            chunks of others; None: no such limits. See also `MIN_ROWS`.
        filling_rows: rows up to which prompts of requests that take a seat may fill the step, within the target or
            `MIN_ROWS`, so that free seats do not stay empty: see the function of this name.
        """
        paced = self.paced_tokens(num_decodes, most, prompt_pressure) if num_decodes else most
        if num_decodes and self._steps_since_alone >= 2 * STEPS_UNTIL_ALONE:
            # Light tenants' prompts were in every step. A step without prompts is due, or `paced_tokens` stays 0.
            return PromptBudget(0, 0, 0)
        if target is None or not self._rows:
            return PromptBudget(paced, paced, paced)
        within = max(self._min_tokens, int(target / self._each), min(MIN_ROWS, int(MAX_STEP_S / self._each)))
        usual = self.paced_tokens(num_decodes, most) if num_decodes else 0
        limited = min(paced, max(within - num_decodes, usual))
        # Without a limit for others, a step of decodes only is due.
        joining = max(limited, min(filling_rows, within) - num_decodes) if limited else 0
        return PromptBudget(min(most, limited), min(most, joining), min(most, max(paced, within)))

    def seconds_of(self, num_rows: int) -> float:
        """Return the time that `num_rows` rows add to a step; 0 without data."""
        return num_rows * self._each if self._rows else 0.0

    def step_seconds(self, num_decodes: int, num_prompt_tokens: int) -> float:
        """Return the expected duration of a step; 0 without data."""
        decoding = (self._decode_seconds or 0.0) if num_decodes else 0.0
        return decoding + self.seconds_of(num_prompt_tokens)

    @property
    def _each(self) -> float:
        return max(self._spent / self._rows, 1e-3 * (self._decode_seconds or 1e-3))

    def observe(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
        """Record that a step with `num_decodes` decodes and `num_prompt_tokens` prompt tokens took `seconds`."""
        if num_decodes and not num_prompt_tokens:
            self._steps_since_alone = 0
            self._decode_seconds = _average(self._decode_seconds, seconds)
            self._decodes = _average(self._decodes or None, num_decodes)
            return
        rows, spent = float(num_prompt_tokens), seconds
        # Without decodes the time includes reading the weights, so rows look more expensive, which favours decodes.
        if num_decodes and self._decode_seconds is not None:
            rows, spent = rows + num_decodes - self._decodes, seconds - self._decode_seconds
            self._compare(_Step(num_prompt_tokens, rows, spent))
        self._steps_since_alone += bool(num_decodes)
        if rows >= 1:
            self._rows = _MEMORY * self._rows + rows
            self._spent = _MEMORY * self._spent + spent

    @property
    def _is_trial_due(self) -> bool:
        """Return whether the next chunk is a trial. Two trials never follow each other, so each can be compared with a
        usual step.
        """
        is_due = self._steps_since_trial >= self._trial_interval and len(self._recent) >= FIRST_TRIAL
        return is_due and self._steps_since_alone % 2 == 0 and self._steps_since_alone > 0

    def _compare(self, step: _Step) -> None:
        """Learn the minimum of prompt tokens from a step whose size differs from the steps before it.

        The comparison is with the quickest of these: a step that lost its core to another program looks expensive, and
        must not make a double chunk look cheap.
        """
        usual = min(self._recent, key=lambda before: before.spent, default=step)
        if usual.tokens < 1.6 * step.tokens and step.tokens < 1.6 * usual.tokens:
            self._recent.append(step)
            self._steps_since_trial += 1
            return
        each = usual.spent / max(usual.rows, 1.0)
        # Steps with different token counts can have equal rows when decodes join or leave. Such a pair reveals nothing
        # about the cost.
        wider = step.rows - usual.rows
        share = (step.spent - usual.spent) / wider / each if each > 0 and wider else 1.0
        if step.tokens < usual.tokens:
            if usual.tokens <= self._min_tokens and share > HARDLY_FIXED:
                self._set_min_tokens(step)
        elif not self._is_trial_due:
            self._recent.clear()  # another prompt's chunk, or a change of prompt_pressure
        elif share < MOSTLY_FIXED:
            self._set_min_tokens(step)
            self._trial_interval = FIRST_TRIAL
        else:
            self._trial_interval = min(2 * self._trial_interval, LAST_TRIAL)
        self._steps_since_trial = 0

    def _set_min_tokens(self, step: _Step) -> None:
        """Make the step's prompt tokens the minimum and forget the usual steps, which had other sizes."""
        self._min_tokens = max(self._floor, step.tokens)
        self._recent.clear()
        self._recent.append(step)


def _average(old: float | None, new: float) -> float:
    return new if old is None else _MEMORY * old + (1 - _MEMORY) * new
