"""Values of cursors, which a client can alter."""

from datetime import datetime


def check_moment(at: datetime) -> None:
    """Raise ValueError for a time that the databases cannot store or compare: without a zone, or too far away."""
    if at.tzinfo is None or not 1970 <= at.year < 9000:
        raise ValueError("expected a time with its zone, from 1970 on")
