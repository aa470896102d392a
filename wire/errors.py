"""Errors of requests and settings that more than one program raises or answers."""


class BadRequest(ValueError):
    """A request that cannot be served: `param` names the field (None: the body), `message` what was expected."""

    def __init__(self, param: str | None, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.message = message
        self.code = code


# A body of less work than this is rendered and counted within a millisecond. A letter or a space is 1 and takes at most
# 0.6 µs of it; any other byte, such as a digit, may be a token of its own and takes up to 1.9 µs.


class ConfigError(ValueError):
    """A setting that cannot be served: `field` names it, `message` says what was expected."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class RequestError(ValueError):
    """A request that cannot be served: `field` names the parameter, `message` says what was expected."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
