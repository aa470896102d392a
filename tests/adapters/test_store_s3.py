"""Adapters in an S3 service: written whole, read by digest through bounded local copies, removed without a trace."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapters import store_s3
from adapters.checkpoint import open_checkpoint
from adapters.manifest import AdapterError, AdapterNotFound
from adapters.open_store import open_store
from adapters.store import put
from adapters.store_s3 import S3Error, S3Store
from adapters.verified_files import VerifiedFiles
from testing.adapter_files import BASE, tensors, write
from testing.ports import free_port
from testing.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

Open = Callable[..., S3Store]


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"store/{request.node.name[:40].strip('[]')}"


@pytest.fixture
def open_at(s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Open the test's store; with another name, as another machine."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    opened = []

    def at(machine: str = "one", cache_bytes: int = 1 << 30, url: str | None = None) -> S3Store:
        store = open_store(url or s3.url(prefix), tmp_path / machine, cache_bytes)
        assert isinstance(store, S3Store)
        opened.append(store)
        return store

    yield at
    for store in opened:
        store.close()


def make_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stores' clock run two hours ahead of the server's."""
    really = store_s3.datetime
    ahead = store_s3.timedelta(hours=2)
    monkeypatch.setattr(
        store_s3, "datetime", type("Ahead", (), {"now": staticmethod(lambda zone: really.now(zone) + ahead)})
    )


def test_what_one_machine_puts_another_reads(open_at: Open, s3: S3Server, prefix: str, tmp_path: Path):
    one, other = open_at(), open_at("other")
    digest = put(one, write(tmp_path / "a"), BASE).digest
    assert s3.keys(prefix) == [f"{digest[:2]}/{digest}/{name}" for name in sorted(store_s3.FILES)]
    assert list(other.list()) == [digest]
    assert list(other.copies.list()) == []
    with VerifiedFiles().use(other, digest) as checkpoint:
        assert checkpoint.digest == digest
        assert checkpoint.folder.is_relative_to(tmp_path / "other")
    s3.client(prefix).delete(s3.keys(prefix))
    assert other.path(digest) is not None  # the copy serves without the service
    assert one.path(digest) is None
    assert [path.name for path in (tmp_path / "one").iterdir() if path.name.startswith(".")] == []


def test_an_adapter_is_there_only_with_its_last_object(open_at: Open, s3: S3Server, prefix: str, tmp_path: Path):
    store = open_at()
    digest = put(store, write(tmp_path / "a"), BASE).digest
    s3.client(prefix).delete(f"{digest[:2]}/{digest}/adapter_config.json")
    assert store.path(digest) is None
    assert store.path("0" * 64) is None
    for bad in ("", "../../etc", "A" * 64, "a" * 64 + "\n"):
        with pytest.raises(AdapterNotFound):
            store.path(bad)


def test_a_large_adapter_is_read_in_ranges(open_at: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_s3, "RANGE_BYTES", 300)
    store = open_at()
    digest = put(store, write(tmp_path / "a", tensors(seed=3)), BASE).digest
    folder = store.path(digest)
    assert folder is not None
    assert (folder / "adapter_model.safetensors").stat().st_size > 5 * 300
    assert open_checkpoint(folder).digest == digest


def test_a_damaged_object_is_refused_and_read_again_once_it_is_repaired(
    open_at: Open, s3: S3Server, prefix: str, tmp_path: Path
):
    store, client, files = open_at(), s3.client(prefix), VerifiedFiles()
    digest = put(store, write(tmp_path / "a"), BASE).digest
    key = f"{digest[:2]}/{digest}/adapter_model.safetensors"
    raw = bytearray(bytes(client.get(key).bytes()))
    raw[-1] ^= 1
    client.put(key, bytes(raw))
    with pytest.raises(AdapterError), files.use(store, digest):
        raise AssertionError("it was served")
    assert put(store, tmp_path / "a", BASE).digest == digest  # an upload of the same content repairs it
    with files.use(store, digest) as checkpoint:
        assert checkpoint.digest == digest


