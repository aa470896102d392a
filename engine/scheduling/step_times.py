"""Measured times of decode steps, with and without drafts, which decide how many drafts pay. Has no clock.

Drafts have a credit: the time that they have saved, and a share of the time of all steps without them, for trials. Work
for drafts that brings nothing spends it. Without credit there are no drafts, so that whatever is drafted, an engine is
slower than without drafts by that share at most.
"""

from dataclasses import dataclass

_MEMORY = 0.9  # weight of the past in each moving average
# Share of a plain step's time that a draft is assumed to cost before any was measured, and the least share.
FIRST_SHARE, LEAST_SHARE = 0.1, 0.005
# Number of steps with drafts after which one step has none, because the plain time may be out of date.
STEPS_UNTIL_PLAIN = 64
# Factor applied to a draft's measured cost after each step where drafts were too slow, so that they are tried again.
FORGOTTEN = 0.99
# Factor by which a draft must bring more than it costs.
MARGIN = 1.1
# Share of the time of steps without drafts that trials of drafts may cost.
TRIALS = 0.01
# Credit at first and at most, in tokens of steps without drafts. A first request's prompt has to be caught up before
# its drafts save anything. Without a most credit, drafts that cease to pay would go on for long.
FIRST_CREDIT, MOST_CREDIT = 32.0, 64.0
# Least credit, in steps: a stall of the machine in a step with drafts must not end drafts for long.
LEAST_CREDIT = -2.0


@dataclass(slots=True)
class _Times:
    """Times of the steps with one number of decodes. plain: mean seconds of a step without drafts. rows: weighted sum
    of drafts. spent: weighted sum of the seconds that they added. credit: in seconds.
    """

    plain: float
    rows: float
    spent: float
    credit: float
    steps_since_plain: int = 0

    @property
    def each(self) -> float:
        """Return the seconds that a draft adds to a step."""
        return max(self.spent / self.rows, LEAST_SHARE * self.plain)


class StepTimes:
    """Times by the number of decodes."""

    def __init__(self) -> None:
        self._times: dict[int, _Times] = {}

    def observe(self, seconds: float, num_decodes: int, num_drafts: int, num_tokens: int, is_catching_up: bool) -> None:
        """Record a step without prompts. num_tokens: that it brought. is_catching_up: whether it did more work for
        drafts than usual, so that its time says nothing about other steps.
        """
        times = self._times.get(num_decodes)
        if times is None:
            if not num_drafts and not is_catching_up:
                credit = FIRST_CREDIT / num_decodes * seconds
                self._times[num_decodes] = _Times(seconds, 1.0, FIRST_SHARE * seconds, credit)
            return
        plain = times.plain
        if num_drafts or is_catching_up:
            gain = num_tokens / num_decodes * plain - seconds
        else:
            gain = TRIALS * plain
        times.credit = min(max(times.credit + gain, LEAST_CREDIT * plain), MOST_CREDIT / num_decodes * plain)
        if is_catching_up:
            return
        if num_drafts:
            times.rows = _MEMORY * times.rows + num_drafts
            times.spent = _MEMORY * times.spent + seconds - plain
            times.steps_since_plain += 1
        else:
            times.plain = _MEMORY * plain + (1 - _MEMORY) * seconds
            times.steps_since_plain = 0

    def may_draft(self, num_decodes: int) -> bool:
        """Return whether a step with so many decodes may have drafts; if not, it measures the plain time."""
        times = self._times.get(num_decodes)
        return times is not None and times.steps_since_plain < STEPS_UNTIL_PLAIN and times.credit > 0

    def pays(self, chance: float, num_decodes: int, num_drafts: int, expected: float) -> bool:
        """Return whether a further draft raises the tokens per second of a step.

        chance: probability that the draft is accepted. expected: tokens of the step with `num_drafts` drafts.
        """
        times = self._times[num_decodes]
        return chance * (times.plain + num_drafts * times.each) > MARGIN * expected * times.each

    def forget(self, num_decodes: int) -> None:
        """Lower the measured cost of drafts a little, after a step in which none paid."""
        self._times[num_decodes].spent *= FORGOTTEN
