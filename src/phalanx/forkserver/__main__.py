"""A fork server that imports nothing, for programs and fresh interpreters: `python -I -S forkserver/ FD PARENT`."""

import importlib.util
import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
_spec = importlib.util.spec_from_file_location(
    "_phalanx_forkserver", os.path.join(_folder, "__init__.py"), submodule_search_locations=[_folder]
)
assert _spec is not None  # noqa: S101
sys.modules["_phalanx_forkserver"] = importlib.util.module_from_spec(_spec)

from _phalanx_forkserver import cold  # noqa: E402

cold.serve(int(sys.argv[1]), int(sys.argv[2]))