def test_copies_are_bounded_and_those_in_use_stay(open_at: Open, tmp_path: Path):
    first = open_at()
    digests = [put(first, write(tmp_path / str(seed), tensors(seed=seed)), BASE).digest for seed in range(4)]
    folder = first.path(digests[0])
    assert folder is not None
    size = sum(file.stat().st_size for file in folder.iterdir())
    store = open_at("small", 2 * size + 100)
    with store.use(digests[0]) as held:
        for digest in digests[1:]:
            assert store.path(digest) is not None
            time.sleep(0.01)
        assert set(store.copies.list()) == {digests[0], digests[3]}
        with store.use(digests[3]), pytest.raises(OSError) as error:
            store.path(digests[1])
        assert error.value.errno == errno.ENOSPC
        assert held is not None
        assert open_checkpoint(held).digest == digests[0]
    assert store.path(digests[1]) is not None
    assert sum(file.stat().st_size for file in (tmp_path / "small").rglob("*") if file.is_file()) <= 2 * size + 100


def test_an_upload_that_did_not_end_is_no_adapter(open_at: Open, s3: S3Server, prefix: str, tmp_path: Path):
    """Neither file alone is an adapter, nor is a removal's mark. The collector sees all three."""
    store = open_at()
    whole, weights, config = sorted(
        put(store, write(tmp_path / f"{i}", tensors(seed=i)), BASE).digest for i in range(3)
    )
    marked = f"{'f' * 63}e"
    s3.client(prefix).delete(f"{weights[:2]}/{weights}/{store_s3.CONFIG_NAME}")
    s3.client(prefix).delete(f"{config[:2]}/{config}/{store_s3.WEIGHTS_NAME}")
    s3.client(prefix).put(f"ff/{marked}/{store_s3.MARK}", b"")
    assert list(store.list()) == [whole]
    assert list(store.list(incomplete=True)) == sorted([whole, weights, config, marked])
    assert [store.path(digest) is not None for digest in (whole, weights, config)] == [True, False, False]


def test_what_a_killed_engine_downloaded_goes_at_the_next_start(open_at: Open):
    """The bound of the local copies does not count it."""
    killed, running = open_at().spool(), open_at().spool()
    with running:
        killed.make()
        (killed.folder / "adapter").mkdir()
        (killed.folder / "adapter" / store_s3.WEIGHTS_NAME).write_bytes(bytes(1 << 20))
        assert killed._lock is not None
        os.close(killed._lock)  # as at the process's end
        open_at()
        deadline = time.monotonic() + 30
        while killed.folder.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert running.folder.exists()


