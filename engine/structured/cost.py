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

# Each limit is where the dearest compilation that was found takes 0.1 to 0.3 s; docs/lab-notes.md has the figures.
MAX_MULTIPLES = 10_000
MAX_RANGES = 300
MAX_PATTERN_PROPERTIES = 64
MAX_JOINED_PATTERNS = 12
MAX_INTERSECTIONS = 4
MAX_ENUM_OBJECTS = 500
# Ways to choose one alternative of each `anyOf` that stand together in an `allOf`.
MAX_COMBINATIONS = 128
# Weight of a repetition in characters: `\\w*` in a row costs fifty times as much as words in a row.
REPETITION = 6
_REPETITION = re.compile(r"\\.|\(\?|([*+?{])", re.DOTALL)
# Keys whose constraints hold beside those of a node's other keys, so that patterns of the same value are intersected.
_APPLICATORS = frozenset({"anyOf", "oneOf", "$ref"})
_CONSTRAINTS = frozenset(
    {
        "additionalProperties",
        "format",
        "items",
        "multipleOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
    }
)
# Of a terminal that is not the grammar's own (`%import`), in characters of a regular expression.
_IMPORTED = 32
_KEYWORD = re.compile(r"%(json|regex|llguidance)\s*")
# Lark's as llguidance reads it; what is nothing of this says nothing of costs. A comment and `<"...">` may hold quotes.
_LEXEME = re.compile(
    r"""(?P<skip>(?:\#|//)[^\n]*|<[^<>\s]+>)
    |(?P<string>"(?:\\.|[^"\\\x00-\x1f\x7f])*")
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<name>_?[A-Z][_A-Z0-9\-]*|!?[_?]?[a-z][_a-z0-9\-]*)
    |(?P<sign>[+*?:&~\[\]])""",
    re.VERBOSE,
)


def regex_size(text: str) -> int:
    """Return the length of a regular expression, each repetition counted as `REPETITION` characters."""
    return len(text) + (REPETITION - 1) * sum(1 for found in _REPETITION.finditer(text) if found[1])


def check_regex(text: str, param: str) -> None:
    """Raise RequestError for a regular expression that is too long, or has too many repetitions."""
    size = regex_size(text)
    if size > MAX_REGEX_BYTES:
        raise RequestError(
            param,
            f"the regular expression counts {size} characters, each repetition as {REPETITION}, "
            f"the most served {MAX_REGEX_BYTES}",
        )


@dataclass(slots=True)
class _SchemaCosts:
    """Counts over schemas of what the library has no limit for."""

    multiples: list[int] = field(default_factory=list)
    ranges: set[tuple[Any, ...]] = field(default_factory=set)
    patterns: list[str] = field(default_factory=list)
    formats: set[str] = field(default_factory=set)
    num_pattern_properties: int = 0
    num_enum_objects: int = 0
    num_combinations: int = 1
    is_joined: bool = False

    def add(self, node: dict[str, Any]) -> None:
        """Count one object, which need not be a schema: `properties` are walked through as well."""
        if isinstance(node.get("pattern"), str):
            self.patterns.append(node["pattern"])
        if isinstance(node.get("format"), str):
            self.formats.add(node["format"])
        if isinstance(named := node.get("patternProperties"), dict):
            self.patterns += named
            self.num_pattern_properties += len(named)
        applied = len(_APPLICATORS & node.keys())
        several = isinstance(node.get("allOf"), list) and len(node["allOf"]) > 1
        others = len(_CONSTRAINTS & node.keys()) + ("allOf" in node)
        self.is_joined |= several or applied > 1 or (applied + ("allOf" in node) > 0 and applied + others > 1)
        if isinstance(values := node.get("enum"), list):
            self.num_enum_objects += sum(isinstance(value, dict | list) for value in values)
        if several:
            self.num_combinations = max(self.num_combinations, math.prod(map(_num_alternatives, node["allOf"])))
        bounds = tuple(repr(node.get(key)) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
        if any(bound != "None" for bound in bounds):
            self.ranges.add((repr(node.get("type")), repr(node.get("multipleOf")), *bounds))
        value = node.get("multipleOf")
        if isinstance(value, int | float) and math.isfinite(value) and value:
            # Its digits without the zeros: powers of ten are cheap.
            self.multiples.append(int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits))))


