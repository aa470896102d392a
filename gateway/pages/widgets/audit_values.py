"""Changed values of an audit entry in words: each field's title, its earlier value and its new one."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gateway.pages.frame.filters import EXACT
from gateway.pages.widgets.forms import NO_LIMIT, TITLES, term_text, title_of
from wire.money import format_money

AMOUNTS = ("input", "cached", "output")
# Titles of fields that differ from their names.
FIELDS = {
    "allowed_models": "Models",
    "before": "Days before",
    "cached": "Cached input",
    "ended": "Ended quarantines",
    "expires_at": "Expires",
    "inherit": "Inherited again",
    "input": "Input",
    "left_out": "Failed log-ins without an entry",
    "num_bytes": "Size",
    "old": "Replaced key",
    "old_expires_at": "Replaced key expires",
    "output": "Output",
    "targets": "Versions",
    "url": "URL",
}
# Words for None in fields where it does not mean "none".
UNSET = {"allowed_models": "all", "expires_at": "never", "types": "all"}
# Entries of these actions have `before` among their new values. It is the earlier value of this field.
EARLIER = {
    "adapter.alias": "targets",
    "adapter.alias_delete": "targets",
    "adapter.rollback": "targets",
    "mixture.delete": "model",
    "mixture.save": "model",
}
# Longest text of a value on a page, in characters; the file and the API have all of it.
MAX_CHARS = 300

Change = tuple[str, str | None, str]
"""Title of a field, its earlier value in words (None without one), and its new value."""


def changes_of(action: str, detail: Mapping[str, Any], before: Mapping[str, Any] | None) -> Sequence[Change]:
    """Return the changed fields of an entry in words."""
    new, old = dict(detail), dict(before or {})
    if (field := EARLIER.get(action)) and (earlier := new.pop("before", None)) is not None:
        old[field] = earlier
    return [
        (
            FIELDS.get(name) or title_of(name),
            _text(name, old[name]) if name in old else None,
            _text(name, new.get(name)),
        )
        for name in {**old, **new}
        if name not in old or old[name] != new.get(name)
    ]


def sentence(changes: Sequence[Change], arrow: str = "->") -> str:
    """Return the changes in a line of plain text."""
    return "; ".join(f"{name}: {f'{old} {arrow} ' if old is not None else ''}{new}" for name, old, new in changes)


def clipped(text: str) -> str:
    """Return at most MAX_CHARS of a text: a tenant chooses some texts, and must not fill an operator's page."""
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS].rstrip()}… ({len(text):,} characters)"


def _text(name: str, value: Any) -> str:
    """Return a value in words: an amount as money, None as `none`, a mapping or list by its entries."""
    if value is None and name in UNSET:
        return UNSET[name]
    if isinstance(value, Mapping):
        given = {key: each for key, each in value.items() if each is not None}
        return _joined(given.values(), [f"{_word(key)}: {_text(key, each)}" for key, each in given.items()])
    if name == "targets" and isinstance(value, list):
        return _targets(value)
    if name == "budget_warn_at":
        return term_text(name, value)
    if isinstance(value, list):
        return _joined(value, [title_of(each) if name == "inherit" else _text(name, each) for each in value])
    if name in AMOUNTS and isinstance(value, int):
        return format_money(value)
    if isinstance(value, str) and name.endswith("_at"):
        return _moment(value)
    return term_text(name, value)


def _joined(values: Any, texts: Sequence[str]) -> str:
    """Join the texts of values with commas, or with semicolons if a value has commas of its own."""
    return ("; " if any(isinstance(each, Mapping | list) for each in values) else ", ").join(texts) or NO_LIMIT


def _targets(targets: Sequence[Mapping[str, Any]]) -> str:
    """Return the versions of an alias, each with its share of the requests."""
    total = sum(target.get("weight", 1) for target in targets) or 1
    return ", ".join(
        f"{target.get('version')} ({100 * target.get('weight', 1) / total:.4g} %"
        f"{f', until {_moment(end)}' if (end := target.get('expires_at')) else ''})"
        for target in targets
    )


def _moment(text: str) -> str:
    """Return an ISO 8601 time in the form of the pages, and any other text unchanged."""
    if not re.fullmatch(r"\d{4}-\d\d-\d\dT.*", text):
        return text
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return text
    return (at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)).strftime(EXACT)


def _word(key: str) -> str:
    """Return the title of a field within a value; the name of a model as it is."""
    return FIELDS.get(key) or (TITLES[key][0] if key in TITLES else key)
