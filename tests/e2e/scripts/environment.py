"""environment.py DIR: writes the environment of this rank to DIR/<rank>.json. Needs no torch."""

import json
import os
import sys

with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump(dict(os.environ), file)
