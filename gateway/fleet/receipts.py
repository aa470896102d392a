"""Receipts: an engine says which adapter's pages its steps read, and the gateway holds that against the request.

A receipt is `sha256:<digest>`, `base`, or `mixed` where the steps read more than one. vLLM and engines of the release
before send none.
"""

HEADER = "x-loraplex-adapter-digest"
BASE = "base"
PREFIX = "sha256:"


def served_digest(receipt: str) -> str:
    """Return a receipt as the ledger keeps it: a digest without its prefix, `base` or `mixed`."""
    return receipt.removeprefix(PREFIX)[:64]


def as_receipt(served: str) -> str:
    """Return the receipt of a ledger's value."""
    return PREFIX + served if len(served) == 64 else served


def matches(served: str | None, digest: str | None) -> bool:
    """Whether the steps read what was asked for: the adapter `digest`, or the base model for None."""
    return served is None or served == (digest or BASE)
