"""Reader of the file of `loraplex tenant apply`: YAML with plans and tenants, each mistake with its line."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from loraplex.commands.output import BUDGETS
from loraplex.commands.usage.prices import AMOUNTS, PRICE
from loraplex.commands.values import NO_LIMIT, Money

INHERIT = "inherit"
TEXTS = ("display_name", "external_id", "contact", "note")
LISTS = ("tags", "budget_warn_at")


class FileError(Exception):
    """A mistake in the file; the message begins with its line."""


@dataclass
class Entry:
    """A plan or tenant of the file. fields: as in the API. inherit: terms that the entry does not set."""

    line: int
    fields: dict[str, Any] = field(default_factory=dict)
    inherit: list[str] = field(default_factory=list)


@dataclass
class TenantFile:
    """The file's entries by name."""

    plans: dict[str, Entry]
    tenants: dict[str, Entry]


def read_file(path: Path) -> TenantFile:
    """Read a file of plans and tenants. Raises FileError with the line, OSError."""
    try:
        root = yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise FileError(f"line {mark.line + 1 if mark else 1}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FileError(f"line 1: not YAML: {error}") from error
    found: dict[str, dict[str, Entry]] = {"plans": {}, "tenants": {}}
    for name, line, node in _entries(root, "the file") if root is not None else ():
        if name not in found:
            raise FileError(f"line {line}: unknown key '{name}', expected plans or tenants")
        for entry, place, fields in _entries(node, name):
            found[name][entry] = _read_entry(place, fields, f"{name}.{entry}", of_plan=name == "plans")
    return TenantFile(**found)


def _read_entry(line: int, node: yaml.Node, where: str, *, of_plan: bool) -> Entry:
    from gateway.records.tenants.terms import FIELDS

    others = ("prices",) if of_plan else ("plan", "suspended", "tags", *TEXTS)
    entry = Entry(line)
    if _is_null(node):
        return entry
    for name, place, value in _entries(node, where):
        if name not in (*FIELDS, *others):
            raise FileError(
                f"line {place}: unknown key '{name}' in {where}, expected one of {', '.join((*FIELDS, *others))}"
            )
        if name in FIELDS and _text(value) == INHERIT:
            entry.inherit.append(name)
        else:
            entry.fields[name] = _read_value(name, value)
    return entry


def _read_value(name: str, node: yaml.Node) -> Any:
    if name in ("model_limits", "prices"):
        return {model: dict(_limits(of_model, name)) for model, _, of_model in _entries(node, name)}
    if name in TEXTS and isinstance(node, yaml.ScalarNode) and not _is_null(node):
        # Numbers stay as they are written, because an external id may look like one.
        return node.value
    if _is_null(node) or _text(node) == NO_LIMIT:
        return [] if name in LISTS else None
    if name in BUDGETS:
        return _money(node, Money())
    where = f"line {node.start_mark.line + 1}: {name}"
    try:
        value = yaml.SafeLoader("").construct_object(node, deep=True)
    except yaml.MarkedYAMLError as error:
        raise FileError(f"{where}: {error.problem}") from error
    if isinstance(value, list) and name not in LISTS:
        raise FileError(f"{where}: expected a single value")
    values = value if isinstance(value, list) else [value]
    for each in values:
        if not isinstance(each, str | int | float):
            raise FileError(f"{where}: expected a text or a number, got {each}")
        if isinstance(each, float) and not math.isfinite(each):
            raise FileError(f"{where}: expected a finite number, got {each}")
    if len({isinstance(each, str) for each in values}) > 1:
        raise FileError(f"{where}: expected texts or numbers, not both")
    return sorted(value) if isinstance(value, list) else value


def _limits(node: yaml.Node, name: str) -> Iterator[tuple[str, Any]]:
    for key, _, value in _entries(node, name):
        if name == "prices" and key in AMOUNTS:
            yield key, _money(value, PRICE)
        else:
            yield key, _read_value(key, value)


def _money(node: yaml.Node, kind: Money) -> int:
    text = _text(node)
    try:
        return kind.convert(text, None, None)  # type: ignore[return-value]
    except click.BadParameter as error:
        raise FileError(f"line {node.start_mark.line + 1}: {error.message}") from error


def _entries(node: yaml.Node, where: str) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield each key of a mapping with its line and value. Raises FileError, for a repeated key too."""
    if _is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise FileError(f"line {node.start_mark.line + 1}: expected a mapping in {where}")
    seen = set()
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise FileError(f"line {line}: expected a name in {where}")
        if key.value in seen:
            raise FileError(f"line {line}: '{key.value}' appears twice in {where}")
        seen.add(key.value)
        yield key.value, line, value


def _text(node: yaml.Node) -> str:
    return node.value if isinstance(node, yaml.ScalarNode) else ""


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")