def test_an_outage_names_neither_url_nor_secret(open_at: Open, s3: S3Server, monkeypatch: pytest.MonkeyPatch):
    open_at().check()
    monkeypatch.setattr(store_s3, "RETRIES", 1)
    away = f"s3://{BUCKET}/x?endpoint=http://127.0.0.1:{free_port()}&region=us-east-1"
    for url in (away, s3.url("x").replace(BUCKET, "no-such-bucket")):
        with pytest.raises(S3Error) as error:
            list(open_at(url=url).list())
        with pytest.raises(S3Error):
            open_at(url=url).check()
        assert "127.0.0.1" not in str(error.value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-5e1f")
    store = open_at()
    with pytest.raises(S3Error, match="403 SignatureDoesNotMatch"):
        store.check()
    with pytest.raises(S3Error, match="403 SignatureDoesNotMatch") as error:
        store.path("0" * 64)
    shown = f"{error.value!r} {error.value.__cause__} {store!r} {vars(store)} {store._bucket._client!r}"
    assert not any(secret in shown for secret in ("wrong-secret-5e1f", ACCESS_KEY, SECRET_KEY))


def test_the_collector_takes_what_is_old_and_unused_and_nothing_stays(
    open_at: Open, s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, reader = open_at(), open_at("reader")
    digest = put(store, write(tmp_path / "a"), BASE).digest
    assert reader.path(digest) is not None
    assert store.set_aside(digest, 3600) is None
    make_old(monkeypatch)
    size = store.unused_bytes(digest, 3600)
    assert size is not None
    aside = store.set_aside(digest, 3600)
    assert aside is not None
    aside.bring_back()
    assert store.path(digest) is not None
    aside = store.set_aside(digest, 3600)
    assert aside is not None
    assert aside.num_bytes == size
    aside.remove()
    assert s3.keys(prefix) == []
    assert reader.sweep() == 1
    assert [path for path in tmp_path.rglob("*") if digest in path.name and "reader" in str(path)] == []


def test_an_upload_that_meets_a_removal_is_stored(
    open_at: Open, s3: S3Server, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The upload waits for the collector that removes the objects, and then writes them again."""
    monkeypatch.setattr(store_s3, "LOOK_SECONDS", 0.02)
    store = open_at()
    digest = put(store, write(tmp_path / "a"), BASE).digest
    with monkeypatch.context() as ahead:
        make_old(ahead)
        aside = store.set_aside(digest, 3600)
        assert aside is not None
    looks, looked = S3Store._marked, list[bool]()
    monkeypatch.setattr(S3Store, "_marked", lambda *given: looked.append(looks(*given)) or looked[-1])
    uploading = threading.Thread(target=put, args=(open_at("other"), tmp_path / "a", BASE))
    uploading.start()
    deadline = time.monotonic() + 60
    while len(looked) < 10:  # it looks again and again while the mark is there
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all(looked)
    assert uploading.is_alive()
    aside.remove()
    uploading.join(60)
    assert len(s3.keys(prefix)) == 2
    assert store.path(digest) is not None


def test_a_removal_between_staging_and_publishing_refuses_the_upload_at_once(
    open_at: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Publishing does not wait, because it holds a database transaction that other tenants may need."""
    store = open_at()
    digest = put(store, write(tmp_path / "a"), BASE).digest
    make_old(monkeypatch)
    aside = store.set_aside(digest, 3600)
    assert aside is not None
    for act in (aside.remove, aside.bring_back):
        with pytest.raises(store_s3.S3Error, match="removed at the same time"):
            store.publish(tmp_path / "a", digest)
        act()


def test_an_upload_that_came_first_is_new_for_the_collector(
    open_at: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = open_at()
    digest = put(store, write(tmp_path / "a"), BASE).digest
    # The collector's clock stands still, one second after the first upload: S3 counts in seconds.
    stands = store_s3.datetime.now(store_s3.UTC) + store_s3.timedelta(seconds=1)
    monkeypatch.setattr(store_s3, "datetime", type("Stands", (), {"now": staticmethod(lambda _: stands)}))
    assert store.unused_bytes(digest, 0) is not None
    time.sleep(3)
    put(store, tmp_path / "a", BASE)
    assert store.unused_bytes(digest, 0) is None
    assert store.set_aside(digest, 0) is None


def test_wrong_urls_are_refused_and_not_quoted(tmp_path: Path):
    for url in (
        "s3://",
        "s3:///prefix",
        "s3://key:secret@bucket/x",
        "s3://bucket/x?access_key_id=secret",
        "s3://b?endpoint=",
    ):
        with pytest.raises(ValueError, match=r"^expected s3://bucket/prefix") as error:
            open_store(url, tmp_path, 1)
        assert "secret@" not in str(error.value)
    with pytest.raises(ValueError, match="local copies"):
        open_store("s3://bucket/x")


def test_parts_of_uploads(open_at: Open, s3: S3Server, prefix: str, tmp_path: Path):
    parts, upload = open_at().upload_parts, "a" * 32
    for number in range(2):
        file = tmp_path / "part"
        file.write_bytes(bytes([number]) * 10)
        parts.save(upload, f"{number:032x}", file)
        assert not file.exists()
    assert b"".join(parts.read(upload, f"{1:032x}")) == b"\x01" * 10
    for foreign in ("uploads/.keep", "uploads/notes/x", f"uploads/{'b' * 32}"):
        s3.client(prefix).put(foreign, b"x")
    [(listed, at)] = parts.list()
    assert listed == upload
    assert abs(at - time.time()) < 60
    parts.remove(upload, f"{0:032x}")
    with pytest.raises(FileNotFoundError):
        list(parts.read(upload, f"{0:032x}"))
    with pytest.raises(ValueError):
        parts.remove_upload("../" + "a" * 29)
    parts.remove_upload(upload)
    assert len(s3.keys(prefix)) == 3


def test_the_environments_endpoint(open_at: Open, s3: S3Server, prefix: str, tmp_path: Path, monkeypatch):
    """Endpoint and region may come from the standard variables instead of the URL."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    store = open_at(url=f"s3://{BUCKET}/{prefix}")
    digest = put(store, write(tmp_path / "a"), BASE).digest
    assert list(store.list()) == [digest]
