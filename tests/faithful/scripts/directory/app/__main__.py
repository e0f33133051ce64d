"""A folder with a __main__.py."""

import os
import sys

import helper

print(sys.argv, sys.path[0], __name__, __package__, __spec__.name, __file__)
print(helper.greet(os.environ["RANK"]))
