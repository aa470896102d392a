"""The cgroups of this process, versions 1 and 2, whose limits are below the machine's."""

from collections.abc import Iterator
from pathlib import Path


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of the controller's cgroup and of its parents. root: directory where proc and sys are mounted.

    A folder may not exist: in a container the path may be the host's, and then the mount itself is this process's
    group.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        _number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        mounts = (
            [root / "sys/fs/cgroup"]
            if not controllers
            else [root / "sys/fs/cgroup" / controller, root / "sys/fs/cgroup" / controllers]
        )
        for mount in mounts:
            folder = mount / path.lstrip("/")
            yield folder
            yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the bytes that the cgroups of this process allow, None without a limit."""
    limits = []
    for group in cgroups("memory", root):
        found = read(group / "memory.max").strip() or read(group / "memory.limit_in_bytes").strip()
        if found.isdecimal():  # not "max"
            limits.append(int(found))
    return min(limits, default=None)


def read(path: Path) -> str:
    """Return the file's text, empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
