"""Measure communication in ranks that a launcher starts, such as phalanx run, torchrun, srun or mpirun.

    phalanx run -g 4 benchmarks/scripts/comm.py --backends shm,gloo

`phalanx bench comm` starts its own ranks.
"""

import os
import sys

# Ranks run this file by its path, so the folder that has the package `benchmarks` is not on sys.path.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from benchmarks.comm.ranks.worker import run

if __name__ == "__main__":
    sys.exit(run())
