"""A function call that is sent to ranks in another interpreter: `phalanx.launch(function)`, and fresh ranks of `spawn`.

    data = pack(function, args, kwargs)     in the caller
    function, args, kwargs = unpack(data)   in the rank

This is pickle, so it is passed only between processes of one user: through an inherited descriptor, or a file in a
private folder whose owner is checked. Never through a network.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.errors import UsageError

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]

STACK_SIGNAL = signal.SIGRTMAX - 3  # makes a rank of `spawn` write its stack; programs do not use these signals

_MAIN = ("init_main_from_name", "init_main_from_path")  # of multiprocessing's preparation data

_importing_main = False  # `unpack` is importing the caller's script


def pack(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, details: Sequence[str] = ()
) -> bytes:
    """Pickle a call, with cloudpickle if it is installed: that supports closures, and functions of a notebook.

    Raises UsageError if it cannot be pickled; `details` are added to its message.
    """
    try:
        pickler: Any = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    main: dict[str, Any] = {}
    try:
        call = pickler.dumps((function, tuple(args), dict(kwargs)))
        if b"__main__" in call:
            main = _main_module()
            if pickler is pickle and not _is_importable(main):
                raise pickle.PicklingError("it refers to __main__, which is not a file here, so no rank can import it")
    except Exception as error:  # pickling runs code of the objects, which may raise anything
        raise UsageError(
            f"the function and its arguments cannot be sent to the ranks: {error}",
            details=list(details),
            fix="put the function into a separate module, or: pip install cloudpickle",
        ) from error
    return pickle.dumps({"path": sys.path, "main": main, "call": call})


def unpack(data: bytes) -> Call:
    """Return a packed call, in a rank. Imports the caller's script if the function or an argument is defined there."""
    global _importing_main
    packed = pickle.loads(data)  # noqa: S301 - from the same user: see above
    sys.path[:] = packed["path"]
    if packed["main"]:
        from multiprocessing import spawn

        _importing_main = True
        spawn.prepare(packed["main"])
        _importing_main = False
    call: Call = pickle.loads(packed["call"])  # noqa: S301
    return call


def check_caller(name: str) -> None:
    """Raise UsageError if `name`, which starts ranks, is called by a script that a rank is importing."""
    if _importing_main:
        raise UsageError(
            f"{name} was called while a rank was importing this script",
            fix='put the call under `if __name__ == "__main__":`',
        )


def _main_module() -> dict[str, Any]:
    """Return how a rank imports the __main__ of this process, like multiprocessing."""
    from multiprocessing import spawn

    found: dict[str, Any] = spawn.get_preparation_data("phalanx")
    return {name: found[name] for name in (*_MAIN, "sys_argv") if name in found}


def _is_importable(main: Mapping[str, Any]) -> bool:
    """Return whether __main__ is a module or a file. It is not in a notebook, or if the program is read from standard
    input.
    """
    name, path = (main.get(key, "") for key in _MAIN)
    return bool(name) or os.path.isfile(path)
