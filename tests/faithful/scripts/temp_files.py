"""Temporary files and folders: some are removed at exit, some are meant to stay."""

import os
import tempfile

scratch = tempfile.NamedTemporaryFile("w", prefix="scratch-", dir=".")
folder = tempfile.TemporaryDirectory(prefix="folder-", dir=".")
spooled = tempfile.SpooledTemporaryFile(max_size=10)
fd, kept = tempfile.mkstemp(prefix="kept-")


def fill():
    scratch.write("nothing stays of this")
    with open(os.path.join(folder.name, "inner"), "w") as file:
        file.write("nor of this")
    spooled.write(b"more than ten bytes")
    os.write(fd, b"this stays")


fill()
print(os.path.exists(scratch.name), os.path.isdir(folder.name), os.path.basename(kept)[:5])
print(os.path.dirname(kept) == tempfile.gettempdir())
