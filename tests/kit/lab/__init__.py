"""Several nodes on one machine: each with its own network, name, hosts file, processes and shared memory.

    with Lab(2) as lab:
        job = lab[0].start("run", "-n", "2", "-i", "0", "train.py")
        lab[1].link(False)

A test uses the fixture `lab`, and `ssh` or `slurm` if needed: three nodes, created once, and reset before each test.
The namespaces have no names and no route out, so that labs are isolated from each other and the network; they end with
their creator.
"""

from tests.kit.lab.lab import Lab
from tests.kit.lab.mpi import mpirun
from tests.kit.lab.node import Node
from tests.kit.lab.slurm import Slurm
from tests.kit.lab.sshd import Sshd

__all__ = ["Lab", "Node", "Slurm", "Sshd", "mpirun"]
