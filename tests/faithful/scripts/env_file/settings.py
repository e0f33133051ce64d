import os
import pathlib

for line in pathlib.Path(".env").read_text().splitlines():
    name, sign, value = line.partition("=")
    if sign and not line.startswith("#"):
        os.environ[name] = value
