"""sys.exit without a code, with buffered output of both streams."""

import sys

sys.stdout.write("no newline at the end of stdout")
sys.stderr.write("nor of stderr")
sys.exit()
