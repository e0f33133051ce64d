"""Runs in an interpreter that phalanx started, after site packages were read and just before the main module.

This folder is first on PYTHONPATH. The module removes it at once, and imports the sitecustomize that it hid in every
worker.
"""

import sys

_preimported = frozenset(sys.modules)  # imported by Python itself

import importlib.util  # noqa: E402
import os  # noqa: E402
import traceback  # noqa: E402


def _remove_self() -> tuple[str | None, ...]:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    kept = os.environ.pop("PHALANX_PYTHONPATH", None)
    if kept is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = kept
    names = ("PHALANX_FORKSERVER", "PHALANX_PROBE", "PHALANX_KEPT")
    return tuple(os.environ.pop(name, None) for name in names)


def _load() -> None:
    """Load the fork server by path: this interpreter need not have phalanx installed."""
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

    shadows.preimported = _preimported


def _serve(task: str) -> None:
    """Serve as a fork server. Returns in a worker only."""
    _load()
    from _phalanx_forkserver import cold

    fd, parent = (int(number) for number in task.split(":"))
    cold.serve(fd, parent)


def _start_probe(task: str, kept_fd: str | None) -> None:
    """Start the probe of a worker that was executed. The worker also runs without one."""
    *numbers, path0 = task.split(":", 4)
    slot, *fds = map(int, numbers)
    try:
        for fd in fds:
            os.set_inheritable(fd, False)
        _load()
        from _phalanx_forkserver import log
        from _phalanx_forkserver.child import setup
        from _phalanx_forkserver.imports import shadows
        from _phalanx_forkserver.probe import probe

        board, channel, stacks = fds
        kept = probe.begin(board, slot, channel, stacks)
        if kept:
            os.close(kept[0])  # the board is mapped
        log.configure()
        shadows.unshadow(path0 or None)
        setup.record_exceptions(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        if kept_fd is not None:
            from _phalanx_forkserver.imports import kept_sources

            kept_sources.install_from(int(kept_fd))
    except Exception:  # the script runs without a probe. The fork server's `log` may not be loaded
        if os.environ.get("PHALANX_LOG"):
            traceback.print_exc()


def _hidden_sitecustomize() -> None:
    """Import the sitecustomize that this one hid."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        # The import in progress looks for this module when we return.
        if ours is not None:
            sys.modules["sitecustomize"] = ours


_fork_server, _probe, _kept = _remove_self()
if _fork_server is not None:
    try:
        _serve(_fork_server)
    except BaseException:  # also SystemExit and KeyboardInterrupt
        # Python would print the error and continue, running the user's script here without a rank.
        traceback.print_exc()
        os._exit(70)
elif _probe is not None:
    _start_probe(_probe, _kept)
_hidden_sitecustomize()
