"""Unpacking of an adapter's two files from a .zip, .tar or .tar.gz without trusting any header.

Runs in the child process that checks uploads (adapters/check.py). Bytes are counted as they are written; a header with
a wrong size is an error that names the member. The two files get fixed names; all others are skipped unread. A member
that points outside (`..`, absolute paths, links, devices) refuses the whole archive.
"""

from pathlib import Path

from adapters.archives.members import MAX_MEMBERS, Members
from adapters.archives.tar import GZIP_MAGIC, Gunzip, Plain, read_tar
from adapters.archives.zip import ZIP_MAGIC, read_zip


def unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    """Write the adapter files that the archive contains into `folder`.

    They come from the archive's root, or else from the only folder that contains them. Raises ArchiveError, OSError.
    """
    with archive.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        members = Members(folder, max_bytes)
        if magic in ZIP_MAGIC:
            read_zip(file, members)
        elif magic[:2] == GZIP_MAGIC:
            # Headers and padding come on top of the members' own limit.
            read_tar(Gunzip(file, max_bytes + MAX_MEMBERS * 4096), members)
        else:
            read_tar(Plain(file), members)
    members.finish()
