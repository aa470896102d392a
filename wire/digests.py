"""Digests of adapters in the API's form, `sha256:<64 hexadecimal digits>`. Other code uses the digits alone."""

import re

PREFIX = "sha256:"
_NAME = re.compile(r"sha256:([0-9a-f]{64})")


def digest_name(digest: str) -> str:
    """Return the API's name of an adapter that is named by its digest."""
    return PREFIX + digest


def bare_digest(name: str) -> str:
    """Return the digest without the prefix `sha256:`, if there is one."""
    return name.removeprefix(PREFIX)


def named_digest(name: str) -> str | None:
    """Return the digest in a model's name of the form `sha256:<digest>`; None for any other name."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None
