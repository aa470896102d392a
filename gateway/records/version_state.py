"""States of adapters' versions, in a module of their own for folders that may not import `adapters`."""

from typing import Literal

# `uploading` is the state of unfinished uploads (adapters/uploads.py), `deleted` that of removed versions.
State = Literal["uploading", "validating", "ready", "rejected", "retired", "deleted"]
READY: State = "ready"
