"""Errors of requests to other servers."""

from aiohttp import ClientError

# Raised by aiohttp's client if a server is not reached, or its response does not arrive whole or in time.
HTTP_ERRORS = (ClientError, OSError)
