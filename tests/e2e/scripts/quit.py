"""quit.py RANK CODE: that rank exits with the code; the others wait forever."""

import os
import sys
import time

if os.environ["RANK"] == sys.argv[1]:
    sys.exit(int(sys.argv[2]))
time.sleep(600)
