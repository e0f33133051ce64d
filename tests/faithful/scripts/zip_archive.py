"""A global ZipFile whose destructor writes its directory."""

import os
import zipfile

archive = zipfile.ZipFile(f"results-{os.environ['RANK']}.zip", "w", zipfile.ZIP_DEFLATED)


def keep(name, text):
    archive.writestr(name, text)


for number in range(5):
    keep(f"part-{number}.txt", f"part {number} of rank {os.environ['RANK']}\n")
print(len(archive.namelist()), "parts")
