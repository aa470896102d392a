"""The text of one sequence as its tokens arrive: detokenized piece by piece, cut at stop strings.

A stop string may lie across tokens. Only text that could be the beginning of one is held back.
"""

from collections.abc import Sequence

from wire.text.tokenizer import Tokenizer


class OutputText:
    """`push` tokens, send what it returns. `stop`: the stop string that was met, after which nothing more will come."""

    __slots__ = ("_held", "_include_stop", "_min_tokens", "_num_tokens", "_stops", "_stream", "stop")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        shown_ids: frozenset[int] = frozenset(),
        after: Sequence[int] = (),
    ) -> None:
        """shown_ids: special tokens that are text here. after: the prompt's tokens."""
        self._stream = tokenizer.stream(shown_ids, after)
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self.stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    @property
    def num_tokens(self) -> int:
        """Tokens taken in, the one that completed the stop string included, those after it not."""
        return self._num_tokens

    def count_unseen(self) -> None:
        """Counts a token that is no part of the text: the end token."""
        self._num_tokens += 1

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain to be part of the answer."""
        if not self._stops:
            self._num_tokens += len(token_ids)
            return self._stream.push(token_ids)
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            self._num_tokens += 1
            pieces.append(self._scan(self._stream.push((token_id,))))
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back, when no more tokens will come."""
        if self.stopped:
            return ""
        text = self._scan(self._stream.finish())
        held, self._held = self._held, ""
        return text + held

    def _scan(self, text: str) -> str:
        if self._num_tokens <= self._min_tokens:
            # Text within the minimum can neither complete nor begin a stop.
            return text
        text = self._held + text
        self._held = ""
        if not self._stops or not text:
            return text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that was complete first ends the text; of those that end together, the longest.
            at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
            self.stop = stop
            return text[: at + len(stop)] if self._include_stop else text[:at]
        certain = _begin_of_stop(text, self._stops)
        self._held = text[certain:]
        return text[:certain]


def _begin_of_stop(text: str, stops: Sequence[str]) -> int:
    """Where the longest end of `text` begins that may become a stop; its length if none does.

    What is passed over is never held again, so that over a whole answer each character is looked at once, however long
    the stops are and whatever is made to repeat their beginnings.
    """
    for start in range(max(0, len(text) - max(map(len, stops)) + 1), len(text)):
        end = text[start:]
        if any(stop.startswith(end) for stop in stops):
            return start
    return len(text)
