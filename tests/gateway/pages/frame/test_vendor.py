"""Vendored files: each is the one that its README names."""

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
FOLDERS = [ROOT / "gateway/pages/static/vendor", ROOT / "tests/e2e/browser/vendor"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parts[-3])
def test_every_vendored_file_has_its_hash_and_licence(folder):
    listed = dict(re.findall(r"^\| `([^`]+)` .*`([0-9a-f]{64})` \|$", (folder / "README.md").read_text(), re.MULTILINE))
    files = {path.name for path in folder.iterdir() if path.suffix not in (".md", ".LICENSE")}
    assert files == set(listed)
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
        assert (folder / f"{name.split('.')[0]}.LICENSE").is_file()
