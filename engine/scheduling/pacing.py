"""How much prompt work a step may carry beside running streams, so that a long prompt does not stall them.

Learns two times from the steps that ran: what a step of decodes alone takes, and what each row more adds, a prompt's
token or another stream's. A mixed step then gets as many prompt tokens as stretch it to `stretch` times the decode step
(Sarathi-Serve's chunk budget, Agrawal et al., OSDI 2024, measured while serving instead of profiled). Knows no clock:
the engine tells it.
"""

# A prompt must come forward however slow the machine looks. No more than a few tokens: at thousands of keys before them
# 16 made steps of 8 streams on two CPU cores three times as long, 4 leave them within the stretch that is asked for.
LEAST_CHUNK = 4
# Steps with prompts in them after which one goes without: the machine and the streams may have changed since the last.
STEPS_UNTIL_ALONE = 16
# The room beside the streams grows with this power of the patience: 32 times where prompts weigh twice as much. The sum
# of all waiting would be least with no room below 1 and all of it above; this keeps streams moving near the middle.
STEEPNESS = 5
_MEMORY = 0.9  # weight of the past in each moving average


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

    def prompt_budget(self, num_decodes: int, most: int, patience: float = 1.0) -> int:
        """Prompt tokens that a step of so many decodes may compute beside them, at most `most`.

        patience: how much the prompts weigh against the streams (`Scheduler` says how they are counted); below 1 it
        counts as 1. Above, the streams' waiting costs less in all than theirs.
        """
        if self._steps_since_alone >= STEPS_UNTIL_ALONE:
            return 0
        if self._decode_seconds is None or not self._rows:
            return min(most, LEAST_CHUNK)
        each = max(self._spent / self._rows, 1e-3 * self._decode_seconds)
        # The number of streams may have moved on since a step was theirs alone.
        grown = self._decode_seconds + (num_decodes - self._decodes) * each
        room = (self._stretch - 1) * max(patience, 1.0) ** STEEPNESS * max(grown, 0.5 * self._decode_seconds)
        return min(most, max(LEAST_CHUNK, int(room / each)))

    def observe(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
        """A step took `seconds` for so many decoding requests and prompt tokens."""
        if num_decodes and not num_prompt_tokens:
            self._steps_since_alone = 0
            self._decode_seconds = _average(self._decode_seconds, seconds)
            self._decodes = _average(self._decodes or None, num_decodes)
            return
        self._steps_since_alone += bool(num_decodes)
        rows, spent = float(num_prompt_tokens), seconds
        # Beside no decodes the weights' reading is in the time as well, which errs on the streams' side.
        if num_decodes and self._decode_seconds is not None:
            rows, spent = rows + num_decodes - self._decodes, seconds - self._decode_seconds
        if rows >= 1:
            self._rows = _MEMORY * self._rows + rows
            self._spent = _MEMORY * self._spent + spent


def _average(old: float | None, new: float) -> float:
    return new if old is None else _MEMORY * old + (1 - _MEMORY) * new
