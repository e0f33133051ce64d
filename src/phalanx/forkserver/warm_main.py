"""The main module of a warm fork server, and the only frame below the script in its workers.

    python -u warm_main.py FD SOCKET IDLE MODULES PADDING

The padding reserves space for a worker's own command line, which `ps` reads from the same place.
"""

import sys

_preimported = frozenset(sys.modules)  # imported by Python itself

import importlib.util  # noqa: E402
import os  # noqa: E402

_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _folder]
_spec = importlib.util.spec_from_file_location(
    "_phalanx_forkserver", os.path.join(_folder, "__init__.py"), submodule_search_locations=[_folder]
)
assert _spec is not None  # noqa: S101
sys.modules["_phalanx_forkserver"] = importlib.util.module_from_spec(_spec)

if __name__ == "__main__":
    import socket

    from _phalanx_forkserver import log, warm
    from _phalanx_forkserver.child import main_module, setup
    from _phalanx_forkserver.imports import shadows

    shadows.preimported = _preimported
    log.configure()
    _listener = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(_listener.fileno(), False)
    _child_spec = warm.WarmForkServer(_listener, sys.argv[2], float(sys.argv[3])).serve(sys.argv[4].split(","))
    setup.hide_frames_of(globals())
    main_module.prepare(_child_spec)()
