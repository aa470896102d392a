"""Build the images and run docker-compose.yml's demo in them (deploy/try_images.sh).

The sizes of the last run are in docs/deployment.md.
"""

import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from testing.compose import ROOT, Service, read_services
from testing.images import build
from testing.images.containers import Container, Network, Volumes

README_UPLOAD = re.compile(r"^curl http://127\.0\.0\.1:8080/v1/adapters .*?\n\n", re.DOTALL | re.MULTILINE)
GATEWAY_URL = "http://127.0.0.1:8080"
START_SECONDS = 300
# Services that run once: `setup` downloads and converts the model.
ONCE_SECONDS = 900


@contextmanager
def step(title: str) -> Iterator[None]:
    print(f"{title} ...", end=" ", flush=True)
    started = time.monotonic()
    yield
    print(f"{time.monotonic() - started:.0f} s", flush=True)


def build_images(pip: build.Pip) -> None:
    """Build the five images and print their sizes."""
    with step("base image"):
        base = build.base_image()
    argument = f"--build-arg=PYTHON_IMAGE={base}"
    with step("image of the stand-in servers"):
        folder, packages = ROOT / "testing/images", f"--build-arg=PACKAGES={build.server_packages()}"
        build.build(build.SERVERS, folder / "servers.Dockerfile", pip, argument, packages, context=folder)
    with step("image gateway"):
        build.build(build.GATEWAY, build.DOCKERFILE, pip, argument, "--target=gateway")
    index = build.torch_index()
    with step(f"image engine, torch from {index}"):
        torch = f"--build-arg=TORCH_INDEX={index}"
        build.build(build.ENGINE, build.DOCKERFILE, pip, argument, torch, "--target=engine")
    with step("image demo"):
        build.build(build.DEMO, build.DOCKERFILE, pip, argument, torch, "--target=demo")
    sizes = {name: build.size(name) for name in (base, build.GATEWAY, build.ENGINE, build.DEMO)}
    print("\n| image | MB | above its base |\n|---|---|---|")
    for name, num_bytes in sizes.items():
        print(f"| {name} | {num_bytes / 1e6:.0f} | {(num_bytes - sizes[base]) / 1e6:.0f} |")
    print()
    above = (sizes[build.GATEWAY] - sizes[base]) / 1e6
    if above > 200:
        raise RuntimeError(f"the gateway's image is {above:.0f} MB above its base, expected at most 200")


class Deployment:
    """The compose file's services. Volumes outlive `stop`."""

    def __init__(self, work: Path, services: Mapping[str, Service], pip: build.Pip, stack: ExitStack) -> None:
        self._work = work
        self._services = services
        self._pip = pip
        self._stack = stack
        self._volumes = Volumes(work / "volumes")
        self.network = Network(stack)
        self.containers: dict[str, Container] = {}
        self.peaks: dict[str, int] = dict.fromkeys(services, 0)
        names = " ".join(services)
        (work / "hosts").write_text(f"127.0.0.1 localhost {names}\n")

    def start(self) -> None:
        """Start each service once the conditions of its `depends_on` hold, and wait for all."""
        for name, service in self._services.items():
            with step(f"start {name}"):
                container = Container(service, self._work, self._volumes, self._pip, self.network.enter)
                self._stack.callback(self._remove, container)
                self.containers[name] = container
                container.start()
                if container.service.probe is not None:
                    container.wait_healthy(START_SECONDS)
                elif (code := container.wait(ONCE_SECONDS)) != 0:
                    raise RuntimeError(f"{name} ended with {code}:\n{container.log.read_text()[-4000:]}")
            if service.probe is None:
                print("".join(f"    {line}\n" for line in container.log.read_text().splitlines()), end="", flush=True)

    def stop(self) -> None:
        """Stop in reverse order; each must end within its grace period, with exit code 0, and may not have written
        into its image.
        """
        for name, container in reversed(self.containers.items()):
            if container.service.probe is not None:
                with step(f"stop {name}"):
                    code = container.stop()
                if code != 0:
                    raise RuntimeError(f"{name} ended with {code}:\n{container.log.read_text()[-4000:]}")
            if (written := container.written()) and container.service.target is not None:
                raise RuntimeError(f"{name} wrote into its image: {written[:5]}")
            self.peaks[name] = max(self.peaks[name], container.peak)
            self._remove(container)
        self.containers.clear()

    def check_memory(self) -> None:
        """Print each service's peak beside its limit. Raises RuntimeError for one above four fifths of its limit."""
        print("\n| service | peak, MB | limit, MB |\n|---|---|---|")
        for name, peak in self.peaks.items():
            limit = self._services[name].memory
            assert limit is not None
            print(f"| {name} | {peak / 2**20:.0f} | {limit / 2**20:.0f} |")
            if peak > 0.8 * limit:
                raise RuntimeError(f"{name} needs {peak / 2**20:.0f} MB of {limit / 2**20:.0f}")
        print()

    def _remove(self, container: Container) -> None:
        if container.name:
            container.remove()
            container.name = ""


