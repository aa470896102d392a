"""States of adapters' versions. Folders below `adapters` read them too."""

from typing import Literal

# `uploading` is the state of unfinished uploads (adapters/uploads.py), `deleted` that of removed versions.
State = Literal["uploading", "validating", "ready", "rejected", "retired", "deleted"]
READY: State = "ready"
