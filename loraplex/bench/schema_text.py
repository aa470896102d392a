"""Errors of msgspec's validation, in words for the writer of a configuration file."""

import re
from typing import Any

import msgspec
from msgspec import inspect

from loraplex.bench.toml_lines import Path

MAX_SHOWN = 60
NAMES = {
    "float": "a number",
    "int": "a whole number",
    "str": "a text",
    "object": "a table",
    "array": "a list",
    "bool": "true or false",
}


def describe(message: str, root: type[msgspec.Struct], value: Any) -> tuple[Path, str]:
    """Return the path of the wrong key and what was expected, from the message of a msgspec.ValidationError."""
    text, _, where = message.partition(" - at `$")
    path = _path(where.rstrip("`"))
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", text, re.DOTALL):
        known = ", ".join(_keys(_type_at(inspect.type_info(root), path, value)))
        return (*path, unknown[1]), f"unknown key; known are {known}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        return path, f"the key {missing[1]} is missing{_choices(root, path, value, missing[1])}"
    if text.startswith("Invalid value ") and path and path[-1] == "kind":
        kind, choices = text.removeprefix("Invalid value "), _choices(root, path[:-1], value, "kind")
        return path, f"{kind} is not a known kind{choices}"
    text = re.sub(r"`(.*?)`", lambda found: _in_words(found[1]), text[:1].lower() + text[1:])
    return path, text + _got(path, value)


def _in_words(types: str) -> str:
    """Return msgspec's names of types in words. `float | null` is a number, because TOML has no null."""
    return " or ".join(NAMES.get(name, name) for name in types.split(" | ") if name != "null" or types == "null")


def _path(text: str) -> Path:
    parts = re.findall(r"\.([^.\[\]]+)|\[(\d+)\]", text)
    return tuple(int(number) if number else name for name, number in parts)


def _got(path: Path, value: Any) -> str:
    """Return the value at the path, if it is short and the message does not have its type already."""
    for key in path:
        value = value[key]
    if isinstance(value, int) and abs(value) >= 10**MAX_SHOWN:
        return f": a number of more than {MAX_SHOWN} digits"
    return f": {value!r}" if isinstance(value, str | int | float) and len(repr(value)) <= MAX_SHOWN else ""


def _choices(root: type[msgspec.Struct], path: Path, value: Any, key: str) -> str:
    """Return the kinds that a table may have, if its kind is missing or wrong."""
    found = _type_at(inspect.type_info(root), path, value) if key == "kind" else None
    tags = [str(choice.tag) for choice in getattr(found, "types", ()) if isinstance(choice, inspect.StructType)]
    return f"; expected one of {', '.join(tags)}" if tags else ""


def _type_at(kind: inspect.Type, path: Path, value: Any) -> inspect.Type:
    """Return the type at a path. A union of tagged tables is resolved by the value's `kind`, where it names one."""
    kind = _resolved(kind, value)
    if not path:
        return kind
    inner = value[path[0]]
    if isinstance(kind, inspect.ListType):
        return _type_at(kind.item_type, path[1:], inner)
    assert isinstance(kind, inspect.StructType)
    [found] = [member.type for member in kind.fields if member.encode_name == path[0]]
    return _type_at(found, path[1:], inner)


def _resolved(kind: inspect.Type, value: Any) -> inspect.Type:
    if not isinstance(kind, inspect.UnionType):
        return kind
    members = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    tag = value.get("kind") if isinstance(value, dict) else None
    chosen = [m for m in members if isinstance(m, inspect.StructType) and m.tag is not None and m.tag == tag]
    return chosen[0] if chosen else members[0] if len(members) == 1 else kind


def _keys(kind: inspect.Type) -> list[str]:
    if not isinstance(kind, inspect.StructType):
        return []
    tag = [kind.tag_field] if kind.tag_field else []
    return tag + [member.encode_name for member in kind.fields]
