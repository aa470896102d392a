"""aiohttp's log of a server, without what clients sent: a malformed header may hold a key, a stray body a prompt."""

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError


class _WithoutContent(logging.Filter):
    """A request that is no HTTP is one line; its exception quotes the client."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | RequestPayloadError):
            record.msg, record.args = "a request that is not valid HTTP: %s", (type(error).__name__,)
            record.exc_info = record.exc_text = None
        return True


_FILTER = _WithoutContent()


def http_logger(name: str) -> logging.Logger:
    """For web.AppRunner's `logger`."""
    logger = logging.getLogger(name)
    logger.addFilter(_FILTER)
    return logger
