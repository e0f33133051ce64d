"""Experiment trackers to which metrics are also sent: Weights & Biases, MLflow, or a function.

    phalanx.main(train, log_to="wandb")             # or "mlflow", or both: ["wandb", "mlflow"]
    phalanx.main(train, log_to=lambda step, values: ...)

Rank 0 sends them, about once a second. A tracker is imported when the first metric is sent. A run that `train` has
started is used (`wandb.init(project=...)`, `mlflow.start_run()`); otherwise one is started here, with the name and the
hyperparameters of the run, and ended at the end. It stays open while the group forms again after the loss of another
rank. Its ID is written beside the metrics, so that a training that is resumed continues the same run. A run that is
stopped is "killed" in Weights & Biases and KILLED in MLflow.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from phalanx.cluster.sources.surroundings import environment
from phalanx.contract.hyperparameters import Hyperparameter
from phalanx.contract.regular_file import open_regular
from phalanx.contract.variables import RUN
from phalanx.errors import CheckpointError, UsageError
from phalanx.worker import given_hyperparameters

logger = logging.getLogger(__name__)

_MLFLOW_MOST = 1000  # metrics of one request
_MLFLOW_MOST_PARAMS = 100  # hyperparameters of one request
NAME = "trackers.json"  # the IDs, by the name of the tracker
Outcome = Literal["done", "failed", "stopped"]  # stopped: by Ctrl-C, `phalanx stop` or a scheduler
_WANDB_CODES: dict[Outcome, int] = {"done": 0, "failed": 1, "stopped": 255}  # 255: as its own hook does after Ctrl-C
_MLFLOW_STATES: dict[Outcome, str] = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_started: set[str] = set()  # IDs of runs that this process has started and not ended, also in an earlier generation
_used: dict[str, Tracker] = {}  # trackers whose run is open, by name
_ended = threading.Event()  # `end_all` was called
LogTo = str | Callable[[int, Mapping[str, float]], object]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker shows of a run beside its metrics."""

    name: str = ""  # as `phalanx ps` shows it; empty: it was not started by `phalanx run`
    hyperparameters: Mapping[str, Hyperparameter] = field(default_factory=dict)


class Tracker(Protocol):
    """One tracker."""

    name: str

    def begin(self, run_id: str | None, described: TrackedRun) -> str | None:
        """Start or find its run; `run_id`: that of a training that is resumed. Return the ID."""
        ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step."""
        ...

    def flush(self) -> None:
        """Send the added values, if they were not sent at once."""
        ...

    def close(self, outcome: Outcome) -> None:
        """End the run, if it was started here."""
        ...

    def end(self, outcome: Outcome) -> None:
        """End the run, also if the script has started it. Any thread may call it."""
        ...


class WandbTracker:
    """Sends metrics to Weights & Biases."""

    name = "wandb"

    def __init__(self) -> None:
        self._wandb: Any = None
        self._run_id = ""
        self._step = 0

    def begin(self, run_id: str | None, described: TrackedRun) -> str | None:
        """Use the run that the script has started, or start one."""
        self._wandb = importlib.import_module("wandb")
        run = self._wandb.run
        if run is None:
            config = dict(described.hyperparameters)
            run = self._wandb.init(id=run_id, resume="allow", name=described.name or None, config=config)
            _started.add(str(run.id))
        self._run_id = str(run.id)
        return self._run_id

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values. Weights & Biases drops values of an earlier step: they are sent with the latest one."""
        self._step = max(self._step, step)
        self._wandb.log(dict(values), step=self._step)

    def flush(self) -> None:
        """Do nothing: a process of Weights & Biases sends the values."""

    def close(self, outcome: Outcome) -> None:
        """End the run, if it was started here."""
        if self._run_id in _started:
            self.end(outcome)

    def end(self, outcome: Outcome) -> None:
        """End the run."""
        _started.discard(self._run_id)
        self._wandb.finish(exit_code=_WANDB_CODES[outcome])


