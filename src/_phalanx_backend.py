"""What torch imports (entry point "torch.backends"): registers the backends of phalanx without importing `phalanx`.

A user may have a phalanx.py beside the script. `import torch` must not fail because of it, and `import phalanx` must
find it, so the one file that is needed is loaded by its path.
"""

import importlib.util
import logging
import os

_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "phalanx", "collectives", "registration.py")


def register() -> None:
    try:
        spec = importlib.util.spec_from_file_location("_phalanx_registration", _FILE)
        assert spec is not None  # noqa: S101
        assert spec.loader is not None  # noqa: S101
        registration = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(registration)
        registration.register()
    except Exception:  # torch is as it was
        logging.getLogger("phalanx.collectives").debug("cannot register the backends of phalanx", exc_info=True)
