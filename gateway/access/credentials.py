"""Secrets in a request's headers, and an estimate of how hard a chosen secret is to guess."""

import hashlib
import hmac
import re

# Guesses are throttled to 14,400 a day for each address; 64 bits also resist an attack on a leaked hash.
MIN_BITS = 64
# Entropy at which a secret cannot be guessed at any rate (a trillion guesses a second would need a billion years), so
# that it is compared even while an address is throttled. `openssl rand -hex 24` reaches it.
STRONG_BITS = 96
# A word of any length adds the bits of a choice among several thousand words (Diceware's lists have 7,776).
WORD_BITS, WORD_LETTERS = 13.0, 5
PLACEHOLDER_BITS = 1.0
_PLACEHOLDERS = """
admin administrator api bearer change changeme default demo dev example here internal key letmein
live local loraplex me my pass password pepper please prod production qwerty random replace
replaceme root secret secure service string strong super test tests testing token user welcome your
"""
PLACEHOLDERS = frozenset(_PLACEHOLDERS.split())
_PIECES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+|.", re.DOTALL)
LETTER_BITS, DIGIT_BITS, OTHER_BITS = 4.7, 3.3, 5.0


class StrongSecrets:
    """Operator-chosen secrets of a deployment that reach STRONG_BITS."""

    def __init__(self, *secrets: str | None) -> None:
        self._hashes = [_hashed(secret) for secret in secrets if secret and guess_bits(secret) >= STRONG_BITS]

    def contains(self, presented: str) -> bool:
        """Return whether the text is one of the secrets. Compares hashes, in constant time."""
        hashed = _hashed(presented)
        return any(hmac.compare_digest(hashed, known) for known in self._hashes)


def _hashed(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def guess_bits(secret: str) -> float:
    """Estimate the entropy of a secret in bits, rather too low than too high.

    A secret that repeats itself counts as one repetition, a run of equal or consecutive characters (`0000`, `abcd`) as
    one character, five letters in a row as one word of a dictionary, and a common placeholder (`changeme`, `token`) as
    one bit. In 100,000 tries `openssl rand -hex 16` reached 66 or more, `openssl rand -hex 24` 97 or more.
    """
    secret = _without_runs(_period(secret))
    bits, seen = 0.0, set()
    for piece in _PIECES.findall(secret):
        word = piece.lower()
        is_again = word in seen and (len(word) > 2 or not word.isalnum())
        if is_again or word in PLACEHOLDERS:
            bits += PLACEHOLDER_BITS
        elif word.isdigit():
            bits += DIGIT_BITS * len(word)
        elif word.isalpha():
            bits += min(LETTER_BITS * len(word) + (piece != word), WORD_BITS * max(1, len(word) // WORD_LETTERS))
        else:
            bits += OTHER_BITS
        seen.add(word)
    return bits


def _period(text: str) -> str:
    """Return the shortest prefix whose repetition gives the text; the last repetition may be cut off."""
    for length in range(1, len(text) // 2 + 1):
        if (text[:length] * (len(text) // length + 1))[: len(text)] == text:
            return text[:length]
    return text


def _without_runs(text: str) -> str:
    """Return the text with each run of equal or consecutive characters shortened to its first."""
    kept: list[str] = []
    step: int | None = None
    for before, character in zip(" " + text, text, strict=False):
        difference = ord(character) - ord(before)
        if kept and abs(difference) <= 1 and (step is None or difference == step):
            step = difference
            continue
        step = None
        kept.append(character)
    return "".join(kept)