class MlflowTracker:
    """Sends metrics to MLflow."""

    name = "mlflow"

    def __init__(self) -> None:
        self._mlflow: Any = None
        self._client: Any = None
        self._run_id = ""
        self._taken: list[Any] = []  # not sent yet
        self._thread = threading.get_ident()

    def begin(self, run_id: str | None, described: TrackedRun) -> str | None:
        """Use the run that the script has started, or start one."""
        self._mlflow = importlib.import_module("mlflow")
        self._client = self._mlflow.MlflowClient()
        active = self._mlflow.active_run()
        if active is None:
            active = self._mlflow.start_run(run_id=run_id, run_name=None if run_id else described.name or None)
            _started.add(str(active.info.run_id))
            if run_id is None:  # those of a run that is resumed cannot be changed
                self._send_hyperparameters(str(active.info.run_id), described.hyperparameters)
        self._run_id = str(active.info.run_id)
        return self._run_id

    def _send_hyperparameters(self, run_id: str, given: Mapping[str, Hyperparameter]) -> None:
        param = self._mlflow.entities.Param
        sent = [param(_mlflow_name(name), str(value)) for name, value in given.items()]
        for first in range(0, len(sent), _MLFLOW_MOST_PARAMS):
            self._client.log_batch(run_id, params=sent[first : first + _MLFLOW_MOST_PARAMS])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values. A request per step would slow down the training."""
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        self._taken += [metric(_mlflow_name(name), value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        """Send the added values, in requests of the size that MLflow allows."""
        taken, self._taken = self._taken, []
        for first in range(0, len(taken), _MLFLOW_MOST):
            self._client.log_batch(self._run_id, metrics=taken[first : first + _MLFLOW_MOST])

    def close(self, outcome: Outcome) -> None:
        """End the run, if it was started here."""
        if self._run_id in _started:
            self.end(outcome)

    def end(self, outcome: Outcome) -> None:
        """End the run. MLflow knows an active run only in the thread that has started it."""
        _started.discard(self._run_id)
        if threading.get_ident() == self._thread:
            self._mlflow.end_run(_MLFLOW_STATES[outcome])
        else:
            self._client.set_terminated(self._run_id, _MLFLOW_STATES[outcome])


def _mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts: letters, digits and _-. /: only."""
    return re.sub(r"[^\w\-. /:]", "_", name)


class FunctionTracker:
    """Calls a function of the script with the step and its values."""

    def __init__(self, function: Callable[[int, Mapping[str, float]], object]) -> None:
        self.name = getattr(function, "__name__", "log_to")
        self._function = function

    def begin(self, run_id: str | None, described: TrackedRun) -> None:
        """Do nothing."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Call the function."""
        self._function(step, values)

    def flush(self) -> None:
        """Do nothing."""

    def close(self, outcome: Outcome) -> None:
        """Do nothing."""

    def end(self, outcome: Outcome) -> None:
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
        described = TrackedRun(environment().get(RUN, ""), given_hyperparameters.recorded())
        for member in members:
            known = before.get(member.name)
            if self._ran(member, lambda member=member, known=known: ids.update(_id(member, known, described))):  # type: ignore[misc]
                self._members.append(member)
                _used[member.name] = member
        if ids:
            with open(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump({**before, **ids}, file)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Pass the values of one step to all trackers."""
        self._members = [one for one in self._members if self._ran(one, lambda one=one: one.write(step, values))]  # type: ignore[misc]

    def flush(self) -> None:
        """Make all trackers send the values they have."""
        self._members = [one for one in self._members if self._ran(one, one.flush)]

    def close(self, outcome: Outcome) -> None:
        """End all of them."""
        for member in self._members:
            _used.pop(member.name, None)
            self._ran(member, lambda member=member: member.close(outcome))  # type: ignore[misc]
        self._members = []

    def _ran(self, member: Tracker, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:  # a network that is down, a package that is missing
            logger.debug("a call of %s failed", member.name, exc_info=True)
            if _ended.is_set():  # the process is about to end
                return False
            fix = f"; install it: pip install {member.name}" if isinstance(error, ModuleNotFoundError) else ""
            self._say(f"metrics are not sent to {member.name}: {type(error).__name__}: {error}{fix}")
            return False
        return True


def close_all(outcome: Outcome) -> None:
    """End the runs that this process has started and has not ended, while there is no group."""
    while _used:
        _used.popitem()[1].close(outcome)


def end_all(outcome: Outcome, timeout: float) -> None:
    """End all runs before the process is killed: the script cannot do it. Waits up to `timeout` seconds."""
    _ended.set()
    threads = [threading.Thread(target=_end, args=(one, outcome), daemon=True) for one in _used.values()]
    for thread in threads:
        thread.start()
    until = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0.0))


def _end(member: Tracker, outcome: Outcome) -> None:
    try:
        member.flush()
        member.end(outcome)
    except Exception:  # the main thread may have ended it at the same time
        logger.debug("ending the run of %s", member.name, exc_info=True)


def _id(member: Tracker, before: str | None, described: TrackedRun) -> dict[str, str]:
    found = member.begin(before, described)
    return {} if found is None else {member.name: found}


def _ids(path: str) -> dict[str, str]:
    """Return the IDs of the resumed training."""
    try:
        with open(path, opener=open_regular) as file:
            found = json.loads(file.read(10_000))
        return {name: one for name, one in found.items() if name in _KNOWN and re.fullmatch(r"[\w.-]{1,128}", one)}
    except (OSError, CheckpointError, ValueError, AttributeError, TypeError):
        return {}
