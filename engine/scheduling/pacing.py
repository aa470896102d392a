"""How much prompt work a step may carry beside running streams, so that a long prompt does not stall them.

Learns two times from the steps that ran: what a step of decodes alone takes, and what each row more adds, a prompt's
token or another stream's. A mixed step then gets as many prompt tokens as stretch it to `stretch` times the decode step
(Sarathi-Serve's chunk budget, Agrawal et al., OSDI 2024, measured while serving instead of profiled). Knows no clock:
the engine tells it.
"""

# A prompt must come forward however slow the machine looks. No more than a few tokens: at thousands of keys before them
# 16 made steps of 8 streams on two CPU cores three times as long, 4 leave them within the stretch that is asked for.
LEAST_CHUNK = 4
_MEMORY = 0.9  # weight of the past in each moving average


class Pacer:
    """stretch: how much longer a decode step may get for the prompts' sake; 2 = twice as long."""

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._decode_seconds: float | None = None
        self._decodes = 0.0  # streams in the steps that decode_seconds was learnt from
        self._seconds_per_row: float | None = None

    def prompt_budget(self, num_decodes: int, most: int) -> int:
        """Prompt tokens that a step of so many decodes may compute beside them, at most `most`."""
        if self._decode_seconds is None or not self._seconds_per_row:
            return min(most, LEAST_CHUNK)
        # While prompts come one after the other no step is of decodes alone: the number of streams has moved on since.
        grown = self._decode_seconds + (num_decodes - self._decodes) * self._seconds_per_row
        room = (self._stretch - 1) * max(grown, 0.5 * self._decode_seconds)
        return min(most, max(LEAST_CHUNK, int(room / self._seconds_per_row)))

    def observe(self, seconds: float, num_decodes: int, num_prompt_tokens: int) -> None:
        """A step took `seconds` for so many decoding requests and prompt tokens."""
        if num_decodes and not num_prompt_tokens:
            self._decode_seconds = _average(self._decode_seconds, seconds)
            self._decodes = _average(self._decodes or None, num_decodes)
        elif num_prompt_tokens >= LEAST_CHUNK:
            rows, spent = float(num_prompt_tokens), seconds
            # Beside no decodes the weights' reading is in the time as well, which errs on the streams' side.
            if num_decodes and self._decode_seconds is not None:
                rows = max(rows + num_decodes - self._decodes, 1.0)
                spent = max(seconds - self._decode_seconds, 0.1 * seconds)
            self._seconds_per_row = _average(self._seconds_per_row, spent / rows)


def _average(old: float | None, new: float) -> float:
    return new if old is None else _MEMORY * old + (1 - _MEMORY) * new
