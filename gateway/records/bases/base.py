"""Types of a base model, and of the condition on the engines that may run a model's requests."""

from collections.abc import Mapping
from datetime import datetime
from typing import Literal, NamedTuple

import msgspec

from adapters.manifest import BaseShape
from gateway.errors import RecordNotFound

# active: listed, and accepts adapters. draining: still serves requests, but is not listed and accepts no adapters.
# retired: refuses requests.
BaseState = Literal["active", "draining", "retired"]
# Id of the deployment's first base. Rows without a `base_id` belong to it.
FIRST = ""


class BaseRetired(RecordNotFound):
    """The adapter belongs to a retired base model."""

    code = "base_retired"

    def __init__(self, name: str, base: str) -> None:
        super().__init__(
            f"The model '{name}' is not served: its base model '{base}' was retired. Train it for another base model.",
            param="model",
        )


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes that adapters must fit; see `BaseShape`.

    outside: `BaseShape.embedding_head`. The name is kept, because the database has it and other releases read it.
    """

    num_layers: int
    projections: Mapping[str, tuple[int, int]]
    outside: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, shape: BaseShape) -> "Shape":
        return cls(num_layers=shape.num_layers, projections=dict(shape.projections), outside=dict(shape.embedding_head))


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """A base model.

    id: FIRST for the deployment's first base. name: in the API. digest: 64 hex digits that identify the weights; None:
    any engine that reports the base's name serves it. former: digests of replaced weights; their engines serve the
    adapters bound to them, and the base itself until an engine with the present weights is available. tokenizer: folder
    of the tokenizer on this machine; None: engines tokenize. context_length: maximum tokens of prompt and answer
    together.
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
    """Return an adapter's key in the quarantine, which blocks it on one base only. base: its id."""
    return f"{digest}@{base}" if base else digest


def suspect_digest(name: str) -> str:
    """Return the digest in an adapter's key in the quarantine."""
    return name.partition("@")[0]


class Binding(NamedTuple):
    """Condition on the engines that may run a model's requests: they serve the base `base` (an id), and report each of
    `digests` as their weights' digest, or report none.
    """

    base: str = FIRST
    digests: frozenset[str] = frozenset()

    @classmethod
    def of(cls, base: str | None, digest: str | None) -> "Binding":
        """Return the binding of a row with this `base_id` and digest, each of which may be NULL."""
        return cls(base or FIRST, frozenset() if digest is None else frozenset({digest}))


class EngineSoftware(msgspec.Struct, frozen=True, kw_only=True):
    """Software of an engine: its kind, its release and the digest of its base model. Unknown texts are empty."""

    kind: str
    version: str
    base_digest: str
