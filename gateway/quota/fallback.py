"""Modes of admission without Redis, by class of limit: refuse all, admit all, or admit this gateway's own share."""

from collections.abc import Iterable, Mapping
from typing import Literal, cast, get_args

Mode = Literal["closed", "open", "local"]

MODES = get_args(Mode)
# Modes of the check of Redis' own settings: `LORAPLEX_REDIS_CHECK`.
Check = Literal["warn", "refuse", "off"]
CHECKS: tuple[Check, ...] = get_args(Check)
# Of limits, as gateway.quota.limits.CLASSES names them.
LIMIT_CLASSES = ("requests", "tokens", "concurrency", "budget")


def parse_fallback(items: Iterable[str]) -> Mapping[str, Mode]:
    """`open` for all classes, `tokens=local` for one; later items win over earlier ones, and without any it is closed.

    Raises ValueError.
    """
    found: dict[str, Mode] = dict.fromkeys(LIMIT_CLASSES, "closed")
    for item in items:
        name, separator, mode = item.rpartition("=")
        if mode not in MODES or (separator and name not in LIMIT_CLASSES):
            raise ValueError(
                f"expected {', '.join(MODES)}, or CLASS=MODE with a class of {', '.join(LIMIT_CLASSES)}; got {item!r}"
            )
        for limit_class in (name,) if separator else LIMIT_CLASSES:
            found[limit_class] = cast(Mode, mode)
    return found


def parse_check(text: str) -> Check:
    """Return the mode of that name. Raises ValueError."""
    if text not in CHECKS:
        raise ValueError(f"expected {', '.join(CHECKS)}; got {text!r}")
    return text
