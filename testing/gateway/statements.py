"""Compiled SQL statements that all databases of a test process share."""

from typing import Any


class Statements(dict[tuple[Any, ...], Any]):
    """Cache of one dialect's statements, without the engine's own dialect object, by which SQLAlchemy tells them apart.

    The databases of a test process have the same server and options, so their statements are the same.
    """

    def get(self, key: tuple[Any, ...], default: Any = None) -> Any:
        return super().get(key[1:], default)

    def __setitem__(self, key: tuple[Any, ...], value: Any) -> None:
        super().__setitem__(key[1:], value)
