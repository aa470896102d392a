"""Names of models in requests: an adapter's name, one of its versions or aliases, and terms of a mixture.

    name          the adapter's alias `latest`
    name@3        its version 3
    name:prod     its alias `prod`

A reference has no `*` and no `+`, so that a mixture can be written as `a*0.7+b:prod*0.3`. The base
model's name may have any form and is compared first.
"""

import re

import msgspec

MAX_NAME_CHARS = 64
# Below the length of a digest, so that `sha256:<digest>` never is a reference.
MAX_ALIAS_CHARS = 32
# Alias that every adapter has. `name` alone means `name:latest`.
LATEST = "latest"
MAX_VERSION = 999_999_999

_NAME = rf"[a-z0-9][a-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}"
# An alias begins with a letter, so that `name:3` is an error instead of another spelling of `name@3`.
_ALIAS = rf"[a-z][a-z0-9._-]{{0,{MAX_ALIAS_CHARS - 1}}}"
ADAPTER_NAME = re.compile(_NAME)
ALIAS_NAME = re.compile(_ALIAS)
_REFERENCE = re.compile(rf"(?P<name>{_NAME})(?:@(?P<version>[1-9][0-9]{{0,8}})|:(?P<alias>{_ALIAS}))?")


class Reference(msgspec.Struct, frozen=True):
    """Reference to an adapter by version or by alias. version: None if `alias` counts."""

    name: str
    version: int | None = None
    alias: str = LATEST

    def __str__(self) -> str:
        """Return the shortest text that parses to this reference."""
        if self.version is not None:
            return version_name(self.name, self.version)
        return self.name if self.alias == LATEST else f"{self.name}:{self.alias}"


def parse_reference(text: str) -> Reference | None:
    """Return the reference that a text names; None if it has another form."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        return None
    version = match["version"]
    return Reference(match["name"], None if version is None else int(version), match["alias"] or LATEST)


def version_name(name: str, version: int) -> str:
    """Return the name of an adapter's version, `name@3`."""
    return f"{name}@{version}"
