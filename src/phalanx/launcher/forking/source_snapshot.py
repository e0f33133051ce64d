"""The text of the script and its local modules when the run began. Ranks that start later run it, too.

Local modules are found in the text of the script: its imports, and their imports, if the files are in its own folder,
or in folders of PYTHONPATH nearby. Imports that are computed at run time are not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from phalanx.launcher.command import Command

_MOST_FILES = 2000
_MOST_BYTES = 32 << 20
_IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+(?P<package>[.\w]+)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n#;]*)"
    rb"|import[ \t]+(?P<modules>[^\n#;]*))",
    re.MULTILINE,
)
_NAME = re.compile(r"[^\W\d]\w*\Z")
Stamp = tuple[int, int, int]


class SourceSnapshot:
    """The files, at the time of creation."""

    def __init__(self, command: Command, environ: Mapping[str, str], cwd: str | None = None) -> None:
        self._texts: dict[str, bytes] = {}
        self._stamps: dict[str, Stamp | None] = {}
        self._reported: set[str] = set()
        self._cwd = cwd if cwd is not None else os.getcwd()
        if command.kind in ("script", "module"):
            self._roots = local_roots(command.path0 or "", environ.get("PYTHONPATH", ""), self._cwd)
            for path in self._main(command):
                self._add(path)

    def _main(self, command: Command) -> Iterator[str]:
        if command.kind == "script":
            yield os.path.realpath(os.path.join(self._cwd, command.target))
            return
        yield from self._files([*command.target.split("."), "__main__"])

    def _add(self, first: str) -> None:
        """Add a file and all local files that it imports."""
        waiting = [first]
        size = 0
        while waiting and len(self._texts) < _MOST_FILES and size < _MOST_BYTES:
            path = waiting.pop(0)
            if path in self._texts:
                continue
            text = _read(path)
            if text is None or b"\0" in text[:1024]:  # compiled, or an archive
                continue
            self._stamps[path] = _stamp(path)
            self._texts[path] = text
            size += len(text)
            for parts in imported(text, self._package(path)):
                waiting += self._files(parts)

    def _package(self, path: str) -> list[str]:
        """Return the package of a file, for its relative imports."""
        for root in self._roots:
            if path.startswith(root + os.sep):
                return os.path.relpath(path, root).split(os.sep)[:-1]
        return []

    def _files(self, parts: Sequence[str]) -> list[str]:
        """Return the files that importing a module reads: those of its packages, and its own."""
        for root in self._roots:
            stem = root
            found: list[str] = []
            for part in parts:
                stem = os.path.join(stem, part)
                files = [file for file in (os.path.join(stem, "__init__.py"), f"{stem}.py") if os.path.isfile(file)]
                found += map(os.path.realpath, files[:1])
                if not os.path.isdir(stem):
                    break
            if found:
                return found
        return []

    @property
    def paths(self) -> list[str]:
        """The files."""
        return sorted(self._texts)

    def changed(self) -> dict[str, bytes]:
        """Return the text of files that have changed on disk, or are missing."""
        found = {}
        for path, text in self._texts.items():
            stamp = _stamp(path)
            if stamp is not None and stamp == self._stamps[path]:
                continue
            if _read(path) == text:
                self._stamps[path] = stamp
            else:
                found[path] = text
        return found

    def tell(self, changed: Mapping[str, bytes], note: Callable[[str], None]) -> None:
        """Report files that have changed, once each."""
        new = [path for path in self._texts if path in changed and path not in self._reported]
        if not new:
            return
        self._reported.update(new)
        names = ", ".join(os.path.relpath(path, self._cwd) for path in new[:3])
        more = f" and {len(new) - 3} more" if len(new) > 3 else ""
        have = "has" if len(new) == 1 else "have"
        note(
            f"{names}{more} {have} changed on the disk since the run began; ranks that start now run the version that "
            "it began with\n  fix: to run the new version, stop the run and start it again"
        )


def local_roots(path0: str, pythonpath: str, cwd: str) -> list[str]:
    """Return the folders of local modules: the script's own, and those of PYTHONPATH that contain it or are below the
    current folder. Others, such as a build of torch, are large and not edited during a run.
    """
    cwd = os.path.realpath(cwd)
    first, *others = [os.path.realpath(os.path.join(cwd, root)) for root in (path0, *pythonpath.split(os.pathsep))]
    near = [root for root in others if _is_below(first, root) or _is_below(root, cwd)]
    return list(dict.fromkeys([first, *near])) if pythonpath else [first]


def _is_below(path: str, folder: str) -> bool:
    return folder != os.sep and (path == folder or path.startswith(folder + os.sep))


def imported(text: bytes, package: Sequence[str]) -> Iterator[list[str]]:
    """Yield the modules that a file may import, as lists of names. `package`: of the file, for relative imports."""
    for match in _IMPORT.finditer(text):
        if match["modules"] is not None:
            for module in match["modules"].decode(errors="replace").split(","):
                yield from _valid(module.split()[:1], [])
            continue
        module = match["package"].decode(errors="replace")
        level = len(module) - len(module.lstrip("."))
        start = list(package[: len(package) - level + 1]) if level else []
        names = match["names"].decode(errors="replace").strip("()").split(",")
        for name in names:
            yield from _valid([module.lstrip(".")], start, name.split()[:1])


def _valid(module: list[str], start: list[str], name: Sequence[str] = ()) -> Iterator[list[str]]:
    parts = [*start, *(part for dotted in module for part in dotted.split(".") if part), *name]
    parts = parts[:-1] if parts and parts[-1] == "*" else parts
    if parts and all(_NAME.match(part) for part in parts):
        yield parts


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return None
