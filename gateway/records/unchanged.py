"""Check that a record is still as it was when a change of it was prepared."""

from gateway.errors import Changed


def check_unchanged(now: object, seen: object | None) -> None:
    """Raise Changed if a record's present values differ from those on which a change is based; None: any values.

    Call it in the change's transaction, after the record is locked, so that no other change comes in between.
    """
    if seen is not None and now != seen:
        raise Changed
