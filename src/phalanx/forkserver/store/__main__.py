"""The store as a program: `python forkserver/store/ FD AGENT ORDER`."""

import importlib.util
import json
import os
import sys

del sys.path[0]  # this folder: torch must not import our modules by mistake
_folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_spec = importlib.util.spec_from_file_location(
    "_phalanx_forkserver", os.path.join(_folder, "__init__.py"), submodule_search_locations=[_folder]
)
assert _spec is not None  # noqa: S101
sys.modules["_phalanx_forkserver"] = importlib.util.module_from_spec(_spec)

from _phalanx_forkserver.store import host  # noqa: E402

_fd, _agent, _order = sys.argv[1:]
host.host(int(_fd), int(_agent), host.StoreOrder(**json.loads(_order)))
