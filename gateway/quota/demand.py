"""Amounts that a request needs from its limits."""

from collections.abc import Sequence

import msgspec

from gateway.quota.limits import Limit
from gateway.records.money.prices import FREE, Price
from wire.responses import ASK_TOKENS

# A new request leaves 1 / HEADROOM of a token rate's limit to the growth of running ones.
HEADROOM = 4
# Completion tokens of each choice that a first hold has at least, within half of the room above its prompt. An engine
# that may generate none ends the answer before the hold can grow.
MIN_HELD = 2 * ASK_TOKENS


class RequestSize(msgspec.Struct, frozen=True, gc=False):
    """Size and price of a request, from its body and its model.

    prompt_tokens: tokens of all prompts together. max_tokens: limit of each of `choices` answers. grows: whether only
    the expected completion is reserved in the token rates at first; the caller must then report use to
    `Reservation.hold`. currency: currency of the amounts in headers and errors. by_default: whether the request has no
    max_tokens, so that the default applies.
    """

    prompt_tokens: int
    max_tokens: int
    choices: int = 1
    price: Price = FREE
    grows: bool = False
    currency: str = ""
    by_default: bool = False


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts to reserve on the limits for a request.

    step: the granted completion is a multiple of it. expected: the completion tokens, for all choices together, that
    the token rates hold at first; None to hold all of `max_tokens`. The other fields are those of RequestSize.
    """

    tenant_id: str
    request_id: str
    prompt_tokens: int = 0
    max_tokens: int = 0
    choices: int = 1
    step: int = 1
    price: Price = FREE
    currency: str = ""
    by_default: bool = False
    expected: int | None = None

    @property
    def completion(self) -> int:
        return self.max_tokens * self.choices

    @property
    def first_completion(self) -> int:
        """Return the completion tokens that the token rates hold at first."""
        return self.completion if self.expected is None else min(self.expected, self.completion)

    @property
    def least(self) -> int:
        """Return the smallest completion that may be granted."""
        return min(self.step, self.completion)

    def needed(self, limit: Limit, completion: int) -> int:
        """Return the room that a limit must have to grant `completion` tokens."""
        tokens = self.prompt_tokens + completion
        if limit.kind.is_token_rate:
            at_first = self.prompt_tokens + min(self.first_completion, completion)
            return min(tokens, at_first + limit.value // HEADROOM, limit.value)
        return limit.amount(tokens, self.price.highest_cost(self.prompt_tokens, completion))

    def within(self, limits: Sequence[Limit]) -> "Demand":
        """Return the demand with a first hold that each token rate can grant.

        A reservation above a rate holds at most half of the rate at first, so that other requests are still admitted,
        but enough for the answer to begin.
        """
        if self.expected is None:
            return self
        tokens = self.prompt_tokens + self.completion
        above = [limit.value for limit in limits if limit.kind.is_token_rate and tokens > limit.value]
        if not above:
            return self
        room = min(above) - self.prompt_tokens
        most = max(0, min(above) // 2 - self.prompt_tokens, min(room // 2, MIN_HELD * self.step))
        return msgspec.structs.replace(self, expected=min(self.expected, most))
