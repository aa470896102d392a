"""The text of one sequence as its tokens arrive: detokenized piece by piece, cut at stop strings.

A stop string may span tokens. Only text that may be the beginning of a stop string is held back.
"""

from collections.abc import Sequence

from wire.text.tokenizer import Tokenizer


class OutputText:
    """Detokenizer with stop strings: `push` takes tokens and returns text to send.

    stop: the stop string that ended the text, None until then. num_tokens: number of tokens taken in, up to and
    including the one that completed the stop string. has_stops: whether there are stop strings.
    """

    __slots__ = ("_held", "_include_stop", "_min_tokens", "_stops", "_stream", "has_stops", "num_tokens", "stop")

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
        """shown_ids: special tokens that are written as text. after: the prompt's tokens."""
        self._stream = tokenizer.stream(shown_ids, after)
        self._stops = tuple(stops)
        self.has_stops = bool(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self._held = ""
        self.stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def count_unseen(self) -> None:
        """Count a token that is not part of the text: the end token."""
        self.num_tokens += 1

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain to be part of the answer."""
        if not self._stops:
            self.num_tokens += len(token_ids)
            return self._stream.push(token_ids)
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            pieces.append(self._scan(self._stream.push((token_id,))))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the text held back, at the end of the sequence."""
        if self.stopped:
            return ""
        text = self._scan(self._stream.finish())
        held, self._held = self._held, ""
        return text + held

    def _scan(self, text: str) -> str:
        if self.num_tokens <= self._min_tokens:
            # Text within `min_tokens` can neither complete nor begin a stop string.
            return text
        text = self._held + text
        self._held = ""
        if not self._stops or not text:
            return text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The stop string that is complete first ends the text; among those that end together, the longest.
            at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
            self.stop = stop
            return text[: at + len(stop)] if self._include_stop else text[:at]
        certain = _begin_of_stop(text, self._stops)
        self._held = text[certain:]
        return text[:certain]


def _begin_of_stop(text: str, stops: Sequence[str]) -> int:
    """Return the index of the longest suffix of `text` that may begin a stop string; the length of `text` if there is
    none.

    Released text is never held again. Each character of an answer is therefore scanned once, however long the stop
    strings are and however often their beginnings repeat.
    """
    for start in range(max(0, len(text) - max(map(len, stops)) + 1), len(text)):
        end = text[start:]
        if any(stop.startswith(end) for stop in stops):
            return start
    return len(text)
