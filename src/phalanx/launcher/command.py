"""The command of a run: a script, standard input, a module, a path or a program, with its arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from string import Template
from typing import Literal

from phalanx.errors import ScriptError

_RUN_PATH = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class Command:
    """The command that every rank runs."""

    kind: Literal["script", "stdin", "module", "path", "program"]
    target: str
    args: tuple[str, ...]
    python: str
    local_rank_option: str = ""  # "--local-rank" or "--local_rank", for scripts of torch.distributed.launch

    def arguments(self, local_rank: int) -> list[str]:
        """Return the script's arguments, with `${local_rank}` replaced as torchrun does."""
        first = [f"{self.local_rank_option}={local_rank}"] if self.local_rank_option else []
        return first + [Template(arg).safe_substitute(local_rank=local_rank) for arg in self.args]

    def line(self, local_rank: int) -> list[str]:
        """Return the whole command of one rank, as for a new process."""
        rest = self.arguments(local_rank)
        match self.kind:
            case "script":
                return [self.python, "-u", self.target, *rest]
            case "stdin":
                return [self.python, "-u", "-", *rest]
            case "module":
                safe = ["-P"] if self._is_ours else []
                return [self.python, "-u", *safe, "-m", self.target, *rest]
            case "path":
                return [self.python, "-u", "-c", _RUN_PATH, self.target, *rest]
            case "program":
                return [self.target, *rest]

    @property
    def _is_ours(self) -> bool:
        """Return whether it is a module of phalanx, which a phalanx.py in the current folder must not replace."""
        return self.kind == "module" and self.target.startswith("phalanx.")

    @property
    def path0(self) -> str | None:
        """Return the first entry that Python puts into sys.path."""
        match self.kind:
            case "script":
                real = os.path.realpath(self.target)
                return real if os.path.isdir(real) or _is_zip(real) else os.path.dirname(real)
            case "stdin":
                return ""
            case "module":
                return None if self._is_ours else os.getcwd()
            case _:
                return None

    def check(self) -> None:
        """Check the script before anything is started. Raises ScriptError."""
        if self.kind in ("script", "path"):
            _check_script(self.target)
        elif self.kind == "program":
            _check_program(self.target)


def _is_zip(path: str) -> bool:
    if path.endswith(".py"):
        return False
    import zipfile

    return zipfile.is_zipfile(path)


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        folder = os.path.dirname(path) or "."
        raise ScriptError(
            f"no such script: {path}",
            details=[f"looked in {os.path.abspath(folder)}", *_alike(path, folder)],
            fix="phalanx run path/to/script.py, or phalanx run -m package.module for a module",
        )
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise ScriptError(
                f"{path} is a directory without a __main__.py",
                fix=f"phalanx run {os.path.join(path, 'SCRIPT.py')}, or phalanx run -m PACKAGE",
            )
    elif not os.access(path, os.R_OK):
        raise ScriptError(f"{path} cannot be read by this user", fix=f"chmod u+r {path}")


def _check_program(name: str) -> None:
    import shutil

    if shutil.which(name) is None:
        there = os.path.exists(name)
        raise ScriptError(
            f"{name} is not executable" if there else f"no such program: {name}",
            fix=f"chmod u+x {name}" if there else "--no-python needs a program on PATH, or its full path",
        )


def _alike(path: str, folder: str) -> list[str]:
    import difflib

    try:
        names = [name for name in os.listdir(folder) if name.endswith(".py")]
    except OSError:
        return [f"there is no folder {folder} either"]
    stems = {name.removesuffix(".py"): name for name in names}  # all have the same ending
    near = difflib.get_close_matches(os.path.basename(path).removesuffix(".py"), stems, n=3)
    return [f"did you mean {', '.join(stems[stem] for stem in near)}?"] if near else []
