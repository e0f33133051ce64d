"""Experiment trackers to which metrics are also sent: Weights & Biases, MLflow, or a function.

    phalanx.main(train, log_to="wandb")             # or "mlflow", or both: ["wandb", "mlflow"]
    phalanx.main(train, log_to=lambda step, values: ...)

Rank 0 sends them, about once per second. A tracker is imported when the first metric is sent. If `train` has started a
run (`wandb.init(project=...)`, `mlflow.start_run()`), it is used; otherwise one is started here, and ended at the end.
Its ID is written next to the metrics, so that a resumed training continues the same run.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from phalanx.errors import UsageError

_MLFLOW_MOST = 1000  # metrics per request
NAME = "trackers.json"  # the IDs, by the name of the tracker
LogTo = str | Callable[[int, Mapping[str, float]], object]


class Tracker(Protocol):
    """One tracker."""

    name: str

    def begin(self, run_id: str | None) -> str | None:
        """Start or find its run; `run_id`: the run of a resumed training. Return the ID."""
        ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step."""
        ...

    def flush(self) -> None:
        """Send the added values, if they were not sent at once."""
        ...

    def close(self) -> None:
        """End the run, if it was started here."""
        ...


class WandbTracker:
    """Sends metrics to Weights & Biases."""

    name = "wandb"

    def __init__(self) -> None:
        self._wandb: Any = None
        self._started = False
        self._step = 0

    def begin(self, run_id: str | None) -> str | None:
        """Use the run that the script has started, or start one."""
        self._wandb = importlib.import_module("wandb")
        if self._wandb.run is None:
            self._wandb.init(id=run_id, resume="allow")
            self._started = True
        return str(self._wandb.run.id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values. Weights & Biases drops values of an earlier step: they are sent with the latest one."""
        self._step = max(self._step, step)
        self._wandb.log(dict(values), step=self._step)

    def flush(self) -> None:
        """Do nothing: a process of Weights & Biases sends the values."""

    def close(self) -> None:
        """End the run, if it was started here."""
        if self._started:
            self._wandb.finish()


class MlflowTracker:
    """Sends metrics to MLflow."""

    name = "mlflow"

    def __init__(self) -> None:
        self._mlflow: Any = None
        self._client: Any = None
        self._run_id = ""
        self._taken: list[Any] = []  # not sent yet
        self._started = False

    def begin(self, run_id: str | None) -> str | None:
        """Use the run that the script has started, or start one."""
        self._mlflow = importlib.import_module("mlflow")
        active = self._mlflow.active_run()
        if active is None:
            active = self._mlflow.start_run(run_id=run_id)
            self._started = True
        self._client, self._run_id = self._mlflow.MlflowClient(), str(active.info.run_id)
        return self._run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values. A request per step would slow down the training."""
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        self._taken += [metric(name, value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        """Send the added values, in requests of the size that MLflow allows."""
        taken, self._taken = self._taken, []
        for first in range(0, len(taken), _MLFLOW_MOST):
            self._client.log_batch(self._run_id, metrics=taken[first : first + _MLFLOW_MOST])

    def close(self) -> None:
        """End the run, if it was started here."""
        if self._started:
            self._mlflow.end_run()


class FunctionTracker:
    """Calls a function of the script with the step and its values."""

    def __init__(self, function: Callable[[int, Mapping[str, float]], object]) -> None:
        self.name = getattr(function, "__name__", "log_to")
        self._function = function

    def begin(self, run_id: str | None) -> None:
        """Do nothing."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Call the function."""
        self._function(step, values)

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


_KNOWN: dict[str, Callable[[], Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}


def trackers(log_to: LogTo | Sequence[LogTo] | None) -> list[Tracker]:
    """Return the trackers that `log_to` names."""
    if log_to is None:
        return []
    found: list[Tracker] = []
    for one in [log_to] if isinstance(log_to, str) or callable(log_to) else log_to:
        if callable(one):
            found.append(FunctionTracker(one))
        elif one in _KNOWN:
            found.append(_KNOWN[one]())
        else:
            raise UsageError(
                f"log_to={one!r} is not known",
                details=[f"expected {', '.join(_KNOWN)}, or a function of a step and its values"],
                fix='phalanx.main(train, log_to="wandb")',
            )
    return found


class TrackerGroup:
    """All trackers of a run. One that fails is reported and removed: the training continues."""

    def __init__(self, members: Sequence[Tracker], folder: str, *, resumed: bool, say: Callable[[str], None]) -> None:
        self._say = say
        self._members: list[Tracker] = []
        path = os.path.join(folder, NAME)
        before = _ids(path) if resumed else {}
        ids: dict[str, str] = {}
        for member in members:
            if self._ran(member, lambda member=member: ids.update(_id(member, before.get(member.name)))):  # type: ignore[misc]
                self._members.append(member)
        if ids:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump({**before, **ids}, file)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the values of one step to all trackers."""
        self._members = [one for one in self._members if self._ran(one, lambda one=one: one.write(step, values))]  # type: ignore[misc]

    def flush(self) -> None:
        """Make all trackers send the values they have."""
        self._members = [one for one in self._members if self._ran(one, one.flush)]

    def close(self) -> None:
        """Close all trackers."""
        for member in self._members:
            self._ran(member, member.close)
        self._members = []

    def _ran(self, member: Tracker, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:  # a network that is down, a package that is missing
            fix = f"; install it: pip install {member.name}" if isinstance(error, ModuleNotFoundError) else ""
            self._say(f"metrics are not sent to {member.name}: {type(error).__name__}: {error}{fix}")
            return False
        return True


def _id(member: Tracker, before: str | None) -> dict[str, str]:
    found = member.begin(before)
    return {} if found is None else {member.name: found}


def _ids(path: str) -> dict[str, str]:
    """Return the IDs of the resumed training."""
    try:
        with open(path) as file:
            found = json.loads(file.read(10_000))
        return {name: one for name, one in found.items() if name in _KNOWN and re.fullmatch(r"[\w.-]{1,128}", one)}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
