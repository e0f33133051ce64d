"""A module with relative imports, run by -m."""

import sys

from . import data
from .model import SIZE

if __name__ == "__main__":
    print(sys.argv, sys.path[0], __package__, __spec__.name, __file__)
    print(data.SIZE, SIZE, sorted(name for name in sys.modules if name.startswith("pkg.")))
