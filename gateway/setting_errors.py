"""Errors of settings. Any part of the gateway may raise them, so this module imports nothing of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class SettingsError(ValueError):
    """A setting is missing, unknown or wrong. `field` is the name of the variable or override.

    others: errors of other settings that were found with it. The text has one line for each error.
    """

    def __init__(self, field: str, message: str, others: "Sequence[SettingsError]" = ()) -> None:
        super().__init__(field, message, others)
        self.field = field
        self.message = message
        self.others = tuple(others)

    def __str__(self) -> str:
        return "\n".join([f"{self.field}: {self.message}", *map(str, self.others)])


class NotUsableNow(SettingsError):
    """A setting is well-formed but cannot be used now: a port is in use, a database is unreachable."""


class Problems:
    """Collector of SettingsErrors, so that all of them are reported together."""

    def __init__(self) -> None:
        self._found: list[SettingsError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the block's SettingsError for `report`."""
        try:
            yield
        except SettingsError as error:
            self._found.append(error)

    def add(self, field: str, message: str) -> None:
        self._found.append(SettingsError(field, message))

    def report(self) -> None:
        """Raise one SettingsError with all kept errors. Does nothing without errors."""
        if self._found:
            first, *others = self._found
            raise SettingsError(first.field, first.message, (*first.others, *others))
