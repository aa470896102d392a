"""Traits of an engine kind, by which the rest of the gateway treats its engines."""

import msgspec

# Types of the errors in a stream that the request itself causes.
OPENAI_REQUEST_ERRORS = frozenset({"invalid_request_error"})


class OwnFields(msgspec.Struct, kw_only=True):
    """Base of a kind's additional request fields. They must not change the number of tokens beyond `max_tokens`."""

    def check(self) -> None:
        """Check rules that the annotations cannot express. Raises BadRequest."""


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an engine kind by which the rest of the gateway treats its engines.

    name: in logs, spans and the admin API.
    prefix: before the engine's URL in LORAPLEX_ENGINES.
    title: in messages for operators.
    batches_in_flight: maximum requests in flight, in batches; above 1 only for engines that order tenants fairly
        themselves.
    has_usage_log: whether it reports the counts of ended requests (`GET /finished`), by which a broken answer is
        billed; without it, the received counts are billed.
    takes_hints: whether it loads adapters ahead of their requests (`POST /prefetch`).
    has_own_secret: whether it is a foreign server, with options and a key of its own instead of the internal token.
    own_fields: request fields that only this kind serves.
    splits_prompts: whether an address may name a second server that computes prompts.
    request_errors: types of the errors in a stream that the request itself causes.
    shows_messages: whether its messages for such errors may be shown to the client; False for a server whose messages
        may name others' adapters.
    """

    name: str
    prefix: str
    title: str
    batches_in_flight: int = 1
    has_usage_log: bool = False
    takes_hints: bool = False
    has_own_secret: bool = True
    own_fields: type[OwnFields] | None = None
    splits_prompts: bool = False
    request_errors: frozenset[str] = OPENAI_REQUEST_ERRORS
    shows_messages: bool = True

    @property
    def orders_tenants(self) -> bool:
        """Return whether the engine serves its requests in a fair order, so that it may get more than it runs."""
        return self.batches_in_flight > 1


# Our own engine. Besides its batch it gets as many requests again, to fill places as they become free. Further requests
# wait in the gateway, where they can still be ordered and sent to another engine.
LORAPLEX = Traits(
    name="loraplex",
    prefix="",
    title="the engine",
    batches_in_flight=2,
    has_usage_log=True,
    takes_hints=True,
    has_own_secret=False,
)