def check_schemas(schemas: Iterable[Any], param: str) -> None:
    """Raise RequestError for JSON schemas that are dear to compile: by numbers in `multipleOf`, patterns or ranges.

    `multipleOf` becomes an automaton with as many states as it has units, or as the least common multiple of several.
    Patterns of one value are intersected: time doubles with each beyond a dozen, and 20 never end.
    """
    costs = _SchemaCosts()
    nodes = list(schemas)
    while nodes:
        node = nodes.pop()
        if not isinstance(node, dict):
            nodes += node if isinstance(node, list) else ()
            continue
        nodes += node.values()
        costs.add(node)
    size = sum(map(regex_size, costs.patterns))
    if size > MAX_REGEX_BYTES:
        raise RequestError(
            param,
            f"pattern: all together count {size} characters, each repetition as {REPETITION}, "
            f"the most served {MAX_REGEX_BYTES}",
        )
    _at_most(MAX_MULTIPLES, sum(costs.multiples), "multipleOf: the sum of all", param)
    _at_most(MAX_RANGES, len(costs.ranges), "minimum, maximum: different ranges", param)
    _at_most(MAX_PATTERN_PROPERTIES, costs.num_pattern_properties, "patternProperties: patterns", param)
    _at_most(MAX_ENUM_OBJECTS, costs.num_enum_objects, "enum: objects and lists", param)
    _at_most(MAX_COMBINATIONS, costs.num_combinations, "allOf: combinations of alternatives", param)
    if costs.is_joined:
        multiple = math.lcm(*costs.multiples)
        _at_most(MAX_MULTIPLES, multiple, "multipleOf: the least common multiple beside allOf, anyOf or $ref", param)
        joined = len(set(costs.patterns)) + len(costs.formats)
        _at_most(MAX_JOINED_PATTERNS, joined, "pattern, format: different ones beside allOf, anyOf or $ref", param)


def _num_alternatives(node: Any) -> int:
    lists = [node[key] for key in ("anyOf", "oneOf") if isinstance(node, dict) and isinstance(node.get(key), list)]
    return math.prod(len(alternatives) or 1 for alternatives in lists)


def _at_most(most: int, found: int, name: str, param: str) -> None:
    if found > most:
        raise RequestError(param, f"{name}: expected at most {most}, got {found}")


@dataclass(slots=True)
class _Definition:
    """A rule or terminal. own: characters of its regular expressions, in a terminal also the number of its strings, and
    `REPETITION` for each repetition. names: those in it. num_intersections: of the whole grammar, in its first one."""

    is_terminal: bool = False
    own: int = 0
    names: list[str] = field(default_factory=list)
    num_intersections: int = 0


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

    _at_most(MAX_INTERSECTIONS, definitions[""].num_intersections, "intersections and complements (& ~)", param)
    total = sum(map(size, definitions))
    if total > MAX_REGEX_BYTES:
        raise RequestError(
            param,
            f"its regular expressions and terminals, each with what it names, count {min(total, 10**9)} characters "
            f"together, each repetition as {REPETITION}, the most served {MAX_REGEX_BYTES}",
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
            current.own += regex_size(lexeme)
        elif kind == "name":
            current.names.append(lexeme)
        elif lexeme == "[":
            before_options = len(current.names)
        elif lexeme == ":":
            if last == "]":  # `name[capture, max_tokens=5]: ...`
                del current.names[before_options:]
            name = current.names.pop() if current.names else ""
            current = definitions.setdefault(name, _Definition(name.isupper()))
        elif lexeme in "&~":
            definitions[""].num_intersections += 1
        elif current.is_terminal:
            current.own += REPETITION if lexeme in "*+?" else 1
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
