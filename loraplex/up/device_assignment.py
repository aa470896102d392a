"""Devices of several engines on one machine: a GPU for each, or on the CPU a share of the cores; and an equal part of
the host's memory.

Unpinned engines would all take the first GPU, or as many threads each as there are cores, and memory as if each were
alone.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import zip_longest
from pathlib import Path

from kernels.threads import usable_cpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI_SECONDS = 30.0
_SYSTEM_CPUS = Path("/sys/devices/system/cpu")


class PinError(Exception):
    """The machine has too few GPUs for the engines; the message is one line."""


@dataclass(frozen=True)
class Pin:
    """Device to which an engine is pinned.

    label: its name in messages.
    cpus: those that it may use; empty: all.
    flags: flags of the engine's command.
    """

    label: str = ""
    cpus: tuple[int, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


def choose_pins(count: int, engine_args: str, gpus: Callable[[], Sequence[str]] | None = None) -> list[Pin]:
    """Return a pin for each engine; a single engine has the whole machine, several share its memory. engine_args: the
    engines' flags.

    gpus: returns the GPUs that torch would use; default: `usable_gpus`. Raises PinError for more engines than GPUs.
    """
    if count == 1:
        return [Pin()]
    device = flag_value(engine_args, "--device", "auto")
    found = list((gpus or usable_gpus)()) if device in ("auto", "cuda") else []
    if count > len(found) > 0:
        raise PinError(f"--engines: expected at most {len(found)}, an engine for each GPU, got {count}")
    pins = [Pin(f"GPU {gpu}", environment={VISIBLE: gpu}) for gpu in found[:count]] or _shares_of_cpus(count)
    return [replace(pin, flags=("--engines-on-host", str(count), *pin.flags)) for pin in pins]


def usable_gpus() -> list[str]:
    """Return the names of the GPUs that torch would use, as in CUDA_VISIBLE_DEVICES, without loading torch."""
    try:
        if metadata.version("torch").endswith("+cpu"):
            return []
    except metadata.PackageNotFoundError:
        return []
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return _installed_gpus()
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores an invalid name and all names after it.
    invalid = next((i for i, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return names[:invalid]


def _installed_gpus() -> list[str]:
    """Return the UUIDs that nvidia-smi lists; a divided GPU's parts instead of it. Empty without nvidia-smi."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            (program, "-L"), capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return _uuids(done.stdout)


def _uuids(listing: str) -> list[str]:
    found: list[str] = []
    for line in listing.splitlines():
        uuid = re.search(r"\(UUID: ((?:GPU|MIG)-[^)\s]+)\)", line)
        if uuid is None:
            continue
        if uuid[1].startswith("MIG-") and found and found[-1].startswith("GPU-"):
            found.pop()
        found.append(uuid[1])
    return found


def flag_value(engine_args: str, flag: str, default: str) -> str:
    """Return the last value of a flag among an engine's flags."""
    words, value = shlex.split(engine_args), default
    for word, following in zip_longest(words, words[1:], fillvalue=default):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value


def _shares_of_cpus(count: int) -> list[Pin]:
    """Return disjoint shares of the CPUs; engines beyond their number share one each."""
    # A cgroup's quota may allow fewer threads than CPUs.
    threads = max(1, usable_cpus() // count)
    if not hasattr(os, "sched_getaffinity"):
        return [Pin(f"{threads} threads", flags=("--threads", str(threads)))] * count
    cpus = sorted(os.sched_getaffinity(0), key=_place)
    return [_pin_to(share, threads) for share in divide(cpus, count)]


def _pin_to(cpus: tuple[int, ...], threads: int) -> Pin:
    label = ("CPU " if len(cpus) == 1 else "CPUs ") + ",".join(map(str, sorted(cpus)))
    return Pin(label, cpus, flags=("--threads", str(min(threads, len(cpus)))))


def divide(cpus: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Return `count` shares of neighbouring CPUs, whose sizes differ by at most 1; of one CPU each if there are fewer
    CPUs than shares.
    """
    if count >= len(cpus):
        return [(cpus[i % len(cpus)],) for i in range(count)]
    return [tuple(cpus[len(cpus) * i // count : len(cpus) * (i + 1) // count]) for i in range(count)]


def _place(cpu: int) -> tuple[int, int, int]:
    """Return the sort key (package, core, CPU), so that threads of one core are neighbours and not in two shares."""
    numbers = []
    for name in ("physical_package_id", "core_id"):
        try:
            numbers.append(int((_SYSTEM_CPUS / f"cpu{cpu}" / "topology" / name).read_text()))
        except (OSError, ValueError):
            numbers.append(0)
    return numbers[0], numbers[1], cpu
