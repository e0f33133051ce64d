"""A real Slurm cluster on the nodes of a lab: no systemd, no cgroups, no database."""

from __future__ import annotations

import os

from tests.kit.lab.lab import Lab
from tests.kit.lab.node import Node
from tests.kit.lab.service import Services
from tests.kit.proc import until

CONFIG = """\
ClusterName=lab
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPort=6817
SlurmdPort=6818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
# more cores than the machine really has
SlurmdParameters=config_overrides
SlurmdTimeout=300
InactiveLimit=0
KillWait=5
MinJobAge=300
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""

NODE = (
    "NodeName={node.name} NodeAddr={node.address} CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} "
    "ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN"
)

MUNGED, SLURMCTLD, SLURMD = "/usr/sbin/munged", "/usr/sbin/slurmctld", "/usr/sbin/slurmd"


class Slurm(Services):
    """
    slurm = lab.slurm()
    lab[0].run(words=("srun", "-N2", "-n3", "hostname"), env=slurm.env)
    """

    def __init__(self, lab: Lab, cpus: int = 4) -> None:
        super().__init__(lab, "slurm")
        self.config = f"{self.folder}/slurm.conf"
        for place in ("state", *(f"spool.{node.name}" for node in lab)):
            os.mkdir(f"{self.folder}/{place}")
        nodes = "\n".join(NODE.format(node=node, cpus=cpus) for node in lab)
        self._write("slurm.conf", CONFIG.format(first=lab[0], folder=self.folder, nodes=nodes))
        # slurmd detects the cgroup version unless one is configured, although it uses none.
        self._write("cgroup.conf", "CgroupPlugin=cgroup/v1\n")
        with open(os.open(f"{self.folder}/munge.key", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(os.urandom(128))
        self.start()

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": self.config}

    def wanted(self) -> list[tuple[Node, tuple[str, ...]]]:
        # One munged for all nodes: its socket is a file, and they share the disk.
        places = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        places |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        first = self.lab[0]
        munged = (MUNGED, "-F", "--force", *(f"--{name}={self.folder}/{file}" for name, file in places.items()))
        slurmds = [(node, (SLURMD, "-D", "-f", self.config)) for node in self.lab]
        return [(first, munged), (first, (SLURMCTLD, "-D", "-f", self.config)), *slurmds]

    def wait_until_up(self) -> None:
        words = ("sinfo", "-h", "-t", "idle", "-o", "%D")

        def idle() -> bool:
            return self.lab[0].run(words=words, env=self.env).out.strip() == str(len(self.lab))

        try:
            until(idle, 30, "all nodes of slurm to be idle")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def jobs(self) -> list[str]:
        """Return id, state and name of each remaining job. Empty if the controller is dead."""
        if not self.runs(self.lab[0], SLURMCTLD):
            return []
        return self.lab[0].run(words=("squeue", "-h", "-o", "%i %T %j"), env=self.env).out.splitlines()

    def cancel(self) -> None:
        """End every job at once."""
        if jobs := self.jobs():
            ids = [job.split()[0] for job in jobs]
            # Kill the processes first, to skip slurm's grace period.
            self.lab[0].run(words=("scancel", "--signal=KILL", "--full", *ids), env=self.env)
            self.lab[0].run(words=("scancel", *ids), env=self.env)
            until(lambda: not self.jobs(), 30, "slurm to have no job")

    def stop(self) -> None:
        super().stop()
        for node in self.lab:
            until(lambda node=node: not _steps(node), 10, f"the steps on {node.name} to end")  # type: ignore[misc]

    def _write(self, name: str, text: str) -> None:
        with open(f"{self.folder}/{name}", "w") as file:
            file.write(text)


def _steps(node: Node) -> list[str]:
    return [command for _, command in node.processes() if command.startswith("slurmstepd")]
