"""The real stack for tests: `loraplex up --demo`, as a new user starts it, on a free port."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testing.ports import free_port

if TYPE_CHECKING:
    import openai  # takes 2 s, so it is not imported at collection

ROOT = Path(__file__).resolve().parent.parent
# The model is downloaded and converted once; CI may keep this folder between runs.
CACHE = Path(os.environ.get("LORAPLEX_TEST_CACHE", ROOT / ".loraplex-test"))
START_SECONDS = 300
READY = "Ctrl-C stops everything."


def data_dir(root: Path) -> Path:
    """Return a new data directory that shares only the models with other runs."""
    (CACHE / "models").mkdir(parents=True, exist_ok=True)
    root.mkdir(parents=True, exist_ok=True)
    (root / "models").symlink_to(CACHE / "models")
    return root


def loraplex(*arguments: str, timeout: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run one command to its end. timeout: in seconds. Raises subprocess.TimeoutExpired."""
    command = (sys.executable, "-m", "loraplex.cli", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT, **options)


def one_line_error(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error, after a check that it is one line on stderr, with no traceback and nothing on stdout."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return lines[0]


def children(pid: int) -> list[int]:
    """Return the live processes that `pid` started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):  # ended during the listing
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


class Stack:
    """A running `loraplex up`. Its output goes to a file, so that it never blocks on a full pipe."""

    def __init__(self, data: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.data = data
        self.port = free_port()
        self.output = data / "up.log"
        # A short path, because Valkey's socket may be there. Only this stack's processes write to it.
        self.temporary = Path(tempfile.mkdtemp(prefix="lpx-"))
        with open(self.output, "w") as out:
            self.process = subprocess.Popen(
                (
                    sys.executable,
                    "-m",
                    "loraplex.cli",
                    "up",
                    "--port",
                    str(self.port),
                    "--data-dir",
                    str(data),
                    *arguments,
                ),
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **(environment or {}), "TMPDIR": str(self.temporary)},
            )

    def wait_ready(self, seconds: float = START_SECONDS) -> "Stack":
        deadline = time.monotonic() + seconds
        while READY not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)
        return self

    def text(self) -> str:
        return self.output.read_text()

    @property
    def demo(self) -> dict[str, Any]:
        return json.loads((self.data / "demo.json").read_text())

    def stop(self, number: int = signal.SIGINT) -> int:
        """Stop the stack and return its exit code. Kills it after 40 s, so that no test leaves processes behind."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)


_clients: dict[tuple[str, str], Any] = {}


def close_clients() -> None:
    """Close every client. A socket left to the garbage collector would fail a later test."""
    while _clients:
        _clients.popitem()[1].close()


@dataclass(frozen=True)
class Tenant:
    name: str
    key: str
    models: tuple[str, ...]
    url: str

    @property
    def client(self) -> "openai.OpenAI":
        """Return the client of a tenant on a stack; `close_clients` closes them all."""
        import openai

        place = self.url, self.key
        if place not in _clients:
            # No keep-alive and no retries: the server closes old connections, and a request on one would fail.
            headers = {"Connection": "close"}
            _clients[place] = openai.OpenAI(
                api_key=self.key, base_url=f"{self.url}/v1", max_retries=0, default_headers=headers
            )
        return _clients[place]

    @property
    def aclient(self) -> "openai.AsyncOpenAI":
        import openai

        return openai.AsyncOpenAI(api_key=self.key, base_url=f"{self.url}/v1", max_retries=0)

    def ask(self, model: str, question: str, **options: Any) -> str:
        """Return the greedy answer to one chat message."""
        answer = self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            **{"temperature": 0, "max_tokens": 64} | options,
        )
        return answer.choices[0].message.content or ""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def http(
    method: str,
    url: str,
    key: str | None = None,
    data: bytes | None = None,
    kind: str = "application/json",
) -> Answer:
    """Send one plain HTTP request; an error status is returned like any other."""
    headers = {"Content-Type": kind}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())
