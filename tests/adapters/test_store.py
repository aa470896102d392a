"""The directory store: atomic, idempotent, safe for concurrent processes, and repaired when damaged."""

import errno
import os
import subprocess
import sys
import threading
import time

import pytest

import adapters.spool
from adapters.checkpoint import open_checkpoint
from adapters.manifest import AdapterError, AdapterNotFound, BaseShape
from adapters.open_store import open_store
from adapters.store import DirectoryStore
from testing.adapter_files import BASE, CONFIG, tensors, write


def leftovers(store: DirectoryStore) -> list[str]:
    return [path.name for path in store.root.iterdir() if path.name.startswith(".tmp-")]


def test_put_path_list_delete(tmp_path):
    store = DirectoryStore(tmp_path / "deep" / "store")
    folder = write(tmp_path / "adapter")
    stored = store.put(folder, BASE)
    assert stored.folder == store.root / stored.digest[:2] / stored.digest == store.path(stored.digest)
    assert sorted(path.name for path in stored.folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert open_checkpoint(stored.folder).digest == stored.digest == open_checkpoint(folder).digest
    other = store.put(write(tmp_path / "other", tensors(seed=1)), BASE)
    assert list(store.list()) == sorted((stored.digest, other.digest))
    assert store.delete(stored.digest) is True
    assert store.delete(stored.digest) is False
    assert store.path(stored.digest) is None
    assert list(store.list()) == [other.digest]
    assert leftovers(store) == []


def test_put_again_replaces_the_files_by_equal_ones(tmp_path):
    """An upload does the same work whether or not the content is stored already, so its time tells nobody."""
    store = DirectoryStore(tmp_path / "store")
    first = store.put(write(tmp_path / "a"), BASE)
    before, raw = first.weights_path.stat(), first.weights_path.read_bytes()
    again = store.put(write(tmp_path / "b", config={**CONFIG, "lora_dropout": 0.5}), BASE)
    assert again.digest == first.digest
    assert again.folder == first.folder
    assert again.weights_path.stat().st_ino != before.st_ino
    assert again.weights_path.read_bytes() == raw
    assert leftovers(store) == []


def test_only_the_adapters_files_are_kept(tmp_path):
    folder = write(tmp_path / "a")
    (folder / "optimizer.pt").write_bytes(b"x")
    assert len(list(DirectoryStore(tmp_path / "store").put(folder, BASE).folder.iterdir())) == 2


def test_a_refused_adapter_leaves_nothing(tmp_path):
    store = DirectoryStore(tmp_path / "store")
    with pytest.raises(AdapterError, match="another model"):
        store.put(write(tmp_path / "a"), BaseShape(1, BASE.projections))
    with pytest.raises(AdapterError, match="cut off"):
        store.put(write(tmp_path / "b", (tmp_path / "a" / "adapter_model.safetensors").read_bytes()[:-8]), BASE)
    with pytest.raises(AdapterNotFound):
        store.put(tmp_path / "nothing", BASE)
    assert list(store.root.iterdir()) == []


def test_links_out_of_an_upload_are_not_followed(tmp_path):
    folder = write(tmp_path / "a")
    (folder / "adapter_config.json").rename(tmp_path / "secret.json")
    (folder / "adapter_config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(AdapterError, match="symbolic link"):
        DirectoryStore(tmp_path / "store").put(folder, BASE)


def test_a_damaged_adapter_is_replaced(tmp_path):
    store, folder = DirectoryStore(tmp_path / "store"), write(tmp_path / "a")
    stored = store.put(folder, BASE)
    raw = bytearray(stored.weights_path.read_bytes())
    raw[-1] ^= 1
    stored.weights_path.write_bytes(bytes(raw))
    assert open_checkpoint(stored.folder).digest != stored.digest
    assert store.put(folder, BASE).digest == stored.digest
    assert open_checkpoint(stored.folder).digest == stored.digest
    assert leftovers(store) == []


def test_a_put_that_dies_before_the_rename_is_not_seen(tmp_path, monkeypatch):
    store, folder = DirectoryStore(tmp_path / "store"), write(tmp_path / "a")
    script = (
        "import os, sys, adapters.store as s\n"
        "from testing.adapter_files import BASE\n"
        "s.DirectoryStore.publish = lambda *_: os._exit(9)\n"
        "s.DirectoryStore(sys.argv[1]).put(sys.argv[2], BASE)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, store.root, folder], check=False).returncode == 9
    assert len(leftovers(store)) == 2  # the folder and its lock
    assert list(store.list()) == []
    DirectoryStore(store.root)
    assert len(leftovers(store)) == 2  # readers delete nothing
    with store.spool() as spool:
        store.clean()
        assert sorted(leftovers(store)) == sorted((spool.folder.name, f"{spool.folder.name}.lock"))
    assert leftovers(store) == []


def test_a_full_disk_keeps_no_lock_of_an_upload_that_could_not_begin(tmp_path, monkeypatch):
    """Each such upload would keep an open file, until the process has no more."""
    store = DirectoryStore(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(adapters.spool.Path, "mkdir", full)
    before = os.listdir("/dev/fd")
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"), store.spool():
            pass
    assert len(os.listdir("/dev/fd")) == len(before)
    assert leftovers(store) == []


def test_leftovers_of_the_release_before_go_by_their_age(tmp_path):
    store = DirectoryStore(tmp_path)
    folder = tmp_path / ".tmp-0123"
    folder.mkdir()
    store.clean()
    assert leftovers(store) == [folder.name]  # its writer may still run
    old = time.time() - 2 * adapters.spool.STALE_SECONDS
    os.utime(folder, (old, old))
    store.clean()
    assert leftovers(store) == []


def test_a_reader_needs_no_right_to_write(tmp_path, monkeypatch):
    """A reader opens a store that is mounted read-only and holds a folder left behind by a gateway."""
    store = DirectoryStore(tmp_path / "store")
    digest = store.put(write(tmp_path / "a"), BASE).digest
    old = store.root / ".tmp-old"
    old.mkdir()
    os.utime(old, (0, 0))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for call in ("unlink", "rmdir", "rename", "utime", "replace"):
        monkeypatch.setattr(os, call, refuse)
    reader = open_store(store.root)
    assert reader.path(digest) is not None
    assert list(reader.list()) == [digest]
    assert old.is_dir()


def test_a_file_of_a_late_put_does_not_stop_a_deletion(tmp_path, monkeypatch):
    """A put may have found the folder in its place just before the deletion moved it."""
    store = DirectoryStore(tmp_path / "store")
    digest = store.put(write(tmp_path / "a"), BASE).digest
    remove, late = os.rmdir, [True]

    def remove_later(path, **options):
        if late:
            late.clear()
            [moved] = store.root.glob(".tmp-*/")
            (moved / "adapter_config.json").write_text("{}")
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", remove_later)
    assert store.delete(digest)
    assert not late
    assert not list(store.root.glob(".tmp-*/"))


def test_many_puts_and_deletes_at_once_leave_a_whole_adapter_or_none(tmp_path):
    store, folder = DirectoryStore(tmp_path / "store"), write(tmp_path / "a")
    digest = open_checkpoint(folder).digest
    failures: list[BaseException] = []
    stop = time.monotonic() + 2

    def work(act) -> None:
        try:
            while time.monotonic() < stop:
                act()
        except BaseException as error:
            failures.append(error)
            raise

    def put() -> None:
        assert store.put(folder, BASE).digest == digest

    def look() -> None:
        path = store.path(digest)
        if path is not None:
            try:
                found = open_checkpoint(path).digest
            except (AdapterError, FileNotFoundError) as error:
                found = digest if "missing" in str(error) or "no such" in str(error).lower() else str(error)
            assert found == digest  # or it was deleted file by file between two reads

    def delete() -> None:
        store.delete(digest)
        time.sleep(0.02)

    threads = [threading.Thread(target=work, args=(act,)) for act in (put, put, put, look, delete)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    put()
    assert list(store.list()) == [digest]
    assert leftovers(store) == []


def test_processes_race_to_put_the_same_adapters(tmp_path):
    store = DirectoryStore(tmp_path / "store")
    folders = [write(tmp_path / str(seed), tensors(seed=seed)) for seed in range(6)]
    script = (
        "import sys\nfrom adapters.open_store import open_store\nfrom testing.adapter_files import BASE\n"
        "store = open_store(sys.argv[1])\n"
        "for _ in range(5):\n    for folder in sys.argv[2:]:\n        print(store.put(folder, BASE).digest)\n"
    )
    command = [sys.executable, "-c", script, store.root, *folders]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    said = [process.communicate(timeout=110)[0].decode().split() for process in running]
    assert [process.returncode for process in running] == [0] * 4
    expected = [open_checkpoint(folder).digest for folder in folders]
    assert said == [expected * 5] * 4
    assert list(store.list()) == sorted(expected)
    assert all(open_checkpoint(store.path(d)).digest == d for d in expected)
    assert leftovers(store) == []


@pytest.mark.parametrize("digest", ["", "../../etc", "a" * 63, "A" * 64, "a" * 64 + "\n", "sha256:" + "a" * 64])
def test_a_digest_is_no_path(tmp_path, digest):
    store = DirectoryStore(tmp_path)
    for act in (store.path, store.delete):
        with pytest.raises(AdapterNotFound):
            act(digest)


def test_open_store(tmp_path):
    digest = open_store(tmp_path / "a b").put(write(tmp_path / "x"), BASE).digest
    assert list(open_store(f"file://{tmp_path}/a%20b").list()) == [digest]
    for url in ("", "http://host/x", "file://host/x"):
        with pytest.raises(ValueError, match=r"^expected"):
            open_store(url)
