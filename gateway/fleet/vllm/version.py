"""The releases of vLLM that may serve several tenants' adapters.

Before SAFE, an adapter loaded at runtime could take the slot of one that was generating; that request then continued
with the new adapter's weights, without an error or a log line (vllm-project/vllm#47724, fixed by #47725: 0.25.1 lacks
the fix, 0.26.0 has it). The gateway loads adapters beside running requests, so such a server may answer a tenant with
another's adapter.
"""

import re

import msgspec

SAFE = (0, 26, 0)
# `0.26.0`, `0.26.0+cpu`, `0.26.1rc2.dev5+g0123abc`; a pre-release may lack changes of its release.
_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(a|b|rc|dev)\d*)?(?:\D.*)?")


class UnsafeVersion(Exception):
    """The version may mix up adapters. The message gives the operator the reason and the remedy."""


class _Version(msgspec.Struct):
    version: str


def check_version(answer: bytes) -> None:
    """Raise UnsafeVersion unless the body of `/version` names a release that never mixes up adapters."""
    try:
        version = msgspec.json.decode(answer, type=_Version).version[:40]
    except msgspec.MsgspecError:
        version = ""
    match = _VERSION.fullmatch(version)
    numbers = tuple(int(part or 0) for part in match.groups()[:3]) if match else (0, 0, 0)
    is_early = match is not None and match[4] is not None and numbers == SAFE
    if numbers < SAFE or is_early:
        told = f"is of version {version!r}" if version else "does not say its version"
        wanted = ".".join(map(str, SAFE))
        raise UnsafeVersion(
            f"this vLLM server {told}; before {wanted} an adapter loaded at runtime may be served to another request "
            "(vllm-project/vllm#47724): upgrade it, or accept that with ?any_version=true in LORAPLEX_ENGINES"
        )
