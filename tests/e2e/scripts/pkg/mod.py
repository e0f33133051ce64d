"""The report of a module: -m pkg.mod --out DIR, from the directory above the package."""

NAMES_AT_START = sorted(globals())

import sys  # noqa: E402

import report  # noqa: E402

from . import IMPORTED_AS  # noqa: E402

assert IMPORTED_AS == "pkg"

if __name__ == "__main__":
    report.write(globals(), report.EARLY | {"frames": report.frames(sys._getframe())})
