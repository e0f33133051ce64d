"""Finds the variables that the import of torch reads. Prints those whose change would not be detected.

reads.py ENVLOG: run with getenv.c preloaded.
"""

import json
import os
import sys

from phalanx.forkserver.imports import preloaded

log = sys.argv[1]
open(log, "w").close()
modules = preloaded.Preloaded()
for name in ("torch", "torch.distributed", "torch._dynamo"):
    modules.load(name)
with open(log) as file:
    native = {line.rstrip("\n") for line in file}
python = {os.fsdecode(name) for layer in modules._layers for name in layer.reads}

unnoticed = {}
for name in sorted(native | python):
    before = os.environ.get(name)
    os.environ[name] = "another value"
    changed = set().union(*(modules._changed(layer, set(layer.modules)) for layer in modules._layers))
    if name not in changed:
        unnoticed[name] = "native" if name in native else "python"
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before
print(json.dumps({"read": len(native | python), "unnoticed": unnoticed}))
