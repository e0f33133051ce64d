"""Collects, writes and reads the metadata of a run: contract/run_metadata.py."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping

import msgspec

from phalanx.cluster import nvidia, software
from phalanx.contract import hyperparameters
from phalanx.contract.hyperparameters import Hyperparameter
from phalanx.contract.run_metadata import FILE, GitState, GpuInfo, Machine, RunMetadata
from phalanx.launcher.command import Command
from phalanx.launcher.runs.run_folder import RunRecord

_MOST_BYTES = 1 << 22  # of metadata.json
_INTERPRETER_TIMEOUT = 5.0  # seconds for another interpreter to say where it looks for packages
# Without the current folder, whose platform.py would be executed. `python -P` does not exist before Python 3.11.
_PATHS = (
    "import sys; del sys.path[: not getattr(sys.flags, 'safe_path', False)]; "
    "import platform; print(platform.python_version(), *sys.path, sep='\\0')"
)
_DRIVER = re.compile(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s")

_decoder: msgspec.json.Decoder[RunMetadata] = msgspec.json.Decoder(RunMetadata)
_given: msgspec.json.Decoder[dict[str, Hyperparameter]] = msgspec.json.Decoder(dict[str, Hyperparameter])


def describe(record: RunRecord, command: Command, given: Mapping[str, Hyperparameter]) -> RunMetadata:
    """Return what is known without reading anything. `given`: hyperparameters from the launcher's command line."""
    script = command.target
    if command.kind in ("script", "path"):
        script = os.path.abspath(os.path.join(record.cwd, script))
    return RunMetadata(
        run=record.id,
        name=record.name or record.id,
        started=record.started,
        command=tuple(record.command),
        script=script,
        arguments=command.args,
        cwd=record.cwd,
        hyperparameters={**hyperparameters.from_arguments(command.args), **hyperparameters.recordable(given)},
    )


def surveyed(metadata: RunMetadata, python: str, environ: Mapping[str, str]) -> RunMetadata:
    """Add versions and machine. This reads files, and takes some milliseconds."""
    notes = list(metadata.notes)
    versions, problem = _versions(python, environ)
    if problem:
        notes.append(problem)
    return msgspec.structs.replace(metadata, versions=versions, machine=_machine(environ), notes=tuple(notes))


def with_git(metadata: RunMetadata, git: GitState | None, problem: str = "") -> RunMetadata:
    """Add the state of the repository, or why it is unknown."""
    return msgspec.structs.replace(metadata, git=git, notes=(*metadata.notes, *([problem] if problem else [])))


def with_given(metadata: RunMetadata, given: Mapping[str, Hyperparameter]) -> RunMetadata:
    """Add hyperparameters that the script has passed: they replace those that were read from its arguments."""
    return msgspec.structs.replace(metadata, hyperparameters={**metadata.hyperparameters, **given})


def without_diff(metadata: RunMetadata) -> RunMetadata:
    """Return the metadata without the diff, which is long and may be confidential."""
    if metadata.git is None or not metadata.git.diff:
        return metadata
    return msgspec.structs.replace(metadata, git=msgspec.structs.replace(metadata.git, diff=""))


def write(folder: str, metadata: RunMetadata) -> None:
    """Replace metadata.json atomically. Only this user can read it."""
    part = os.path.join(folder, f"{FILE}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(metadata), indent=1) + b"\n")
    os.replace(part, os.path.join(folder, FILE))


def read(folder: str) -> RunMetadata | None:
    """Read metadata.json of a run folder. None: there is none, or it is unreadable."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _decoder.decode(_content(os.path.join(folder, FILE), _MOST_BYTES))
    return None


def given_by_script(folder: str) -> dict[str, Hyperparameter] | None:
    """Return the hyperparameters that rank 0 has written to the run folder. None: none so far, or unreadable."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        path = os.path.join(folder, hyperparameters.FILE)
        return hyperparameters.recordable(_given.decode(_content(path, hyperparameters.MOST_BYTES)))
    return None


def _content(path: str, most: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(most)


def _versions(python: str, environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the versions that the workers use, and why they are unknown, if they are."""
    own = software.versions()
    if python == sys.executable:
        return software.complete(own), ""
    try:
        asked = subprocess.run(
            [python, "-c", _PATHS],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_INTERPRETER_TIMEOUT,
            start_new_session=True,
            check=True,
        )
        version, *paths = asked.stdout.decode(errors="replace").rstrip("\n").split("\0")
    except (OSError, subprocess.SubprocessError) as error:
        return {"phalanx": own["phalanx"]}, f"the versions of {python} are not known: {type(error).__name__}"
    return software.complete({**software.versions(paths), "python": version}, paths), ""


def _machine(environ: Mapping[str, str]) -> Machine:
    system = os.uname()
    devices = nvidia.survey(environ).visible
    return Machine(
        host=system.nodename,
        system=f"{system.sysname} {system.release} {system.machine}",
        cpu=_first(r"(?m)^model name\s*:\s*(.+)$", "/proc/cpuinfo") or platform.machine(),
        cpus=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=tuple(GpuInfo(index=one.index, name=one.name, memory=one.memory) for one in devices),
        driver=_first(_DRIVER, "/proc/driver/nvidia/version"),
    )


def _first(pattern: str | re.Pattern[str], path: str) -> str:
    """Return the match of the pattern in the first bytes of a file. Empty: none."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        match = re.search(pattern, file.read(1 << 13))
        return match[1].strip() if match else ""
    return ""
