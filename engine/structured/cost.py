"""What a grammar may cost to compile, where the library has no limit of its own. docs/lab-notes.md has the figures.

Compiling cannot be interrupted, and takes time and memory with the square of a regular expression's length: a terminal
of Lark's, which is one regular expression with all those that it names, is therefore measured as it is put together.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from engine.scheduling.request import RequestError
from engine.structured.spec import MAX_REGEX_BYTES

MAX_MULTIPLES = 100_000
# Of a terminal that is not the grammar's own (`%import`), in characters of a regular expression.
_IMPORTED = 32
_KEYWORD = re.compile(r"%(json|regex|llguidance)\s*")
# Lark's as llguidance reads it; what is nothing of this says nothing of costs. A comment and `<"...">` may hold quotes.
_LEXEME = re.compile(
    r"""(?P<skip>(?:\#|//)[^\n]*|<[^<>\s]+>)
    |(?P<string>"(?:\\.|[^"\\\x00-\x1f\x7f])*")
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<name>_?[A-Z][_A-Z0-9\-]*|!?[_?]?[a-z][_a-z0-9\-]*)
    |(?P<sign>[+*?:\[\]])""",
    re.VERBOSE,
)


def check_schemas(schemas: Iterable[Any], param: str) -> None:
    """Raises RequestError for JSON schemas with too long patterns, or too large numbers in `multipleOf`.

    Such a number becomes an automaton with as many states as it has units, or as the least common multiple of several:
    0.15 s at 100,000, 8 s and 270 MiB at a million.
    """
    multiples: list[int] = []
    patterns = 0
    nodes = list(schemas)
    while nodes:
        node = nodes.pop()
        if not isinstance(node, dict):
            nodes += node if isinstance(node, list) else ()
            continue
        nodes += node.values()
        patterns += len(node["pattern"]) if isinstance(node.get("pattern"), str) else 0
        patterns += sum(map(len, node["patternProperties"])) if isinstance(node.get("patternProperties"), dict) else 0
        value = node.get("multipleOf")
        if isinstance(value, int | float) and math.isfinite(value) and value:
            # Its digits without the zeros: powers of ten are cheap.
            multiples.append(int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits))))
    if patterns > MAX_REGEX_BYTES:
        raise RequestError(param, f"pattern: all together are {patterns} characters, the most served {MAX_REGEX_BYTES}")
    if sum(multiples) > MAX_MULTIPLES or math.lcm(*multiples) > MAX_MULTIPLES:
        raise RequestError(param, f"multipleOf: the sum of all, and their least common multiple, over {MAX_MULTIPLES}")


@dataclass(slots=True)
class _Definition:
    """A rule or terminal. own: characters of its regular expressions, in a terminal also the number of its strings and
    repetitions. names: those in it."""

    is_terminal: bool = False
    own: int = 0
    names: list[str] = field(default_factory=list)


def check_lark(text: str, param: str) -> None:
    """Raises RequestError for a Lark grammar whose terminals, put together, or whose `%json` schemas cost too much.

    ValueError or RecursionError for one that cannot be read.
    """
    schemas: list[Any] = []
    definitions = _read_definitions(text, schemas)
    check_schemas(schemas, param)
    sizes: dict[str, int] = {}

    def size(name: str) -> int:
        if name not in definitions:
            return _IMPORTED
        if name not in sizes:
            sizes[name] = 0  # one that names itself is refused by the library
            found = definitions[name]
            # What a rule names is parsed, not put together.
            sizes[name] = found.own + sum(size(used) for used in found.names if found.is_terminal)
        return sizes[name]

    total = sum(map(size, definitions))
    if total > MAX_REGEX_BYTES:
        raise RequestError(
            param,
            f"its regular expressions and terminals, each with what it names, are {min(total, 10**9)} characters long "
            f"together, the most served {MAX_REGEX_BYTES}",
        )


def _read_definitions(text: str, schemas: list[Any]) -> dict[str, _Definition]:
    """By name, twice the same name as one. `%json` schemas are added to `schemas`."""
    definitions: dict[str, _Definition] = {}
    current = definitions[""] = _Definition()
    before_options, last = 0, ""
    for kind, lexeme in _lexemes(text):
        if kind == "skip":
            continue
        if kind == "json":
            schemas.append(json.loads(lexeme))
        elif kind == "regex":
            current.own += len(lexeme)
        elif kind == "name":
            current.names.append(lexeme)
        elif lexeme == "[":
            before_options = len(current.names)
        elif lexeme == ":":
            if last == "]":  # `name[capture, max_tokens=5]: ...`
                del current.names[before_options:]
            name = current.names.pop() if current.names else ""
            current = definitions.setdefault(name, _Definition(name.isupper()))
        elif current.is_terminal:
            current.own += 1
        last = lexeme
    return definitions


def _lexemes(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        if keyword := _KEYWORD.match(text, at):
            _, end = json.JSONDecoder().raw_decode(text, keyword.end())
            kind = {"json": "json", "regex": "regex", "llguidance": "skip"}[keyword[1]]
            yield kind, text[keyword.end() : end]
            at = end
        elif found := _LEXEME.match(text, at):
            yield str(found.lastgroup), found[0]
            at = found.end()
        else:
            at += 1
