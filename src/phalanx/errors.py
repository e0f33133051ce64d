"""The exceptions of phalanx. Those of collectives are torch's DistBackendError: see collectives/errors.py.

    PhalanxError
    ├── UsageError
    │   ├── OptionError
    │   ├── ScriptError
    │   ├── DeviceError
    │   ├── PortError
    │   └── TokenError
    ├── LaunchError
    │   ├── JoinError
    │   └── RankError
    ├── CheckpointError
    └── NonFiniteError

A message has the same three parts everywhere: what was seen, details (one per line), and what to type.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence


class PhalanxError(Exception):
    """Base class of every exception of phalanx: `except phalanx.PhalanxError as error`.

    - `what`: what happened, in one line
    - `details`: more lines about it
    - `fix`: what to type. Empty: no fix is known
    - `exit_code`: the exit code of a process that ends with this exception
    """

    exit_code = 1

    def __init__(self, what: str, *, details: Sequence[str] = (), fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.details = tuple(details)
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what, *(f"  {line}" for line in self.details)]
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class UsageError(PhalanxError):
    """The command or call is not valid: exit code 2, no traceback."""

    exit_code = 2


class OptionError(UsageError):
    """An option or its value is wrong."""


class ScriptError(UsageError):
    """The script or module does not exist, or cannot be run."""


class DeviceError(UsageError):
    """Requested devices or slots do not exist."""


class PortError(UsageError):
    """An address or port cannot be used."""


class TokenError(UsageError):
    """The secret that lets nodes join is missing, or unsafe."""


class LaunchError(PhalanxError):
    """The request is valid, but the run could not be started, or has failed: exit code 1."""


class JoinError(LaunchError):
    """The nodes, or the ranks of a group, did not join.

    - `by_host`: the error of each host, if it concerns single hosts
    """

    def __init__(
        self,
        what: str,
        *,
        details: tuple[str, ...] | list[str] = (),
        fix: str = "",
        by_host: Mapping[str, JoinError] | None = None,
    ) -> None:
        super().__init__(what, details=details, fix=fix)
        self.by_host = dict(by_host or {})


class RankError(LaunchError):
    """`phalanx.spawn`: the function failed on a rank, or the rank was killed.

    - `rank`: the rank that failed
    - `traceback`: its whole traceback, as text
    - `exception`: the exception itself, if it could be sent. Default: `None`
    """

    def __init__(
        self, what: str, *, rank: int, traceback: str = "", details: Sequence[str] = (), fix: str = ""
    ) -> None:
        super().__init__(what, details=details, fix=fix)
        self.rank = rank
        self.traceback = traceback
        self.exception: BaseException | None = None


class CheckpointError(PhalanxError):
    """A checkpoint could not be written, is damaged, or does not match the objects."""


class NonFiniteError(PhalanxError):
    """The loss or the gradients are not finite, and `--on-nan` stops the run: exit code 65."""

    exit_code = os.EX_DATAERR
