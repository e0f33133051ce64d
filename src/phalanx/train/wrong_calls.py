"""Errors of Python that the training API explains: calls that do not match its signatures, and variables of a loop
that had no batch left.

Python's own message counts `self`, and names classes that a script does not see.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from phalanx.errors import UsageError
from phalanx.train.data.loader import Loader
from phalanx.train.model.wrapped import Wrapped
from phalanx.train.run import Run
from phalanx.worker import error_file
from phalanx.worker.process_group.group import WorkerProcessGroup

Given = TypeVar("Given")
Result = TypeVar("Result")
_CALL = re.compile(r"(?P<owner>\w+)\.(?P<name>[a-z]\w*)\(\) (?P<problem>.+)")
_TOO_MANY = re.compile(r"takes (?:from \d+ to )?(\d+) positional arguments? but (\d+)")
_NOT_KNOWN = re.compile(r"got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.+)")
_TWICE = re.compile(r"got multiple values for argument '(\w+)'")
_UNSET = re.compile(r"variable '(\w+)'")
_NUMBERS = ("no argument", "one argument", "two arguments")
# Names of other libraries -> those of phalanx. Names that only look different are found without it.
_OTHER_NAMES = {
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation_steps", "grad_accum"), "accumulate"),
    **dict.fromkeys(("strategy", "mode"), "how"),
    **dict.fromkeys(("amp", "dtype"), "precision"),
    **dict.fromkeys(("dir", "dirpath", "directory", "path", "save_dir"), "folder"),
    **dict.fromkeys(("interval", "every_n_steps", "save_every", "save_steps"), "every"),
    **dict.fromkeys(("max_to_keep", "save_total_limit", "save_top_k"), "keep_last"),
    "monitor": "metric",
    "max_norm": "clip",
}
_NUMBER_OF_RANKS = ("devices", "gpus", "n", "nproc", "nproc_per_node", "nprocs", "num_processes", "ranks", "workers")
_FIXES = {
    "save": 'run.save(), or run.save(accuracy=accuracy); its folder is that of run.checkpoints("FOLDER")',
    "print": 'run.print("text")',
}


def call(train: Callable[[Given], Result], run: Given) -> Result:
    """Return `train(run)`. A wrong call of phalanx in it raises UsageError, at the line of the script; so does a
    variable of a loop over batches that is not set, because the run has resumed after the last batch of an epoch.
    """
    try:
        return train(run)
    except UnboundLocalError as error:
        unset = _UNSET.search(str(error))
        if unset is None or not isinstance(run, Run) or not run._reader.found_nothing:
            raise
        name = unset[1]
        raise UsageError(
            f"{name} is not set: training has resumed at the end of an epoch, and its loop had no batch left",
            details=["what follows the loop is done once more, because it was not complete when the state was saved"],
            fix=f"{name} = None before the loop, or an `if` around what needs it",
        ).with_traceback(error.__traceback__) from None
    except TypeError as error:
        wrong = wrong_call(error)
        if wrong is None:
            raise
        raise wrong.with_traceback(error.__traceback__) from None


def check_train(train: Callable[..., object]) -> None:
    """Raise unless `train` can be called with a run."""
    name = getattr(getattr(train, "func", train), "__name__", "train")  # a functools.partial has no name
    if inspect.iscoroutinefunction(train):
        raise UsageError(
            f"{name} is an async function, and main() does not await it",
            fix=f"phalanx.main(lambda run: asyncio.run({name}(run)))",
        )
    if inspect.isgeneratorfunction(train) or inspect.isasyncgenfunction(train):
        raise UsageError(f"{name} contains yield, so calling it runs nothing", fix=f"def {name}(run): … without yield")
    try:
        signature = inspect.signature(train, follow_wrapped=False)  # a decorator may add or remove arguments
    except (TypeError, ValueError):  # a function of an extension module has none
        return
    try:
        signature.bind(None)
    except TypeError:
        raise UsageError(
            f"main() calls {name}(run), which takes {', '.join(signature.parameters) or 'no argument'}",
            details=["run.rank and run.world_size are the rank and the number of ranks"],
            fix=f"def {name}(run: phalanx.Run): …",
        ) from None


def check_options(options: Mapping[str, object], init: Callable[..., object]) -> None:
    """Raise unless these options of `phalanx.main` are those of `phalanx.init`."""
    known = list(inspect.signature(init).parameters)
    for name in options.keys() - known:
        if name in _NUMBER_OF_RANKS:
            fix = f"phalanx run -g {options[name]} SCRIPT; in a notebook: phalanx.spawn(train, {options[name]})"
            raise UsageError(f"main() has no argument {name}: the launcher decides how many ranks there are", fix=fix)
        near = _near(name, ["log_to", *known])
        raise UsageError(
            f"main() has no argument {name}",
            details=[] if near else [f"its arguments: train, log_to, {', '.join(known)}"],
            fix=f"{near}=…" if near else "phalanx.main(train)",
        )


def wrong_call(error: TypeError) -> UsageError | None:
    """Return the error for a call of a script that does not match the signature of one of phalanx. None: it is another
    error.
    """
    found = _CALL.match(str(error))
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if found is None or trace is None or not error_file.is_script(trace.tb_frame.f_code.co_filename):
        return None
    method = _method(found["owner"], found["name"])
    return _explained(found["name"], method, found["problem"]) if method is not None else None


def _method(owner: str, name: str) -> Callable[..., Any] | None:
    """Return the method of phalanx that Python's message names, unless another class may be meant."""
    for cls in (*Run.__mro__[:-1], WorkerProcessGroup, Wrapped, Loader):
        if cls.__name__ == owner:
            method = vars(cls).get(name)
            return method if callable(method) and not _is_elsewhere(cls, name) else None
    return None


def _is_elsewhere(ours: type, name: str) -> bool:
    """Return whether another loaded class has this name and such a method, like one of the script."""
    level, seen = {object}, {object}
    while level:
        level = {cls for base in level for cls in type.__subclasses__(base)} - seen
        seen |= level
        if any(cls.__qualname__ == ours.__qualname__ and name in vars(cls) for cls in level - {ours}):
            return True
    return False


def _explained(name: str, method: Callable[..., Any], problem: str) -> UsageError | None:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    named = [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    details = [f"its arguments: {', '.join(named)}"] if named else []
    documented = re.match(r"`([^`]+)`", inspect.getdoc(method) or "")
    fix = _FIXES.get(name) or (documented[1] if documented else "")
    if many := _TOO_MANY.match(problem):
        most, given = int(many[1]) - 1, int(many[2]) - 1
        what = f"{name}() takes {_counted(most)} by position, and was given {given}"
    elif unknown := _NOT_KNOWN.match(problem):
        what = f"{name}() has no argument {unknown[1]}"
        if near := _near(unknown[1], named):
            details, fix = [], f"{near}=…"
    elif missing := _MISSING.match(problem):
        what, details = f"{name}() is called without {missing[1].replace(chr(39), '')}", []
    elif twice := _TWICE.match(problem):
        what, details = f"{name}() was given {twice[1]} twice: by position and by name", []
    else:
        return None
    return UsageError(what, details=details, fix=fix)


def _near(given: str, named: list[str]) -> str:
    """Return the argument that was probably meant."""
    meant = _OTHER_NAMES.get(given)
    if meant in named:
        return meant
    contained = [name for name in named if name in given or given in name]
    return next(iter([*difflib.get_close_matches(given, named, 1), *contained]), "")


def _counted(number: int) -> str:
    return _NUMBERS[number] if number < len(_NUMBERS) else f"{number} arguments"
