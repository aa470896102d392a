"""Peppers: the deployment's secrets under which API keys are hashed; during a rotation two, the new one first."""

import hmac

# Characters of a key's check.
CHECK_HEX = 8
# Both halves of a value with two peppers have at least this many characters. A shorter half means that the comma
# belongs to a single pepper.
MIN_CHARS = 16


def split_peppers(text: str) -> tuple[str, ...]:
    """Return the peppers of a setting: one, or the new and the old one, separated by a comma."""
    parts = tuple(part.strip() for part in text.split(","))
    return parts if len(parts) == 2 and min(map(len, parts)) >= MIN_CHARS else (text,)


def fingerprint(pepper: str) -> str:
    """Return 8 hexadecimal digits that identify a pepper and do not reveal it."""
    return hmac.digest(pepper.encode(), b"fingerprint", "sha256").hex()[:8]


class Peppers:
    """The peppers of a gateway. New hashes are made under the first; hashes under any are accepted."""

    def __init__(self, text: str) -> None:
        """text: as `split_peppers` takes it."""
        given = split_peppers(text)
        self._fingerprints = tuple(fingerprint(pepper) for pepper in given)
        self._keys = tuple(pepper.encode() for pepper in given)

    @property
    def fingerprint(self) -> str:
        """Return the first pepper's fingerprint."""
        return self._fingerprints[0]

    def hash(self, purpose: str, text: str) -> str:
        """Return HMAC-SHA256 under the first pepper, in hexadecimal. Each purpose has hashes of its own."""
        return self._hash(self._keys[0], purpose, text)

    def match(self, purpose: str, text: str, hashed: str) -> str | None:
        """Return the fingerprint of the pepper under which `text` has this hash, None if there is none."""
        for key, name in zip(self._keys, self._fingerprints, strict=True):
            if hmac.compare_digest(self._hash(key, purpose, text), hashed):
                return name
        return None

    def check(self, key_id: str, random: str) -> str:
        """Return the check digits of a new key."""
        return self._checks(key_id, random)[0]

    def is_check(self, key_id: str, random: str, digits: str, former: str | None) -> bool:
        """Return whether check digits are a key's under any pepper, or `former`, those that were recorded of it."""
        given = self._checks(key_id, random)
        return any(hmac.compare_digest(digits, each) for each in (*given, *filter(None, [former])))

    def _checks(self, key_id: str, random: str) -> list[str]:
        return [self._hash(key, f"check.{key_id}", random)[:CHECK_HEX] for key in self._keys]

    @staticmethod
    def _hash(key: bytes, purpose: str, text: str) -> str:
        return hmac.digest(key, f"{purpose}.{text}".encode("utf-8", "surrogateescape"), "sha256").hex()
