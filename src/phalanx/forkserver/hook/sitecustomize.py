"""Runs when an interpreter that phalanx started has read its site packages, just before its main module.

It stands first on PYTHONPATH, steps aside at once, and lets the sitecustomize it had hidden run in every worker.
"""

import sys

_plain = frozenset(sys.modules)  # what Python itself has imported

import importlib.util  # noqa: E402
import os  # noqa: E402
import traceback  # noqa: E402


def _step_aside() -> tuple[str | None, str | None]:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    kept = os.environ.pop("PHALANX_PYTHONPATH", None)
    if kept is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = kept
    return os.environ.pop("PHALANX_FORKSERVER", None), os.environ.pop("PHALANX_PROBE", None)


def _load() -> None:
    """By path: this interpreter need not have phalanx installed."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "_phalanx_forkserver", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None  # noqa: S101
    assert spec.loader is not None  # noqa: S101
    package = importlib.util.module_from_spec(spec)
    sys.modules["_phalanx_forkserver"] = package
    spec.loader.exec_module(package)
    from _phalanx_forkserver.imports import shadows

    shadows.plain = _plain


def _serve(task: str) -> None:
    """Returns in a worker only."""
    _load()
    from _phalanx_forkserver import cold

    fd, parent = (int(number) for number in task.split(":"))
    cold.serve(fd, parent)


def _be_witnessed(task: str) -> None:
    """A worker that was executed. Without a probe it runs as well."""
    *numbers, path0 = task.split(":", 4)
    slot, *fds = map(int, numbers)
    try:
        for fd in fds:
            os.set_inheritable(fd, False)
        _load()
        from _phalanx_forkserver.child import setup
        from _phalanx_forkserver.imports import shadows
        from _phalanx_forkserver.probe import probe

        board, channel, stacks = fds
        kept = probe.begin(board, slot, channel, stacks)
        if kept:
            os.close(kept[0])  # the board is mapped
        shadows.uncover(path0 or None)
        setup.record_exceptions(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    except Exception:
        pass


def _hidden_sitecustomize() -> None:
    """What would have been imported here, had we not stood in front of it."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        # The import that brought us here looks for its module when we return.
        if ours is not None:
            sys.modules["sitecustomize"] = ours


_fork_server, _probe = _step_aside()
if _fork_server is not None:
    try:
        _serve(_fork_server)
    except BaseException:
        # Python would say so and go on, and run the user's script here, as no rank at all.
        traceback.print_exc()
        os._exit(70)
elif _probe is not None:
    _be_witnessed(_probe)
_hidden_sitecustomize()
