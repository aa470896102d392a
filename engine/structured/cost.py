"""Limits of a grammar's compilation cost, where the library has none. docs/lab-notes.md has the figures.

Compilation cannot be interrupted, and its time and memory grow with the square of a regular expression's length. A Lark
terminal is one regular expression together with all terminals that it names, so its size is measured after their
expansion.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import reduce
from typing import Any
from urllib.parse import unquote

from wire.errors import BadRequest
from wire.structured import MAX_REGEX_BYTES

# At each limit, the most expensive compilation found takes 0.1 to 0.3 s; docs/lab-notes.md has the figures.
MAX_MULTIPLES = 10_000
MAX_RANGES = 300
MAX_PATTERN_PROPERTIES = 64
MAX_JOINED_PATTERNS = 12
MAX_INTERSECTIONS = 4
MAX_ENUM_OBJECTS = 500
# Limit of combinations: one alternative from each `anyOf` that applies to the same value.
MAX_COMBINATIONS = 128
# Limit of steps to count combinations, about 0.3 s.
MAX_STEPS = 500_000
# Weight of a repetition, in characters: a sequence of `\\w*` costs fifty times as much as a sequence of words.
REPETITION = 6
_REPETITION = re.compile(r"\\.|\(\?|([*+?{])", re.DOTALL)
# Keys whose schemas apply to the same value as the node's other keys, so that patterns of both are intersected.
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
# Keys whose schemas apply to a part of the value.
_INNER = frozenset({"additionalProperties", "items", "patternProperties", "prefixItems", "properties"})
# Size of an imported terminal (`%import`), in characters of a regular expression.
_IMPORTED = 32
_KEYWORD = re.compile(r"%(json|regex|llguidance)\s*")
# Lexemes of llguidance's Lark; other text does not affect the cost. Comments and `<"...">` are skipped because they may
# contain quotes. A string or regular expression without its end is a lexeme too, which the library refuses: without it,
# the search for the end would begin again at each quote, and 16 KiB would take seconds.
_LEXEME = re.compile(
    r"""(?P<skip>(?:\#|//)[^\n]*|<[^<>\s]+>)
    |(?P<string>"(?:\\.|[^"\\\x00-\x1f\x7f])*"?)
    |(?P<regex>/(?:\\.|[^/\\])+/?[imslux]*)
    |(?P<name>_?[A-Z][_A-Z0-9\-]*|!?[_?]?[a-z][_a-z0-9\-]*)
    |(?P<sign>[+*?:&~\[\]])""",
    re.VERBOSE,
)


def regex_size(text: str) -> int:
    """Return the length of a regular expression, each repetition counted as `REPETITION` characters."""
    return len(text) + (REPETITION - 1) * sum(1 for found in _REPETITION.finditer(text) if found[1])


def check_regex(text: str, param: str) -> None:
    """Raise BadRequest for a regular expression that is too long or has too many repetitions."""
    size = regex_size(text)
    if size > MAX_REGEX_BYTES:
        raise BadRequest.of(
            param,
            f"the regular expression has {size} characters, counting each repetition as {REPETITION}; "
            f"the limit is {MAX_REGEX_BYTES}.",
        )


@dataclass(slots=True)
class _SchemaCosts:
    """Counts of the properties of schemas that the library does not limit."""

    multiples: list[int] = field(default_factory=list)
    ranges: set[tuple[Any, ...]] = field(default_factory=set)
    patterns: list[str] = field(default_factory=list)
    formats: set[str] = field(default_factory=set)
    num_pattern_properties: int = 0
    num_enum_objects: int = 0
    is_joined: bool = False

    def add(self, node: dict[str, Any]) -> None:
        """Count one JSON object. It need not be a schema, because the walk also enters maps such as `properties`."""
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
        bounds = tuple(repr(node.get(key)) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
        if any(bound != "None" for bound in bounds):
            self.ranges.add((repr(node.get("type")), repr(node.get("multipleOf")), *bounds))
        value = node.get("multipleOf")
        if isinstance(value, int | float) and math.isfinite(value) and value:
            # Takes the digits without trailing zeros, because powers of ten are cheap.
            self.multiples.append(int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits))))


def check_schemas(schemas: Iterable[Any], param: str) -> None:
    """Raise BadRequest for JSON schemas that are expensive to compile: by their alternatives, `multipleOf`, patterns
    or ranges.

    A `multipleOf` becomes an automaton with as many states as its value has units; several of them together need their
    least common multiple. Patterns of one value are intersected: the time doubles with each pattern beyond a dozen, and
    20 never finish.
    """
    costs = _SchemaCosts()
    nodes = list(schemas)
    num_combinations = max((_Combinations(schema, param).most() for schema in nodes), default=1)
    while nodes:
        node = nodes.pop()
        if not isinstance(node, dict):
            nodes += node if isinstance(node, list) else ()
            continue
        nodes += node.values()
        costs.add(node)
    size = sum(map(regex_size, costs.patterns))
    if size > MAX_REGEX_BYTES:
        raise BadRequest.of(
            param,
            f"pattern: all patterns together have {size} characters, counting each repetition as {REPETITION}; "
            f"the limit is {MAX_REGEX_BYTES}.",
        )
    _at_most(MAX_MULTIPLES, sum(costs.multiples), "multipleOf: the sum of all", param)
    _at_most(MAX_RANGES, len(costs.ranges), "minimum, maximum: different ranges", param)
    _at_most(MAX_PATTERN_PROPERTIES, costs.num_pattern_properties, "patternProperties: patterns", param)
    _at_most(MAX_ENUM_OBJECTS, costs.num_enum_objects, "enum: objects and lists", param)
    _at_most(MAX_COMBINATIONS, num_combinations, "allOf: combinations of alternatives", param)
    if costs.is_joined:
        multiple = math.lcm(*costs.multiples)
        _at_most(MAX_MULTIPLES, multiple, "multipleOf: the least common multiple beside allOf, anyOf or $ref", param)
        joined = len(set(costs.patterns)) + len(costs.formats)
        _at_most(MAX_JOINED_PATTERNS, joined, "pattern, format: different ones beside allOf, anyOf or $ref", param)


@dataclass(eq=False, slots=True)
class _Shape:
    """The number of alternatives of a schema, and the shapes of its value's parts: by property name, `*` for all other
    names, `[n]` for an item and `[]` for all other items.
    """

    count: int = 1
    inner: "dict[str, _Shape]" = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return self.count == 1 and not self.inner

    def at(self, key: str) -> "_Shape | None":
        return self.inner.get(key) or self.inner.get("[]" if key.startswith("[") else "*")


class _Combinations:
    """Counter of the combinations of alternatives that the library builds where several schemas apply to one value: by
    `allOf` or by keys next to each other, also through `$ref` and in properties of the same name. Each pair is merged
    once.
    """

    def __init__(self, root: Any, param: str) -> None:
        self._root = root
        self._param = param
        self._most = 1
        self._num_steps = 0
        self._merged: dict[tuple[int, int, bool], tuple[_Shape, _Shape, _Shape]] = {}
        self._targets: dict[str, _Shape] = {}

    def most(self) -> int:
        """Return the largest number of combinations. Raises BadRequest if counting them takes too many steps."""
        self._walk(self._root)
        return self._most

    def _walk(self, node: Any) -> _Shape:
        """Return the shape of a schema. Objects that are not schemas, such as `$defs`, are walked too."""
        if not isinstance(node, dict):
            for item in node if isinstance(node, list) else ():
                self._walk(item)
            return _Shape()
        parts = [_Shape(inner=self._inner(node))]
        for key, value in node.items():
            if key in ("anyOf", "oneOf") and isinstance(value, list):
                parts.append(self._reduce([self._walk(item) for item in value], are_alternatives=True))
            elif key == "allOf" and isinstance(value, list):
                parts += [self._walk(item) for item in value]
            elif key == "$ref" and isinstance(value, str):
                parts.append(self._target(value))
            elif key not in _INNER:
                self._walk(value)
        return self._reduce(parts, are_alternatives=False)

    def _inner(self, node: dict[str, Any]) -> dict[str, _Shape]:
        properties, prefix = node.get("properties"), node.get("prefixItems")
        inner = {k: self._walk(v) for k, v in properties.items()} if isinstance(properties, dict) else {}
        inner |= {f"[{i}]": self._walk(item) for i, item in enumerate(prefix)} if isinstance(prefix, list) else {}
        if "items" in node:
            inner["[]"] = self._walk(node["items"])
        others = node.get("patternProperties")
        shapes = [self._walk(value) for value in others.values()] if isinstance(others, dict) else []
        shapes += [self._walk(node["additionalProperties"])] if "additionalProperties" in node else []
        if shapes:  # one of them applies to each name
            inner["*"] = self._reduce(shapes, are_alternatives=True)
        return inner

    def _target(self, pointer: str) -> _Shape:
        if pointer not in self._targets:
            self._targets[pointer] = _Shape()  # ends the walk of a reference to itself
            node = self._root
            for part in unquote(pointer).lstrip("#").split("/")[1:]:
                node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
            self._targets[pointer] = self._walk(node)
        return self._targets[pointer]

    def _reduce(self, shapes: list[_Shape], *, are_alternatives: bool) -> _Shape:
        return reduce(lambda a, b: self._merge(a, b, are_alternatives), shapes) if shapes else _Shape()

    def _merge(self, a: _Shape, b: _Shape, are_alternatives: bool) -> _Shape:
        """Return the shape of a value to which either schema applies, or both. Alternatives keep the larger count of a
        part.
        """
        if not are_alternatives and (a.is_plain or b.is_plain):
            return b if a.is_plain else a
        known = self._merged.get((id(a), id(b), are_alternatives))
        if known is not None:
            return known[0]
        self._num_steps += 1 + len(a.inner) + len(b.inner)
        _at_most(MAX_STEPS, self._num_steps, "allOf, anyOf, $ref: steps to count their combinations", self._param)
        inner = {}
        for key in {*a.inner, *b.inner}:
            mine, theirs = a.at(key), b.at(key)
            if mine is not None and theirs is not None:
                merged = self._merge(mine, theirs, are_alternatives)
                inner[key] = _Shape(max(mine.count, theirs.count), merged.inner) if are_alternatives else merged
            else:
                inner[key] = mine or theirs or _Shape()
        shape = _Shape(a.count + b.count if are_alternatives else a.count * b.count, inner)
        if not are_alternatives and a.count > 1 and b.count > 1:
            self._most = max(self._most, shape.count)
        # Stores the operands too, so that their ids are not reused.
        self._merged[id(a), id(b), are_alternatives] = shape, a, b
        return shape


def _at_most(most: int, count: int, name: str, param: str) -> None:
    if count > most:
        raise BadRequest.of(param, f"{name}: expected at most {most}, got {count}.")


@dataclass(slots=True)
class _Definition:
    """A rule or terminal. own: characters of its regular expressions, `REPETITION` for each repetition, and in a
    terminal also 1 for each string. names: rules and terminals that it uses. num_intersections: count of the whole
    grammar, kept in the first definition.
    """

    is_terminal: bool = False
    own: int = 0
    names: list[str] = field(default_factory=list)
    num_intersections: int = 0


def check_lark(text: str, param: str) -> None:
    """Raise BadRequest for a Lark grammar whose expanded terminals or `%json` schemas cost too much.

    Raises ValueError or RecursionError for a grammar that cannot be read.
    """
    schemas: list[Any] = []
    definitions = _read_definitions(text, schemas)
    check_schemas(schemas, param)
    sizes: dict[str, int] = {}

    def size(name: str) -> int:
        if name not in definitions:
            return _IMPORTED
        if name not in sizes:
            sizes[name] = 0  # ends the recursion of a terminal that names itself, which the library refuses
            found = definitions[name]
            # Only a terminal is expanded; the names in a rule are parsed.
            sizes[name] = found.own + sum(size(used) for used in found.names if found.is_terminal)
        return sizes[name]

    _at_most(MAX_INTERSECTIONS, definitions[""].num_intersections, "intersections and complements (& ~)", param)
    total = sum(map(size, definitions))
    if total > MAX_REGEX_BYTES:
        raise BadRequest.of(
            param,
            f"its regular expressions and terminals, each with those that it uses, have {min(total, 10**9)} characters "
            f"together, counting each repetition as {REPETITION}; the limit is {MAX_REGEX_BYTES}.",
        )


def _read_definitions(text: str, schemas: list[Any]) -> dict[str, _Definition]:
    """Return the definitions by name; those of one name are merged. `%json` schemas are added to `schemas`."""
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
