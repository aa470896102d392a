import json
import os
import stat

import pytest

from loraplex.up import datadir
from loraplex.up.datadir import DataDir, DataDirError, read_json, write_private_json


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_are_made_once_and_kept_private(tmp_path):
    data = DataDir.open(tmp_path / "data")
    secrets = data.secrets()
    assert DataDir.open(tmp_path / "data").secrets() == secrets
    assert mode(data.root / "secrets.json") == 0o600
    assert mode(data.root) == 0o700
    values = list(json.loads((data.root / "secrets.json").read_text()).values())
    assert len(set(values)) == 4
    assert min(map(len, values)) >= 32


def test_one_up_at_a_time(tmp_path):
    data = DataDir.open(tmp_path)
    with data.lock(), pytest.raises(DataDirError, match="another `loraplex up` is running"), data.lock():
        pass
    with data.lock():
        pass


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "data").write_text("")
    with pytest.raises(DataDirError, match="cannot use the data directory"):
        DataDir.open(tmp_path / "data")


def test_private_files_are_replaced_whole(tmp_path):
    path = tmp_path / "demo.json"
    path.write_text("{}")
    path.chmod(0o644)
    write_private_json(path, {"key": "x"})
    assert mode(path) == 0o600
    assert read_json(path) == {"key": "x"}
    assert [p.name for p in tmp_path.iterdir()] == ["demo.json"]


def test_reading(tmp_path):
    assert read_json(tmp_path / "none.json") is None
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(DataDirError, match=r"bad\.json"):
        read_json(tmp_path / "bad.json")
    (tmp_path / "secrets.json").write_text('{"internal_token": "x"}')
    with pytest.raises(DataDirError, match=r"secrets\.json does not have the expected fields"):
        DataDir.open(tmp_path).secrets()


def test_secrets_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    """After a loss of power, a renamed file may be empty. Without the pepper no API key works again."""
    steps: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def spied_fsync(descriptor):
        steps.append(("fsync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def spied_replace(source, target):
        steps.append(("replace", os.stat(source).st_ino))
        replace(source, target)

    monkeypatch.setattr(datadir.os, "fsync", spied_fsync)
    monkeypatch.setattr(datadir.os, "replace", spied_replace)
    DataDir.open(tmp_path).secrets()
    file, folder = (tmp_path / "secrets.json").stat().st_ino, tmp_path.stat().st_ino
    assert steps == [("fsync", file), ("replace", file), ("fsync", folder)]