def ask(network: Network, banner: str) -> str:
    """Run the curl command of the demo's summary; return the answer's text."""
    [command] = re.findall(r"^curl -s .*$", banner, re.MULTILINE)
    answer = json.loads(build.run(*network.enter, "sh", "-c", command, timeout=120))
    if "choices" not in answer:
        raise RuntimeError(f"the demo's curl was answered {answer}")
    text: str = answer["choices"][0]["message"]["content"]
    return text


def upload(network: Network, key: str) -> None:
    """Run the README's upload of an adapter."""
    found = README_UPLOAD.search((ROOT / "README.md").read_text())
    assert found is not None
    command = f"KEY={key}; {found[0].strip()}"
    answer = json.loads(build.run(*network.enter, "sh", "-c", command, timeout=120))
    if answer.get("name") != "terse":
        raise RuntimeError(f"the README's upload was answered {answer}")


def get(network: Network, key: str, path: str) -> dict:
    answer: dict = json.loads(network.curl("--header", f"Authorization: Bearer {key}", f"{GATEWAY_URL}{path}"))
    return answer


def usage(network: Network, key: str) -> dict:
    """Return the tenant's usage once it has the first request's row, which is written after the answer."""
    deadline = time.monotonic() + 30
    while not (answer := get(network, key, "/v1/usage"))["data"]:
        if time.monotonic() > deadline:
            raise RuntimeError("the demo's request is not in the usage report")
        time.sleep(0.2)
    return answer


def try_demo(deployment: Deployment) -> None:
    """Start the demo, use it, stop it, start it again: keys, adapters and usage are still there."""
    deployment.start()
    banner = deployment.containers["demo"].log.read_text()
    if "WARNING: this is a demo" not in banner:
        raise RuntimeError("the demo does not warn that it is one")
    key = re.findall(r"^ +key +(lpx_\S+)$", banner, re.MULTILINE)[0]
    with step("the demo's curl"):
        text = ask(deployment.network, banner)
    print(f"    {text!r}")
    with step("the README's upload"):
        upload(deployment.network, key)
    before = usage(deployment.network, key)
    deployment.stop()
    deployment.start()
    with step("after the restart: the same key, adapter and usage"):
        models = {model["id"] for model in get(deployment.network, key, "/v1/models")["data"]}
        after = usage(deployment.network, key)
        if "terse" not in models or after != before:
            raise RuntimeError(f"data was lost: {models}, usage {before} before and {after} after")
        again = ask(deployment.network, banner)
    if again != text:
        raise RuntimeError(f"the same request was answered {again!r}, before the restart {text!r}")
    deployment.stop()
    deployment.check_memory()


def main() -> None:
    work = Path(tempfile.mkdtemp(prefix="loraplex-images-", dir="/var/tmp"))
    # Services run as other users.
    work.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        pip = build.Pip.read(work)
        build_images(pip)
        # A fresh checkout has no .env.
        try_demo(Deployment(work, read_services({}), pip, stack))
    print("deploy/try_images.sh: everything works")


if __name__ == "__main__":
    main()
