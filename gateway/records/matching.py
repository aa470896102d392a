"""Compare-and-swap of records by their ETag and the request's If-Match."""

from gateway.errors import PreconditionFailed, PreconditionRequired


def check_match(noun: str, present: tuple[str, str] | None, if_match: str | None) -> None:
    """Raise PreconditionFailed or PreconditionRequired unless `if_match` allows a change.

    present: the text and the ETag of the record's state; None if there is no record. if_match: None only creates.
    """
    if present is None:
        if if_match is not None:
            raise PreconditionFailed(f"The {noun} does not exist; leave out If-Match to create it.")
        return
    text, etag = present
    shown = f"{text}, its ETag {etag}"
    if if_match is None:
        raise PreconditionRequired(f"The {noun} exists: send If-Match with its ETag. {shown}.", etag=etag)
    if if_match.strip() not in ("*", etag):
        raise PreconditionFailed(f"The {noun} has been changed: {shown}.", etag=etag)
