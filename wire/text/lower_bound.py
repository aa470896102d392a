"""Lower bound of a text's number of tokens, from the special tokens that stand in it.

A tokenizer divides a text at its special tokens first, so each of them is one token, and the text between two of them
is at least one more. To find them takes a hundredth of the time of encoding.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

# Characters in which special tokens are searched at once, because a search holds the interpreter lock.
PART_CHARS = 2**14
# Steps before the model that leave no text empty. Those of the first line may replace characters.
_CHANGES = {"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Lowercase", "Metaspace"}
_CUTS = {"ByteLevel", "Digits"}
_ASCII = frozenset(map(chr, range(128)))
# Characters and their tokens in a byte-level vocabulary.
_BYTE_LEVEL = {char: char for char in map(chr, range(0x21, 0x7F))} | {"\n": "\u010a", " ": "\u0120"}


class TokenBound:
    """Lower bound for the texts of a tokenizer that a chat template writes. Thread-safe.

    spec: the content of the backend's tokenizer.json. written: texts in which the special tokens are written, such as
    the template. Others are not searched for.
    """

    def __init__(self, backend: tokenizers.Tokenizer, spec: Mapping[str, Any], written: Iterable[str]) -> None:
        added = list(backend.get_added_tokens_decoder().values())
        contents = [token.content for token in added if token.content]
        texts = list(written)
        marks = [
            token
            for token in added
            if token.special and not (token.normalized or token.single_word) and any(token.content in t for t in texts)
        ]
        # A token that overlaps another one may not be found in the text by the tokenizer.
        marks = [token for token in marks if token.content and not _overlaps_any(token.content, contents)]
        self._pattern = re.compile("|".join(re.escape(token.content) for token in marks)) if marks else None
        strips = any(token.lstrip or token.rstrip for token in added)
        # Characters that begin a text of at least one token.
        self._known = frozenset() if strips else _known_ascii(spec)

    def of(self, part: str) -> int:
        """Return the least number of tokens of a part of a text, without the text before its first and after its last
        special token, which may continue in the next part.
        """
        if self._pattern is None:
            return 0
        between = self._pattern.split(part)
        return len(between) - 1 + sum(text[:1] in self._known for text in between[1:-1])


class LeastCount:
    """Count of the tokens that a text of several pieces has at least, up to a limit."""

    def __init__(self, bound: TokenBound, limit: int) -> None:
        self._bound, self._limit = bound, limit
        self._pieces: list[str] = []
        self._num_chars = self._count = 0

    def add(self, piece: str) -> bool:
        """Return whether the text so far certainly has more tokens than the limit. Small pieces are collected first."""
        self._pieces.append(piece)
        self._num_chars += len(piece)
        if self._num_chars < PART_CHARS:
            return False
        text = "".join(self._pieces)
        self._pieces, self._num_chars = [], 0
        for start in range(0, len(text), PART_CHARS):
            self._count += self._bound.of(text[start : start + PART_CHARS])
            if self._count > self._limit:
                return True
        return False


def _overlaps_any(token: str, others: Iterable[str]) -> bool:
    """Return whether another token contains this one or has characters in common with it in some text."""
    if any(token.startswith(token[start:]) for start in range(1, len(token))):
        return True
    return any(other != token and _overlap(token, other) for other in others)


def _overlap(one: str, other: str) -> bool:
    if one in other or other in one:
        return True
    return _ends_in_start(one, other) or _ends_in_start(other, one)


def _ends_in_start(one: str, other: str) -> bool:
    """Return whether an end of one token is the start of the other."""
    return other[0] in one and any(other.startswith(one[start:]) for start in range(1, len(one)))


def _known_ascii(spec: Mapping[str, Any]) -> frozenset[str]:
    """Return the ASCII characters that have a token in any text. A BPE model leaves out characters without one."""
    model, steps = spec["model"], [*_steps(spec["normalizer"]), *_steps(spec["pre_tokenizer"])]
    kept = [step for step in steps if _keeps(step)]
    if model["type"] != "BPE" or len(kept) < len(steps):
        return frozenset()
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)):
        return _ASCII
    cuts = [step["type"] for step in steps if step["type"] in _CUTS or step["type"] == "Split"]
    if len(cuts) < len(steps) or cuts[-1:] != ["ByteLevel"]:
        return frozenset()
    return frozenset(char for char, token in _BYTE_LEVEL.items() if token in model["vocab"])


def _steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if step is None:
        return []
    inner = step.get("normalizers") or step.get("pretokenizers")
    return [step] if inner is None else [each for one in inner for each in _steps(one)]


def _keeps(step: Mapping[str, Any]) -> bool:
    """Return whether a step makes no text empty."""
    match step:
        case {"type": "Replace", "content": content}:
            return bool(content)
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": kind}:
            return kind in _CHANGES or kind in _CUTS
    return False
