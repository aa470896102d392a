"""Filter that keeps client data out of aiohttp's server log: a bad header may hold a key, a body a prompt."""

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError


class _WithoutContent(logging.Filter):
    """Filter that logs an invalid HTTP request as one line, because its exception quotes the client."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | RequestPayloadError):
            record.msg, record.args = "refused a request that is not valid HTTP: %s", (type(error).__name__,)
            record.exc_info = record.exc_text = None
        return True


_FILTER = _WithoutContent()


def http_logger(name: str) -> logging.Logger:
    """Return a logger to pass to web.AppRunner as `logger`."""
    logger = logging.getLogger(name)
    logger.addFilter(_FILTER)
    return logger
