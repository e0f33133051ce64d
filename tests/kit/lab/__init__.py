"""Several nodes on one machine: each with its own network, name, hosts file, processes and shared memory.

    with Lab(2) as lab:
        job = lab[0].start("run", "-n", "2", "-i", "0", "train.py")
        lab[1].link(False)

A test takes the fixture `lab`, and `ssh` or `slurm` where it needs them: three nodes, made once, and as new before each
test. The namespaces have no names and no way out, so that labs do not meet each other or the world; they die with their
maker.
"""

from tests.kit.lab.lab import Lab
from tests.kit.lab.mpi import mpirun
from tests.kit.lab.node import Node
from tests.kit.lab.slurm import Slurm
from tests.kit.lab.sshd import Sshd

__all__ = ["Lab", "Node", "Slurm", "Sshd", "mpirun"]
