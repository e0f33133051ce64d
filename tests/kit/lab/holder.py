"""The first process of a node: creates its namespaces, sets them up, and holds them while its parent lives.

    usage: holder.py NAME FOLDER PARENT     prints the pid of the node's init as soon as the node can be entered

Two processes, because only a child is in a new pid namespace: the first one waits, the second is the node's init.
"""

from __future__ import annotations

import os
import signal
import sys

import kernel  # type: ignore[import-not-found]  # run as a script, beside it


def main(name: str, folder: str, parent: str) -> None:
    kernel.die_with_parent(int(parent))
    kernel.unshare(kernel.NEWNS | kernel.NEWUTS | kernel.NEWIPC | kernel.NEWPID | kernel.NEWNET)
    ready, tell = os.pipe()
    init = os.fork()
    if init:
        os.close(tell)
        if os.read(ready, 1):
            print(init, flush=True)
        os.waitpid(init, 0)
        os._exit(0)
    kernel.die_with_parent(0)  # the parent is in another pid namespace, so its pid is 0
    furnish(name, folder)
    os.write(tell, b"x")
    os.closerange(0, 100)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the orphans
    while True:
        signal.pause()


def furnish(name: str, folder: str) -> None:
    kernel.set_hostname(name)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    cgroups = os.open("/sys/fs/cgroup", os.O_RDONLY)
    kernel.mount("sysfs", "/sys", "sysfs")  # shows the network of the mounting process
    kernel.mount(f"/proc/self/fd/{cgroups}", "/sys/fs/cgroup", flags=kernel.MS_BIND | kernel.MS_REC)
    os.close(cgroups)
    kernel.mount("proc", "/proc", "proc")
    for place in ("/dev/shm", "/run"):
        kernel.mount("tmpfs", place, "tmpfs")
    os.mkdir("/run/sshd")
    for own in ("hosts", "hostname", "resolv.conf", "passwd"):
        kernel.mount(f"{folder}/{own}", f"/etc/{own}", flags=kernel.MS_BIND)
    # Skip the second in which an IPv6 address is tentative and cannot be used.
    for scope in ("all", "default"):
        with open(f"/proc/sys/net/ipv6/conf/{scope}/accept_dad", "w") as file:
            file.write("0")


if __name__ == "__main__":
    main(*sys.argv[1:])
