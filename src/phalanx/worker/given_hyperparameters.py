"""Passes the hyperparameters of a script to its agent, which records them: contract/run_metadata.py."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

from phalanx.contract import hyperparameters
from phalanx.contract.hyperparameters import Hyperparameter
from phalanx.contract.variables import RUN_FOLDER
from phalanx.errors import UsageError

_given: dict[str, Hyperparameter] = {}  # by this process


def recorded() -> Mapping[str, Hyperparameter]:
    """Return what this process has given."""
    return _given


def record(given: Mapping[str, Any] | None, environ: Mapping[str, str]) -> None:
    """Write them to the run folder, on rank 0 of a run of phalanx. Raises UsageError if they are not a mapping."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise UsageError(
            f"hyperparameters is a {type(given).__name__}, expected a mapping of names to values",
            fix="phalanx.main(train, hyperparameters=vars(args))",
        )
    _given.clear()
    _given.update(hyperparameters.recordable(given))
    folder = environ.get(RUN_FOLDER)
    if not folder or environ.get("RANK") != "0":
        return
    path = os.path.join(folder, hyperparameters.FILE)
    text = json.dumps(_given)
    with contextlib.suppress(OSError):  # a full disk must not end the training
        fd = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(text)
        os.replace(f"{path}.part", path)
