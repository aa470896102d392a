"""Containers of docker-compose.yml's services by `buildah run --isolation chroot`, in one network namespace.

The namespace is empty but for a loopback interface, so the services listen on the ports of the compose file whatever
else this machine runs; their names are in /etc/hosts. Users, capabilities, volumes and their owners are those of the
compose file and the images. Memory limits and the read-only image cannot be set this way: they are measured instead.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from testing.compose import ROOT, Mount, Service
from testing.images.build import DEMO, ENGINE, GATEWAY, SERVERS, Pip, run
from testing.stack import children

IMAGES = {"gateway": GATEWAY, "engine": ENGINE, "demo": DEMO, None: SERVERS}
SAMPLE_SECONDS = 0.5
POLL_SECONDS = 0.5


class Network:
    """A network namespace with a loopback interface, held by a process."""

    def __init__(self, stack: ExitStack) -> None:
        self._holder = subprocess.Popen(("unshare", "--net", "sh", "-c", "ip link set lo up && exec sleep infinity"))
        stack.callback(self._holder.wait)
        stack.callback(self._holder.kill)
        # The namespace may be this process's own until the shell has become `sleep`.
        self.enter = ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net")
        deadline = time.monotonic() + 10
        while Path(f"/proc/{self._holder.pid}/comm").read_text().strip() != "sleep":
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def curl(self, *arguments: str) -> str:
        return run(*self.enter, "curl", "--silent", "--show-error", *arguments, timeout=120)


class Volumes:
    """Folders for volumes. A new one belongs to the user that owns the mount point in the image, as Docker does it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, service: Service, mount: Mount, image_root: Path) -> Path:
        if mount.source is not None and mount.source.startswith(("/", ".")):
            return (ROOT / mount.source).resolve()
        folder = self._root / (mount.source or f"{service.name}{mount.target}".replace("/", "-"))
        if not folder.exists():
            folder.mkdir(parents=True)
            owner = image_root / mount.target.lstrip("/")
            if owner.is_dir():
                status = owner.stat()
                os.chown(folder, status.st_uid, status.st_gid)
                folder.chmod(status.st_mode & 0o7777)
        return folder


class Container:
    """Container of a service in its image. peak: the most memory that its processes used together, in bytes."""

    def __init__(self, service: Service, work: Path, volumes: Volumes, pip: Pip, enter: tuple[str, ...]) -> None:
        self.service = service
        # Only `setup` needs the package index, and so the machine's own network.
        self._enter = () if service.name == "setup" else enter
        self.log = work / f"{service.name}.log"
        self.name = run("buildah", "from", "--pull-never", IMAGES[service.target]).strip()
        self.root = Path(run("buildah", "mount", self.name).strip())
        self._tmp = work / f"{service.name}-tmp"
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._tmp.mkdir()
        self._tmp.chmod(0o1777)
        mounts = [
            f"{volumes.folder(service, mount, self.root)}:{mount.target}{':ro' if mount.is_read_only else ''}"
            for mount in service.mounts
        ]
        mounts += [f"{work / 'hosts'}:/etc/hosts:ro", f"{self._tmp}:/tmp"]
        self._options = [f"--volume={mount}" for mount in (*mounts, *(pip.volumes if service.name == "setup" else ()))]
        self._options += [f"--env={name}={value}" for name, value in service.environment.items()]
        config = json.loads(run("buildah", "inspect", "--type=container", self.name))["OCIv1"]["config"]
        self._entrypoint: list[str] = config.get("Entrypoint") or []
        self.peak = 0
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self, *argv: str) -> list[str]:
        # Without --no-hosts, buildah mounts a file of its own over /etc/hosts or below ours, as it happens.
        options = ("--isolation=chroot", "--cap-drop=all", "--no-hosts", *self._options)
        return [*self._enter, "buildah", "run", *options, self.name, "--", *argv]

    def start(self) -> None:
        self._started = time.time()
        with open(self.log, "wb") as log:
            argv = self._command(*self._entrypoint, *self.service.command)
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT)
        threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()

    def is_healthy(self) -> bool:
        assert self.service.probe is not None
        done = subprocess.run(self._command(*self.service.probe), capture_output=True, check=False, cwd=ROOT)
        return done.returncode == 0

    def wait_healthy(self, seconds: float) -> None:
        """Wait for the service's own health check. Raises RuntimeError with its log if it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while not self.is_healthy():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.service.name} is not healthy:\n{self.log.read_text()[-4000:]}")
            time.sleep(POLL_SECONDS)

    def wait(self, seconds: float) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def stop(self) -> int:
        """Send SIGTERM to the service's first process; return its exit code. Raises TimeoutExpired after the grace."""
        assert self._process is not None
        for pid in self._service_processes()[:1]:
            os.kill(pid, signal.SIGTERM)
        return self._process.wait(self.service.grace_s)

    def remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            for pid in self._service_processes():
                os.kill(pid, signal.SIGKILL)
            self._process.wait(10)
        run("buildah", "rm", self.name)

    def written(self) -> list[str]:
        """Return the files that the service has written into its image, outside its volumes and /tmp."""
        ours = {"/tmp", "/etc/hosts", "/etc/pip.conf", "/run", *(mount.target for mount in self.service.mounts)}
        found = []
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = Path(folder, name)
                inside = "/" + str(path.relative_to(self.root))
                if path.lstat().st_mtime >= self._started and not any(inside.startswith(each) for each in ours):
                    found.append(inside)
        return found

    def _service_processes(self) -> list[int]:
        """Return the processes of the container's own command, the first one first, without those of buildah."""
        assert self._process is not None
        found, queue = [], [self._process.pid]
        while queue:
            pid = queue.pop(0)
            try:
                program = Path(os.readlink(f"/proc/{pid}/exe")).name
            except OSError:  # it has ended
                continue
            # In the container's root, a copy of buildah starts the command; it kills it when it gets SIGTERM itself.
            if program != "nsenter" and "buildah" not in program:
                found.append(pid)
            queue += children(pid)
        return found

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            self.peak = max(self.peak, sum(map(_memory, self._service_processes())))
            time.sleep(SAMPLE_SECONDS)


def _memory(pid: int) -> int:
    """Return a process's memory in bytes, each shared page divided by its number of users. 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    [line] = [line for line in text.splitlines() if line.startswith("Pss:")]
    return int(line.split()[1]) * 1024
