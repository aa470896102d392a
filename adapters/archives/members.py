"""Selection of the archive members to unpack; refuses archives with unsafe names or too much content."""

from pathlib import Path, PurePosixPath

from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from wire.escaping import escaped

FILES = (CONFIG_NAME, WEIGHTS_NAME)
MAX_MEMBERS = 1000


class ArchiveError(ValueError):
    """An archive that is refused; the message names the member and the reason."""


class ArchiveTooLarge(ArchiveError):
    """An archive whose members are larger than an upload may be."""


class Members:
    """Selection of the members that are an adapter's two files, and the temporary paths to write them to."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._members = 0
        self._declared = 0
        self._names: set[str] = set()
        # Adapter folders in the archive, by path; "." is its root.
        self._found: dict[str, dict[str, Path]] = {}

    def check(self, name: str, size: int) -> None:
        """Count a member. Raises ArchiveError for a name that points outside, too many members, or too many bytes."""
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise ArchiveError(f"The archive has more than {MAX_MEMBERS} members.")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            raise unsafe(name)
        self._declared += size
        if self._declared > self._max_bytes:
            raise ArchiveTooLarge(
                f"The archive's members up to {quoted_name(name)} state {self._declared} bytes together."
            )

    def target(self, name: str) -> Path | None:
        """Return the path to write a regular file to; None to skip it. Raises ArchiveError for a duplicate name."""
        path = PurePosixPath(name)
        if path.name not in FILES or len(path.parts) > 2:
            return None
        if str(path) in self._names:
            raise ArchiveError(f"The archive holds {quoted_name(name)} more than once.")
        self._names.add(str(path))
        folder = str(path.parent)
        if folder not in self._found and len(path.parts) == 2 and sum(key != "." for key in self._found) >= 2:
            # Several folders are refused unless the root has the files, so a third folder is never needed.
            return None
        target = self._folder / f"member-{len(self._names)}"
        self._found.setdefault(folder, {})[path.name] = target
        return target

    def finish(self) -> None:
        """Rename the chosen files to their final names and remove the others.

        Raises ArchiveError if the choice is ambiguous.
        """
        folders = [name for name in self._found if name != "."]
        if "." not in self._found and len(folders) > 1:
            names = ", ".join(quoted_name(name) for name in folders[:2])
            raise ArchiveError(f"The archive holds an adapter in more than one folder: {names}.")
        chosen = self._found.get("." if "." in self._found else folders[0], {}) if self._found else {}
        for files in self._found.values():
            for name, path in files.items():
                if files is chosen:
                    path.replace(self._folder / name)
                else:
                    path.unlink()


def unsafe(name: str) -> ArchiveError:
    """Return the refusal of a member that points outside or is not a plain file."""
    return ArchiveError(
        f"The archive's member {quoted_name(name)} is refused: expected plain files inside the archive's own folder."
    )


def quoted_name(name: str) -> str:
    """Return a member's name for use in a message."""
    return f"'{escaped(name, 100)}'"


def text(raw: bytes) -> str:
    """Return a member's name as text, whatever its encoding."""
    return raw.decode("utf-8", "replace")
