"""Measured times of decode steps, with and without drafts, which decide how many drafts pay. Has no clock.

A proposer must compute a request's tokens before it can draft for it. A credit of time pays for this work: it grows by
the time that drafts save and, for trials, by a share of the time of steps without drafts. So an engine loses at most
the initial credit once, and after that at most this share of its time, even if no draft is ever accepted.
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
# A step counts as at most MAX_PLAIN plain steps in the mean plain time, and as at most MAX_STEP in the credit. Longer
# steps are stalls of the machine.
MAX_PLAIN, MAX_STEP = 2.0, 16.0
# Share of the time of steps without drafts that may be spent on catching up, whatever comes of it.
TRIALS = 0.01
# Initial and maximum credit, in tokens of steps without drafts. The first request's prompt has to be caught up before
# its drafts save anything.
FIRST_CREDIT, MAX_CREDIT = 32.0, 1024.0
# Maximum debt from drafts that lose time, in steps: their own measured cost ends these, not the debt.
MAX_DEBT = 2.0


@dataclass(slots=True)
class _Times:
    """Times of the steps with one number of decodes. plain: mean seconds of a step without drafts. rows: weighted sum
    of drafts. spent: weighted sum of the seconds that they added. credit: in plain steps.
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
        """Record a step without prompts. num_tokens: number of new tokens. is_catching_up: whether the proposer caught
        up with requests, so that the step's time says nothing about others.
        """
        times = self._times.get(num_decodes)
        if times is None:
            if not num_drafts and not is_catching_up:
                self._times[num_decodes] = _Times(seconds, 1.0, FIRST_SHARE * seconds, FIRST_CREDIT / num_decodes)
            return
        gain = num_tokens / num_decodes - min(seconds / times.plain, MAX_STEP)
        if is_catching_up:
            times.credit += gain
        elif num_drafts:
            times.credit = max(times.credit + gain, min(times.credit, -MAX_DEBT))
            times.rows = _MEMORY * times.rows + num_drafts
            times.spent = _MEMORY * times.spent + seconds - times.plain
            times.steps_since_plain += 1
        else:
            times.credit += TRIALS
            times.plain += (1 - _MEMORY) * (min(seconds, MAX_PLAIN * times.plain) - times.plain)
            times.steps_since_plain = 0
        times.credit = min(times.credit, MAX_CREDIT / num_decodes)

    def may_catch_up(self, num_decodes: int) -> bool:
        """Return whether the proposer may catch up with requests in a step with `num_decodes` decodes."""
        return self._times[num_decodes].credit > 0

    def may_draft(self, num_decodes: int) -> bool:
        """Return whether a step with `num_decodes` decodes may have drafts; if not, it measures the plain time."""
        times = self._times.get(num_decodes)
        return times is not None and times.steps_since_plain < STEPS_UNTIL_PLAIN

    def pays(self, chance: float, num_decodes: int, num_drafts: int, expected: float) -> bool:
        """Return whether a further draft raises the tokens per second of a step.

        chance: probability that the draft is accepted. expected: tokens of the step with `num_drafts` drafts.
        """
        times = self._times[num_decodes]
        return chance * (times.plain + num_drafts * times.each) > MARGIN * expected * times.each

    def forget(self, num_decodes: int) -> None:
        """Lower the measured cost of drafts a little, after a step in which none paid."""
        self._times[num_decodes].spent *= FORGOTTEN
