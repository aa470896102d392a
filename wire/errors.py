"""Errors of requests and settings that both programs raise or answer."""


class BadRequest(ValueError):
    """A request that cannot be served: `param` names the field (None: the body), `message` states what was expected.

    reason: the message without the name of the field that it begins with.
    """

    def __init__(self, param: str | None, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.message = message
        self.reason = message.removeprefix(f"{param}: ")
        self.code = code

    @classmethod
    def of(cls, param: str, reason: str) -> "BadRequest":
        """Return the error whose message is `param: reason`."""
        return cls(param, f"{param}: {reason}")


class ConfigError(ValueError):
    """A setting that cannot be served: `field` names it, `message` states what was expected."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
