"""Line numbers of a TOML document's keys and list elements, which `tomllib` does not give.

`tomllib` reads the document. A scan in linear time then finds where the keys and elements begin. The document is known
to be valid, so the scan needs to tell only strings and comments from brackets, commas and line ends.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Path = tuple[str | int, ...]

# A multi-line string may have one or two quotes of its own before the three that end it.
TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'|"
    r"#[^\n]*|\n|[\[\]{},=]|[^\S\n]+|[^\s\"'#\[\]{},=]+|.",
    re.DOTALL,
)
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# Python reads no decimal number of more digits.
MAX_DIGITS = 4300


class TomlError(Exception):
    """A text that is not TOML. line: where it is wrong."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


@dataclass(slots=True)
class _Open:
    """A list or an inline table that the scan is in.

    count: elements of the list so far. is_in_item: False before an element, and in a table before a key's `=`.
    key: tokens of this key.
    """

    path: Path
    is_list: bool
    count: int = 0
    is_in_item: bool = False
    key: list[str] = field(default_factory=list)


class TomlLines:
    """A parsed TOML document and the lines of its keys and list elements. Raises TomlError."""

    def __init__(self, text: str) -> None:
        # `tomllib` replaces these line ends too.
        text = text.replace("\r\n", "\n")
        self.value = _parsed(text)
        self._lines: dict[Path, int] = {}
        self._index(text)

    def line(self, path: Path) -> int:
        """Return the line of the key or element at `path`, or of the innermost one around it; 1 if none is."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def _index(self, text: str) -> None:
        table: Path = ()
        counts: dict[Path, int] = {}
        tokens = _tokens(text)
        for number, token in tokens:
            if token == "\n":
                continue
            words = [token]
            for _, word in tokens:
                if word == "\n" or (word == "=" and token != "["):
                    break
                words.append(word)
            keys = _keys("".join(word for word in words if word not in ("[", "]")))
            if token == "[":
                table = self._table(keys, counts, number, is_array=words[1] == "[")
            else:
                self._index_value(self._add(table, keys, number), tokens)

    def _table(self, keys: Path, counts: dict[Path, int], number: int, *, is_array: bool) -> Path:
        """Record the line of a header and return its path: with the number of the newest element of each array of
        tables on the way. The header is also the line of the tables around it that have none of their own.
        """
        path: Path = ()
        for depth, key in enumerate(keys):
            path = (*path, key)
            self._lines.setdefault(path, number)
            if is_array and depth == len(keys) - 1:
                counts[path] = counts.get(path, -1) + 1
            if path in counts:
                path = (*path, counts[path])
        self._lines[path] = number
        return path

    def _add(self, path: Path, keys: Path, number: int) -> Path:
        """Record the line of a key with its dots, and return its path."""
        for key in keys:
            path = (*path, key)
            self._lines.setdefault(path, number)
        return path

    def _index_value(self, path: Path, tokens: Iterator[tuple[int, str]]) -> None:
        """Record the keys and elements of the value at `path`, up to the end of its last line."""
        around: list[_Open] = []
        for number, token in tokens:
            inner = around[-1] if around else None
            if token == "\n":
                if inner is None:
                    return
            elif inner is not None and token in ("]", "}"):
                around.pop()
            elif inner is not None and token == ",":
                inner.is_in_item = False
            elif inner is not None and not inner.is_in_item and not inner.is_list and token != "=":
                inner.key.append(token)
            else:
                if inner is not None and not inner.is_in_item:
                    keys = (inner.count,) if inner.is_list else _keys("".join(inner.key))
                    path = self._add(inner.path, keys, number)
                    inner.is_in_item, inner.count, inner.key = True, inner.count + 1, []
                if token in ("[", "{"):
                    around.append(_Open(path, is_list=token == "["))


def _parsed(text: str) -> dict[str, Any]:
    """Return the document's content. Raises TomlError, also for numbers and nesting beyond what Python can read."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" \(at line (\d+), column \d+\)", str(error))
        line = int(place[1]) if place else text.rstrip("\n").count("\n") + 1
        raise TomlError(line, str(error).split(" (at ")[0]) from error
    except RecursionError as error:
        raise TomlError(_deepest(text), "lists or tables are nested too deeply") from error
    except ValueError as error:
        raise TomlError(_longest_number(text), f"a number has more than {MAX_DIGITS} digits") from error


def _deepest(text: str) -> int:
    """Return the line on which lists and inline tables are nested most deeply."""
    depth, deepest, line = 0, 0, 1
    for number, token in _tokens(text):
        depth += (token in ("[", "{")) - (token in ("]", "}"))
        if depth > deepest:
            deepest, line = depth, number
    return line


def _longest_number(text: str) -> int:
    """Return the line of the first word that can be a number of too many digits; 1 without one."""
    words = ((number, token) for number, token in _tokens(text) if len(token) > MAX_DIGITS)
    return next((number for number, token in words if re.fullmatch(r"[+-]?[0-9_]+", token)), 1)


def _tokens(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string, bracket, comma, equals sign, line end and other word."""
    number = 1
    for match in TOKEN.finditer(text):
        token = match[0]
        if token == "\n" or not token.startswith((" ", "\t", "#")):
            yield number, token
        number += token.count("\n")


def _keys(text: str) -> Path:
    """Return the keys of `a."b c".d`, with the escapes of quoted ones resolved."""
    if BARE_KEY.fullmatch(text):
        return (text,)
    value: Any = tomllib.loads(text + "=0")
    keys: Path = ()
    while value:
        [(key, value)] = value.items()
        keys = (*keys, key)
    return keys
