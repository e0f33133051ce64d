"""A function that `phalanx.launch` runs on every rank, and its results: files in a private folder of the caller.

    write(folder, function, args)                 the caller
    python -m phalanx.launcher.function_call DIR    each rank
    results(folder)                               the caller, when all have ended

If its first argument is a run, it gets the run of its rank: `with_run`, which `phalanx.spawn` uses, too.

Both sides are the same user on machines that share the folder. A folder of another user is rejected.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.messages import function_call
from phalanx.errors import LaunchError

_CALL = "call.pickle"
_TRAINING = "phalanx.train.main"


class WithRun:
    """A function whose first argument is a `phalanx.Run`: if called without one, it gets the run of its rank."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Join the run, call the function, and close the run."""
        training: Any = importlib.import_module(_TRAINING)  # only in ranks: the launcher imports no torch
        return training.call_with_run(lambda run: self._function(run, *args, **kwargs))


def with_run(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the callable for these arguments: `function`, or `WithRun` if its first argument is a run.

    The first argument is a run if its type is `Run`, or if it has no type and is named `run`.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function without a signature
        return function
    first = next(iter(signature.parameters.values()), None)
    if first is None or not _is_run(first) or first.name in kwargs:
        return function
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError:  # all arguments are given, or the call fails in the rank
        return function
    return WithRun(function)


def _is_run(parameter: inspect.Parameter) -> bool:
    if parameter.annotation is inspect.Parameter.empty:
        return parameter.name == "run"
    return str(parameter.annotation).rpartition(".")[2].rstrip("'>") == "Run"  # a class, or its name


def write(folder: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Write a call for the ranks to `folder`. Raises UsageError if it cannot be pickled."""
    data = function_call.pack(with_run(function, args, {}), args, {})
    with open(os.path.join(folder, _CALL), "wb") as file:
        file.write(data)


_RUN = object()  # placeholder for a run, which is not a hyperparameter


def simple_arguments(function: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included, that are numbers, truth values, texts or None."""
    try:
        gets_run = isinstance(with_run(function, args, {}), WithRun)
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
