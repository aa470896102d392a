"""Many adapters in a store that share one file of weights and differ in alpha, so that they take the space of one."""

import json
import os
import tempfile
from pathlib import Path

from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME, open_checkpoint
from adapters.store import DirectoryStore


def make_scaled(store: DirectoryStore, digest: str, count: int) -> list[str]:
    """Add `count` adapters with the weights of a stored one and return their digests."""
    source = store.path(digest)
    assert source is not None
    config = json.loads((source / CONFIG_NAME).read_text())
    digests = []
    for number in range(1, count + 1):
        folder = Path(tempfile.mkdtemp(dir=store.root.parent))
        scaled = config | {"lora_alpha": config["lora_alpha"] * (1 + number / 4096)}
        (folder / CONFIG_NAME).write_text(json.dumps(scaled))
        os.link(source / WEIGHTS_NAME, folder / WEIGHTS_NAME)
        folder.chmod(0o755)
        found = open_checkpoint(folder).digest
        target = store.root / found[:2] / found
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
        digests.append(found)
    return digests
