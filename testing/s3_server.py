"""A real S3 server on free ports: SeaweedFS, from its wheel."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import S3Store as Client

from testing.ports import free_port

ACCESS_KEY, SECRET_KEY = "loraplex-test-access", "loraplex-test-secret-4ab09c"
BUCKET = "adapters-of-tests"


class S3Server:
    """A running server with one bucket."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "loraplex",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3']}"

    def url(self, prefix: str) -> str:
        """Return a store's URL. Its credentials are in `environment`."""
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    @property
    def environment(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

    def client(self, prefix: str = "", **options: Any) -> Client:
        """Return a client that is independent of the product's. options: further ones of obstore."""
        return Client(
            BUCKET,
            prefix=prefix or None,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            client_options={"allow_http": True},
            **options,
        )

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of all objects below a prefix."""
        return sorted(each["path"] for page in self.client(prefix).list() for each in page)

    def start(self) -> None:
        command = [
            *(_weed(), "server", "-dir=.", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-filer"),
            *("-s3", "-s3.config=s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"),
            *("-volume.max=16", "-master.volumeSizeLimitMB=64"),
            *(f"-{name}.port={port}" for name, port in self._ports.items()),
            *(f"-{name}.port.grpc={free_port()}" for name in self._ports),
        ]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        # Retries inside of a call come after ever longer pauses, of seconds in the end.
        client = self.client(retry_config={"max_retries": 0})
        while True:
            try:
                client.put("ready", b"x")
            except BaseError:
                assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
                assert time.monotonic() < deadline, "the S3 server did not start"
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else (shutil.which("weed", path=os.environ.get("PATH")) or "weed")
