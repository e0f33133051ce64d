"""sys.exit with a text: it goes to stderr, and the code is 1."""

import sys

print("before")
sys.exit("no such dataset: imagenet")
