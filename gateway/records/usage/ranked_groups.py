"""Groups of a ranking of usage: their identities, their sums, and the part of the usage that is theirs."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from gateway.records.usage.rows import UsageFilter

GroupBy = Literal["tenant", "model", "key", "end_user", "hour", "day", "month"]
Measure = Literal["cost", "tokens", "requests"]
Step = Literal["hour", "day", "month"]
GROUPS: tuple[GroupBy, ...] = ("tenant", "model", "key", "end_user", "hour", "day", "month")
MEASURES: tuple[Measure, ...] = ("cost", "tokens", "requests")
# Columns that identify a group.
KEYS: dict[GroupBy, tuple[str, ...]] = {
    "tenant": ("tenant_id", "tenant"),
    "model": ("tenant_id", "tenant", "model"),
    "key": ("tenant_id", "tenant", "key_id"),
    "end_user": ("tenant_id", "tenant", "end_user"),
    "hour": ("hour",),
    "day": ("day",),
    "month": ("month",),
}
# Number of groups with a curve of their own.
CURVES = 8

Identity = tuple[Any, ...]
"""Values of a group's KEYS."""


class RankedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of a group; fields that it does not have are None. start: start of the hour, day or month. key: the key's
    label.

    end_user: "" for requests without one. before: the measure in the period before, None for a group of times. cost:
    micro-units.
    """

    tenant_id: str | None = None
    tenant: str | None = None
    model: str | None = None
    key_id: str | None = None
    key: str | None = None
    end_user: str | None = None
    start: datetime | None = None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: int
    before: int | None = None

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def name(self) -> str:
        """Return the group's name without its tenant's."""
        if self.end_user is not None:
            return self.end_user or "none given"
        return self.key or self.key_id or self.model or self.tenant or ""


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """A page of groups. first: the first CURVES groups of the order; None if the query left them out. number: number of
    all groups; None if not all were counted. has_more: groups follow the page. is_partial: some tenants have too many
    end users to be read, so that groups of theirs may be missing. lacks_usage: retention has removed usage by end user
    of the period, so that groups may be missing or too small.
    """

    groups: list[RankedGroup]
    first: list[RankedGroup] | None
    number: int | None
    has_more: bool = False
    is_partial: bool = False
    lacks_usage: bool = False


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a measure by step: of the greatest groups, and of all groups together. starts: those with any usage."""

    starts: list[datetime]
    groups: list[tuple[RankedGroup, list[int]]]
    total: list[int]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Usage that a ranking is about. until: None for a period that ends now."""

    criteria: UsageFilter
    since: datetime
    until: datetime | None

    def of_tenants(self, ids: Sequence[str]) -> "Part":
        """Return the usage of these tenants alone."""
        return msgspec.structs.replace(self, criteria=msgspec.structs.replace(self.criteria, tenant_ids=ids))

    def of_groups(self, group_by: GroupBy, identities: Collection[Identity]) -> "Part":
        """Return the usage restricted to these groups' tenants, models and end users, which indexes support.

        It may have further groups.
        """
        values = dict(zip(KEYS[group_by], zip(*identities, strict=True), strict=True))
        distinct = {name: sorted(set(own)) for name, own in values.items()}
        criteria = msgspec.structs.replace(
            self.criteria,
            tenant_ids=distinct["tenant_id"],
            models=distinct.get("model", self.criteria.models),
            end_users=distinct.get("end_user"),
            owned_models=sorted({(each[0], each[2]) for each in identities}) if group_by == "model" else None,
        )
        return msgspec.structs.replace(self, criteria=criteria)


def identity_of(group: Any, group_by: GroupBy) -> Identity:
    """Return a group's identity. group: a RankedGroup or a row of the group's columns."""
    return tuple(getattr(group, name) for name in KEYS[group_by])
