"""Line numbers of a TOML document's keys, which `tomllib` does not give.

`tomllib` is the only parser here: the text is cut into statements (a table's header, or a key with its value), each the
shortest run of lines that `tomllib` accepts by itself. So no second reader of strings, arrays and dates is needed.
"""

import tomllib
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]


class TomlLines:
    """A parsed TOML document and the lines of its keys. Raises tomllib.TOMLDecodeError."""

    def __init__(self, text: str) -> None:
        self.value: dict[str, Any] = tomllib.loads(text)
        self._lines: dict[Path, int] = {}
        self._index(text)

    def line(self, path: Path) -> int:
        """Return the line of the key at `path`, or of the innermost table or statement around it; 1 if none is."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def _index(self, text: str) -> None:
        table: Path = ()
        counts: dict[Path, int] = {}
        for number, statement, value in _statements(text):
            if statement.lstrip().startswith("["):
                table = self._table(_keys(value), counts, is_array=statement.lstrip().startswith("[["))
                self._lines[table] = number
            else:
                self._add(table, value, number)

    def _table(self, keys: Path, counts: dict[Path, int], *, is_array: bool) -> Path:
        """Return the path of a header: with the number of the newest element of each array of tables on the way."""
        path: Path = ()
        for depth, key in enumerate(keys):
            path = (*path, key)
            if is_array and depth == len(keys) - 1:
                counts[path] = counts.get(path, -1) + 1
            if path in counts:
                path = (*path, counts[path])
        return path

    def _add(self, path: Path, value: Any, number: int) -> None:
        """Record the line of every key below `path` in a statement's value."""
        items: Iterator[tuple[str | int, Any]] = iter(())
        if isinstance(value, dict):
            items = iter(value.items())
        elif isinstance(value, list):
            items = iter(enumerate(value))
        for key, inner in items:
            self._lines.setdefault((*path, key), number)
            self._add((*path, key), inner, number)


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the first line's number, the text and the value of each statement of a valid document."""
    lines: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not lines and (not line.strip() or line.lstrip().startswith("#")):
            continue
        lines.append(line)
        try:
            value = tomllib.loads("\n".join(lines))
        except tomllib.TOMLDecodeError:
            continue
        yield number - len(lines) + 1, "\n".join(lines), value
        lines = []


def _keys(value: Any) -> Path:
    """Return the keys of a header, from the nested tables that it parses to."""
    keys: Path = ()
    while value:
        [(key, value)] = value.items() if isinstance(value, dict) else enumerate(value)
        if isinstance(key, str):
            keys = (*keys, key)
    return keys
