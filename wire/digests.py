"""Digests of adapters in the API's form: `sha256:<64 hexadecimal digits>`. Other code holds the bare digits."""

import re

PREFIX = "sha256:"
_NAME = re.compile(r"sha256:([0-9a-f]{64})")


def digest_name(digest: str) -> str:
    """Return the API's name of an adapter without a name of its own."""
    return PREFIX + digest


def bare_digest(name: str) -> str:
    """Return the digest without its prefix, if it has one."""
    return name.removeprefix(PREFIX)


def named_digest(name: str) -> str | None:
    """Return the digest that a model's name consists of; None for any other name."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None
