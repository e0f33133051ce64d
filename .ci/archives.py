"""Checks what the wheel and the sdist in a folder contain: `python .ci/archives.py dist`.

Both archives must have all tracked files of src/ and no others, but the wheel has the built extension instead of its C
sources. The sdist also has the benchmarks.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
TAG = re.compile(r"cp311-abi3-linux_\w+")
SDIST_EXTRA = {  # besides src/ and benchmarks/
    *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"),
    *("constraints.txt", "pyproject.toml", "setup.cfg", "setup.py"),
}


def tracked(folder: str) -> set[str]:
    """Paths of the tracked files of a folder, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", folder],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(listed.stdout.splitlines())


def differences(what: str, found: set[str], expected: set[str]) -> list[str]:
    """Return a line for each file that is missing, and for each that does not belong there."""
    missing = [f"{what}: {path} is missing" for path in sorted(expected - found)]
    return missing + [f"{what}: {path} does not belong there" for path in sorted(found - expected)]


def wheel_problems(archive: Path) -> list[str]:
    """Return what is wrong with a wheel."""
    with zipfile.ZipFile(archive) as file:
        names = {name for name in file.namelist() if not name.endswith("/")}
        metadata = {name for name in names if PurePosixPath(name).parts[0].endswith(".dist-info")}
        tags = [
            line.removeprefix("Tag: ")
            for name in metadata
            if name.endswith("/WHEEL")
            for line in file.read(name).decode().splitlines()
            if line.startswith("Tag: ")
        ]
    problems = [f"wheel: tag {tag} is not {TAG.pattern}" for tag in tags if not TAG.fullmatch(tag)]
    if len(tags) != 1:
        problems.append(f"wheel: {len(tags)} tags, not 1")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in metadata):
        problems.append("wheel: LICENSE is missing")
    extensions = {name for name in names if name.endswith(".so")}
    if len(extensions) != 1 or not all(name.endswith(".abi3.so") for name in extensions):
        problems.append(f"wheel: has {sorted(extensions) or 'no extension'}, not one .abi3.so")
    expected = {path.removeprefix("src/") for path in tracked("src") if not path.endswith((".c", ".h"))}
    return problems + differences("wheel", names - metadata - extensions, expected)


def sdist_problems(archive: Path) -> list[str]:
    """Return what is wrong with an sdist."""
    with tarfile.open(archive) as file:
        names = {str(PurePosixPath(*PurePosixPath(one.name).parts[1:])) for one in file.getmembers() if one.isfile()}
    names = {name for name in names if ".egg-info/" not in name}
    return differences("sdist", names, SDIST_EXTRA | tracked("src") | tracked("benchmarks"))


def main(folder: Path) -> int:
    """Check the wheel and the sdist in a folder, and print what is wrong. Return the exit code."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if (len(wheels), len(sdists)) != (1, 1):
        problems = [f"{folder}: {len(wheels)} wheels and {len(sdists)} sdists, not one of each"]
    else:
        problems = wheel_problems(wheels[0]) + sdist_problems(sdists[0])
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
