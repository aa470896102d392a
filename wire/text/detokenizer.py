"""Incremental conversion of token ids to text, for two kinds of vocabulary. Returned text never changes afterwards."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

# Number of preceding tokens that can affect how a text is written: those of a word, or the bytes of a character.
CONTEXT = 8


class Vocabulary(Protocol):
    """Methods of `wire.text.tokenizer.Tokenizer` that a stream uses."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def has_text(self, token_id: int) -> bool: ...
    def is_byte_token(self, token_id: int) -> bool: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class Stream(Protocol):
    """Incremental detokenizer of one sequence. All pieces joined equal `Tokenizer.decode` of all ids."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that became final; never half a character."""

    def finish(self) -> str:
        """Return the text that was held back."""


class ByteLevelStream:
    """Detokenizer for byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM).

    Their tokens stand for bytes, independent of context.
    """

    def __init__(
        self, vocabulary: Vocabulary, shown_ids: frozenset[int] = frozenset(), after: Sequence[int] = ()
    ) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._special_ids = vocabulary.special_ids - shown_ids if shown_ids else vocabulary.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.push(after)

    def push(self, token_ids: Iterable[int]) -> str:
        token_bytes, special_ids = self._token_bytes, self._special_ids
        return self._utf8.decode(b"".join([token_bytes(i) for i in token_ids if i not in special_ids]))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class WindowStream:
    """Detokenizer for other vocabularies (SentencePiece).

    It decodes a window of recent tokens before and after adding the new ones; the new text is the difference. A run of
    byte-fallback tokens decodes as a whole or not at all, so it is held back until it ends.
    """

    _MAX_HELD = 16

    def __init__(
        self, vocabulary: Vocabulary, shown_ids: frozenset[int] = frozenset(), after: Sequence[int] = ()
    ) -> None:
        self._vocabulary = vocabulary
        self._shown_ids = shown_ids
        self._before = [token_id for token_id in after if vocabulary.has_text(token_id)]
        self._held: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        shown, has_text = self._shown_ids, self._vocabulary.has_text
        return "".join([self._push(i) for i in token_ids if i in shown or has_text(i)])

    def _push(self, token_id: int) -> str:
        if token_id in self._shown_ids:
            text = self.finish()
            self._before, self._held = [], []
            return text + self._vocabulary.token_bytes(token_id).decode("utf-8", "replace")
        self._held.append(token_id)
        if self._vocabulary.is_byte_token(token_id):
            return ""
        text = self._difference()
        if text.endswith("\ufffd") and len(self._held) < self._MAX_HELD:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        return self._emit(self._difference()) if self._held else ""

    def _difference(self) -> str:
        before = self._vocabulary.decode(self._before)
        return self._vocabulary.decode(self._before + self._held)[len(before) :]

    def _emit(self, text: str) -> str:
        self._before, self._held = self._held, []
        return text
