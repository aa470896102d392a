"""Receipts: an engine reports the adapter whose pages its steps read, and the gateway compares it with the request.

A receipt is `sha256:<digest>`, `base`, or `mixed` if the steps read more than one. vLLM and engines of the previous
release send none.
"""

import re

from wire.digests import bare_digest, digest_name

BASE, MIXED, OTHER = "base", "mixed", "other"
_DIGEST = re.compile("[0-9a-f]{64}")


def served_digest(receipt: str) -> str:
    """Return a receipt in the ledger's form: a digest without its prefix, `base`, `mixed`, or `other` for any text that
    is no receipt: PostgreSQL refuses some, such as a NUL.
    """
    served = bare_digest(receipt)
    return served if served in (BASE, MIXED) or _DIGEST.fullmatch(served) else OTHER


def as_receipt(served: str) -> str:
    """Return the receipt for a value in the ledger's form."""
    return digest_name(served) if len(served) == 64 else served


def matches(served: str | None, digest: str | None) -> bool:
    """Return whether a receipt names the requested adapter (`digest`; None: the base model). served: the receipt in the
    ledger's form; None, without a receipt, matches.
    """
    return served is None or served == (digest or BASE)
