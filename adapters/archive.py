"""An adapter's two files out of a .zip, .tar or .tar.gz: nothing that the archive says is believed.

Runs in the checking child (adapters/check.py). Every size is counted while it grows; a header that lies is an error
that names the member. No member decides a path: the two files are written under names of our own, all others are
skipped unread. Members that point elsewhere (`..`, absolute paths, links, devices) refuse the whole archive.
"""

from pathlib import Path

from adapters.members import MAX_MEMBERS, Members
from adapters.tar_reader import GZIP_MAGIC, Gunzip, Plain, read_tar
from adapters.zip_reader import ZIP_MAGIC, read_zip


def unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    """Write the adapter's two files, as far as the archive holds them, into `folder`.

    They are taken from the archive's root, or else from its one folder that has them. Raises ArchiveError, OSError.
    """
    with archive.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        members = Members(folder, max_bytes)
        if magic in ZIP_MAGIC:
            read_zip(file, members)
        elif magic[:2] == GZIP_MAGIC:
            # Headers and padding come on top of what the members may weigh.
            source = Gunzip(file, max_bytes + MAX_MEMBERS * 4096)
            read_tar(source, members)
            source.drain()
        else:
            read_tar(Plain(file), members)
    members.finish()
