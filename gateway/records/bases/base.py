"""A base model as the gateways know it, and the engines on which a model's requests may run."""

from collections.abc import Mapping
from datetime import datetime
from typing import Literal, NamedTuple

import msgspec

from adapters.manifest import BaseShape
from gateway.errors import RecordNotFound

# active: listed, and takes adapters. draining: serves its names still, but is not listed and takes no adapters.
# retired: its names are refused.
BaseState = Literal["active", "draining", "retired"]
FIRST = ""


class BaseRetired(RecordNotFound):
    """The adapter belongs to a base model that is no longer served."""

    code = "base_retired"

    def __init__(self, name: str, base: str) -> None:
        super().__init__(
            f"The model '{name}' is not served: its base model '{base}' was retired. Train it for another base model.",
            param="model",
        )


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that adapters must fit; see `BaseShape`."""

    num_layers: int
    projections: Mapping[str, tuple[int, int]]
    outside: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, shape: BaseShape) -> "Shape":
        return cls(num_layers=shape.num_layers, projections=dict(shape.projections), outside=dict(shape.outside))


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """A base model.

    id: FIRST for the deployment's first base. name: in the API. digest: 64 hex digits of its weights; None: any engine
    that reports its name serves it. former: digests of weights that the present ones replace; their engines serve the
    adapters bound to them, and the base itself until an engine with the present weights is available. tokenizer: folder
    with the tokenizer on this machine; None: engines tokenize. context_length: tokens of prompt and answer together.
    """

    name: str
    shape: Shape
    context_length: int
    id: str = FIRST
    digest: str | None = None
    former: tuple[str, ...] = ()
    state: BaseState = "active"
    tokenizer: str | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None

    @property
    def digests(self) -> frozenset[str]:
        """Return the digests of the present and the former weights."""
        return frozenset(self.former) | ({self.digest} if self.digest is not None else set())


def suspect_name(digest: str, base: str) -> str:
    """Return an adapter's name in the quarantine: the same content is another suspect on another base (its id)."""
    return f"{digest}@{base}" if base else digest


class Binding(NamedTuple):
    """The engines on which a model's requests may run: those of the base `base` (its id) whose weights have each of the
    digests, as far as engines report one.
    """

    base: str = FIRST
    digests: frozenset[str] = frozenset()

    @classmethod
    def of(cls, base: str | None, digest: str | None) -> "Binding":
        """Return the binding of a row's `base_id` and of a digest, each maybe NULL."""
        return cls(base or FIRST, frozenset() if digest is None else frozenset({digest}))
