"""Output for a terminal. Names, models and a server's texts may control it, or look like markup."""

from collections.abc import Collection, Iterable, Sequence

import click

from wire.escaping import escaped


def echo(line: str) -> None:
    """Print one line."""
    click.echo(escaped(line))


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[int], width: int) -> None:
    """Print aligned columns. left: numbers of the left-aligned ones. width: maximum in characters."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in left else "right")
    for row in rows:
        table.add_row(*map(escaped, row))
    # Without markup, `[team]` in a name is text.
    Console(width=width, highlight=False, markup=False, emoji=False).print(table)
