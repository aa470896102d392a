"""Effective settings as people may see them: values of secrets are replaced by a mark, passwords in URLs too."""

import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgspec

from gateway.settings import OFF, Settings, env_name

SET, NOT_SET = "set, not shown", "not set"
# User and password, and the query, of a URL within a value.
_USER = re.compile(r"(?<=://)[^/\s]*@")
_QUERY = re.compile(r"(?<=\?)\S+")


class ShownSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting. value: for people. is_set: whether it differs from the default; default: None if it is required."""

    name: str
    value: str
    default: str | None
    is_set: bool
    is_secret: bool


def shown_settings(settings: Settings) -> list[ShownSetting]:
    """Return all settings in the order of their definition."""
    found = []
    for field in fields(Settings):
        value = getattr(settings, field.name)
        is_secret, is_required = not field.repr, field.default is MISSING
        found.append(
            ShownSetting(
                name=env_name(field.name),
                value=_secret(value) if is_secret else _text(value),
                default=None if is_required else _secret(field.default) if is_secret else _text(field.default),
                is_set=is_required or value != field.default,
                is_secret=is_secret,
            )
        )
    return found


def _secret(value: Any) -> str:
    return NOT_SET if value is None else OFF if value == OFF else SET


def _text(value: Any) -> str:
    if value is None:
        return NOT_SET
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_text(each) for each in value) or "none"
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 1e6 else f"{value:.0f}"
    text = str(value) if isinstance(value, str | int | Path) else repr(value)
    return _QUERY.sub("...", _USER.sub("...@", text)) if "://" in text else text
