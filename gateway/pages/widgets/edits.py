"""Edits by form of records that others may change at the same time.

A form carries a short hash of each value with which it was rendered, in the hidden field `shown`. A field that the
person did not touch keeps its present value, and one that another person changed too is a conflict.
"""

from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import wraps
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from multidict import MultiDict, MultiMapping

from gateway.errors import Changed

Pages = TypeVar("Pages")
Answer = TypeVar("Answer", bound=web.StreamResponse)
Edits = Callable[[Pages, web.Request], Coroutine[Any, Any, Answer]]
# Number of times that a form is merged before its answer is the page of a conflict.
TRIES = 3
SHOWN = "shown"
HASH_CHARS = 16


class Edit(NamedTuple):
    """Form of an edit. fields: as sent, with the present value in each untouched field. conflicts: texts by field."""

    fields: MultiDict[str]
    conflicts: dict[str, str]

    @property
    def status(self) -> int:
        """Return the HTTP status of the form with errors."""
        return 409 if self.conflicts else 400


def again_if_changed(handler: Edits[Pages, Answer]) -> Edits[Pages, Answer]:
    """Run an edit's handler again if its record was changed between its read and its write.

    The handler reads the record, merges the form, and names what it read as `seen` of the change. The next run then
    reads the other change, and conflicts only if both changed the same field. Raises Changed after TRIES runs.
    """

    @wraps(handler)
    async def again(pages: Pages, request: web.Request) -> Answer:
        for _ in range(TRIES - 1):
            with suppress(Changed):
                return await handler(pages, request)
        return await handler(pages, request)

    return again


def merge(form: MultiMapping[str], present: Mapping[str, str]) -> Edit:
    """Return the form over the record's present values, by field. Without `shown`, every field counts as touched.

    The returned form shows the present values, so that sending it again after a conflict writes the person's own.
    """
    shown, fields, conflicts = _read(form.get(SHOWN, "")), MultiDict(form.items()), dict[str, str]()
    for name, now in present.items():
        was, mine = shown.get(name, _hashed(now)), form.get(name, "")
        if _hashed(mine) == was:
            fields[name] = now
        elif was != _hashed(now) != _hashed(mine):
            conflicts[name] = (
                f"Another change was saved since you opened the form: the present value is {now or 'empty'}. "
                f"Send the form again to replace it by {mine.strip() or 'empty'}."
            )
    fields[SHOWN] = shown_values(present)
    return Edit(fields, conflicts)


def shown_values(present: Mapping[str, str]) -> str:
    """Return the value of the form's hidden field."""
    return msgspec.json.encode({name: _hashed(value) for name, value in present.items()}).decode()


def _read(text: str) -> dict[str, str]:
    """Return the hashes of a hidden field; none if it is absent or malformed."""
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.MsgspecError, ValueError):
        return {}


def _hashed(value: str) -> str:
    """Return a hash of a value. Browsers send line ends as CR and LF."""
    return sha256(value.replace("\r\n", "\n").strip().encode()).hexdigest()[:HASH_CHARS]
