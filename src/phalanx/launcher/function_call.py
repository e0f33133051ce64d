"""A function that runs on every rank, and what it returns: through files in a private folder of the caller.

    write(folder, function, args)                 the caller
    python -m phalanx.launcher.function_call DIR    each rank
    results(folder)                               the caller, when all have ended

Both sides are the same user on machines that share the folder. A folder that belongs to somebody else is refused.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.cluster.sources.surroundings import environment
from phalanx.errors import LaunchError, UsageError

_CALL = "call.pickle"


def write(folder: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Write a call for the ranks to `folder`. Raises UsageError if it cannot be pickled."""
    from multiprocessing import spawn

    try:  # cloudpickle also takes closures, and functions of a notebook
        pickler: Any = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    preparation = spawn.get_preparation_data("phalanx")
    main = {name: preparation[name] for name in ("init_main_from_name", "init_main_from_path") if name in preparation}
    try:
        call = pickler.dumps((function, tuple(args)))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the function and its arguments cannot be sent to the ranks: {error}",
            fix="put the function into a module of its own, or: pip install cloudpickle",
        ) from error
    with open(os.path.join(folder, _CALL), "wb") as file:
        pickle.dump({"path": sys.path, "main": main if b"__main__" in call else {}, "call": call}, file)


def results(folder: str) -> list[Any]:
    """Return what each rank has returned, in the order of ranks."""
    numbers = sorted(int(name.split(".")[1]) for name in os.listdir(folder) if name.startswith("result."))
    found = []
    for rank in numbers:
        with open(os.path.join(folder, f"result.{rank}"), "rb") as file:
            found.append(pickle.load(file))  # noqa: S301 - written by our own ranks, into a folder of mode 0700
    if not found or numbers != [*range(len(numbers))]:
        raise LaunchError("the run ended well, but not every rank has left its result", fix="job.logs(rank=0)")
    return found


def main(folder: str) -> None:
    """Make the call on this rank, and leave what it returns in the folder."""
    if os.stat(folder).st_uid != os.getuid():
        raise LaunchError(f"{folder} belongs to another user: nothing in it is executed")
    with open(os.path.join(folder, _CALL), "rb") as file:
        written = pickle.load(file)  # noqa: S301 - written by the caller, into a folder of its own
    sys.path[:] = written["path"]
    if written["main"]:
        from multiprocessing import spawn

        spawn.prepare(written["main"])
    function, args = pickle.loads(written["call"])  # noqa: S301
    result = pickle.dumps(function(*args))
    path = os.path.join(folder, f"result.{environment()['RANK']}")
    with open(f"{path}.new", "wb") as file:
        file.write(result)
    os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main(sys.argv[1])
