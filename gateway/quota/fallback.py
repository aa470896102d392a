"""Modes of admission without Redis, by class of limit: refuse all, admit all, or admit this gateway's own share."""

from collections.abc import Iterable, Mapping
from typing import Literal, cast, get_args

from gateway.limits.kinds import KINDS

Mode = Literal["closed", "open", "local"]

MODES = get_args(Mode)
# Modes of the check of Redis' own settings: `LORAPLEX_REDIS_CHECK`.
Check = Literal["warn", "refuse", "off"]
LIMIT_CLASSES = tuple(dict.fromkeys(kind.limit_class for kind in KINDS))


def parse_fallback(items: Iterable[str]) -> Mapping[str, Mode]:
    """Return the mode of each class from items like `open` (all classes) or `tokens=local` (one class).

    Later items override earlier ones; a class without an item is closed. Raises ValueError.
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
