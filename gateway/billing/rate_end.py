"""End of an answer at the limit of its token rates."""

from dataclasses import dataclass

from gateway.errors import RateLimited


@dataclass(slots=True)
class RateEnd:
    """Record of the end.

    by_engine: whether the engine ended the answer. is_handled: whether the gateway has counted the end. limit_name: the
    name of the limit that ended the answer. cut: the error for which the gateway stopped an engine that keeps no
    allowance.
    """

    by_engine: bool = False
    is_handled: bool = False
    limit_name: str | None = None
    cut: RateLimited | None = None

    def handle(self, refusal: RateLimited) -> None:
        """Record the limit that ended the answer."""
        self.is_handled, self.limit_name = True, refusal.ended_by
