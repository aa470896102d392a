"""Mixtures of adapters: a request's `model` of the form `NAME*WEIGHT+NAME*WEIGHT`.

A mixture changes the base model by the weighted sum of its adapters' changes. The gateway replaces each name with the
adapter's digest. Both programs compute the mixture's own digest from the parts' digests and weights.
"""

import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from wire.digests import digest_name
from wire.errors import BadRequest

MAX_TERMS = 8
# Limit of a weight's absolute value.
MAX_WEIGHT = 100.0
# A decimal number, with an exponent only if it is negative, because "+" separates the terms.
_WEIGHT = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]-[0-9]{1,3})?")
_MAX_WEIGHT_CHARS = 32


class Term(NamedTuple):
    """Adapter of a mixture, by its name in the request, and its weight."""

    name: str
    weight: float


def is_mixture(model: str) -> bool:
    """Return whether a model's name has the form of a mixture. No adapter's name contains `*`."""
    return "*" in model


def names_in(mixture: str) -> list[str]:
    """Return the names in a mixture's text without a check of its weights."""
    return [term.partition("*")[0] for term in mixture.split("+")]


def parse_terms(model: str) -> list[Term]:
    """Return the terms in the order of the request. Raises BadRequest, which names the term."""
    texts = model.split("+", MAX_TERMS + 1)
    if len(texts) > MAX_TERMS:
        raise BadRequest("model", f"model: expected at most {MAX_TERMS} adapters in a mixture.")
    return [_parse_term(text) for text in texts]


def _parse_term(text: str) -> Term:
    name, star, number = text.partition("*")
    shown = text if len(text) <= 100 else text[:97] + "..."
    if not name or not star:
        raise BadRequest("model", f"model: expected NAME*WEIGHT as each term of a mixture, got '{shown}'.")
    if len(number) > _MAX_WEIGHT_CHARS or not _WEIGHT.fullmatch(number) or abs(float(number)) > MAX_WEIGHT:
        raise BadRequest(
            "model",
            f"model: expected a weight from -{MAX_WEIGHT:g} to {MAX_WEIGHT:g} of at most {_MAX_WEIGHT_CHARS} "
            f"characters, such as 0.7, -1.5 or 1e-3, in the term '{shown}'.",
        )
    return Term(name, float(number))


@dataclass(frozen=True)
class Mixture:
    """A mixture of adapters by digest. parts: distinct digests, sorted, each with its weight."""

    parts: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, terms: Iterable[Term], digests: Iterable[str]) -> "Mixture":
        """Return the mixture of the terms, whose adapters have these digests. The weights of one adapter are added.

        Raises BadRequest if a sum exceeds the limit of a weight.
        """
        weights: dict[str, list[float]] = {}
        for term, digest in zip(terms, digests, strict=True):
            weights.setdefault(digest, []).append(term.weight)
            if abs(math.fsum(weights[digest])) > MAX_WEIGHT:
                raise BadRequest("model", f"model: the weights of '{term.name}' add up to more than {MAX_WEIGHT:g}.")
        # `fsum` rounds once, so the order does not matter. Adding 0.0 removes a zero's sign.
        return cls(tuple((digest, math.fsum(found) + 0.0) for digest, found in sorted(weights.items())))

    @property
    def name(self) -> str:
        """Return the form for requests to engines: `sha256:<digest>*<weight>+...`."""
        return "+".join(f"{digest_name(digest)}*{weight!r}" for digest, weight in self.parts)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(f"loraplex mixture 1\n{self.name}".encode()).hexdigest()
