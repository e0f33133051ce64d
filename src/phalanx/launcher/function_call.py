"""A function that `phalanx.launch` runs on every rank, and its results: files in a private folder of the caller.

    write(folder, function, args)                 the caller
    python -m phalanx.launcher.function_call DIR    each rank
    results(folder)                               the caller, when all have ended

Both sides are the same user on machines that share the folder. A folder of another user is rejected.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.messages import function_call
from phalanx.errors import LaunchError

_CALL = "call.pickle"


def write(folder: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Write a call for the ranks to `folder`. Raises UsageError if it cannot be pickled."""
    data = function_call.pack(function_call.with_run(function, args, {}), args, {})
    with open(os.path.join(folder, _CALL), "wb") as file:
        file.write(data)


_RUN = object()  # placeholder for a run, which is not a hyperparameter


def simple_arguments(function: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included, that are numbers, truth values, texts or None."""
    try:
        gets_run = isinstance(function_call.with_run(function, args, {}), function_call.WithRun)
        bound = inspect.signature(function).bind(*([_RUN] if gets_run else []), *args)
    except (TypeError, ValueError):  # a call that fails on the ranks, or a function without a signature
        return {}
    bound.apply_defaults()
    return {
        name: value for name, value in bound.arguments.items() if value is None or isinstance(value, int | float | str)
    }


def results(folder: str) -> list[Any]:
    """Return the results of all ranks, in rank order."""
    numbers = sorted(int(name.split(".")[1]) for name in os.listdir(folder) if name.startswith("result."))
    found = []
    for rank in numbers:
        with open(os.path.join(folder, f"result.{rank}"), "rb") as file:
            found.append(pickle.load(file))  # noqa: S301 - written by our own ranks, into a folder of mode 0700
    if not found or numbers != [*range(len(numbers))]:
        raise LaunchError("the run succeeded, but not every rank returned a result", fix="job.logs(rank=0)")
    return found


def main(folder: str) -> None:
    """Call the function on this rank, and write its result to the folder."""
    if os.stat(folder).st_uid != os.getuid():
        raise LaunchError(f"{folder} belongs to another user: nothing in it is executed")
    with open(os.path.join(folder, _CALL), "rb") as file:
        function, args, kwargs = function_call.unpack(file.read())
    result = pickle.dumps(function(*args, **kwargs))
    path = os.path.join(folder, f"result.{environment()['RANK']}")
    with open(f"{path}.new", "wb") as file:
        file.write(result)
    os.replace(f"{path}.new", path)


if __name__ == "__main__":
    main(sys.argv[1])
