"""Run by hand on a machine with an NVIDIA GPU: python tests/cluster/gpu_probe.py

Prints the survey, then compares phalanx's results with those of the driver (libcuda) and torch in processes with the
same environment: which devices CUDA_VISIBLE_DEVICES selects, and which cores --numa-binding gives. Also checks that a
process can still fork workers that use CUDA after a survey. Exits with 1 on any difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from phalanx.cluster.affinity import MODES, bind, read
from phalanx.cluster.inventory import Inventory, apply_mask
from phalanx.cluster.nvidia import survey
from phalanx.cluster.slots import choose

ENVIRON = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}

CUDA = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
count, names = ctypes.c_int(0), []
if cuda.cuInit(0) == 0:
    cuda.cuDeviceGetCount(ctypes.byref(count))
for number in range(count.value):
    raw = (ctypes.c_ubyte * 16)()
    cuda.cuDeviceGetUuid_v2(raw, number)
    h = bytes(raw).hex()
    names.append("-".join((h[:8], h[8:12], h[12:16], h[16:20], h[20:])))
print(json.dumps(names))
"""

TORCH = """
import json, torch
count = torch.cuda.device_count()
print(json.dumps([str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]))
"""

TORCH_CORES = """
import json, sys, torch
from torch.numa.binding import AffinityMode, NumaOptions, _get_logical_cpus_to_bind_to as cores
options = NumaOptions(affinity_mode=AffinityMode(sys.argv[1]))
count = torch.cuda.device_count()
print(json.dumps([sorted(cores(gpu_index=i, numa_options=options)) for i in range(count)]))
"""


def ask(program: str, mask: str | None, *arguments: str) -> object:
    environ = ENVIRON if mask is None else {**ENVIRON, "CUDA_VISIBLE_DEVICES": mask}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def masks(inventory: Inventory) -> list[str | None]:
    uuid = inventory.driver[0].uuid
    short = uuid[:10]
    odd = ["0,", ",0", " 0", "0 ", " 0 , 0", " 0 , 9", "+0", "-0", "00", "0x0", "0gpu", "gpu0", "0;1", "0 1"]
    mixed = [f"0,{uuid}", f"{uuid},0", "MIG-0", f"MIG-{uuid}/0/0", f"{uuid},MIG-0", "NoDevFiles", "none"]
    twice = ["0,0", f"{uuid},{uuid}", f"{uuid},{short}", "0,99,0", "0,-1,0", f"{uuid},GPU-0,{uuid}"]
    names = ["GPU-", uuid[:5], short, short + "zz", short + " ", short + "-", uuid.lower(), uuid.upper()]
    names += [f" {uuid}", f"{uuid} ", uuid + "0", uuid + "zz", uuid[4:], "GPU-" + uuid[4:].replace("-", "")]
    names += [f"GPU-{uuid[4]}-{uuid[5:10]}", f"{short}zz,{uuid}"]
    several = ["1", "1,0", "0,1", "0,1,0"] if len(inventory.driver) > 1 else []
    plain = ["", "-1", "0", uuid, "99", "0,99", "99,0", "-1,0", "0,-1", "4294967296", "-4294967296"]
    return [None, *plain, *twice, *odd, *mixed, *names, *several]


def forked_cuda_works() -> bool:
    """Return whether a child that is forked from this process after the survey can use CUDA."""
    child = os.fork()
    if child == 0:
        import torch

        os._exit(0 if torch.ones(2, device="cuda").sum().item() == 2 else 1)
    return os.waitpid(child, 0)[1] == 0


def main() -> int:
    wrong: list[str] = []

    def compare(about: str, ours: object, theirs: object) -> None:
        print(f"{'same' if ours == theirs else 'DIFFERENT':<10} {about}: {ours}")
        if ours != theirs:
            wrong.append(f"{about}: phalanx {ours}, not {theirs}")

    start = time.perf_counter()
    inventory = survey(ENVIRON)
    print(f"survey, {1000 * (time.perf_counter() - start):.0f} ms: {inventory}")
    if not inventory.visible:
        print(f"no device to compare: {inventory.trouble or 'none found'}")
        return 1
    compare("trouble", inventory.trouble, "")
    compare("silent GPUs", inventory.silent, ())
    held = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    compare("device files left open", [path for path in held if "nvidia" in path], [])
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "nvidia" in line}
    print("mapped:", *sorted(mapped))
    compare("device files left mapped", [path for path in mapped if path.startswith("/dev")], [])
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    print("threads:", *threads)
    compare("CUDA works in a forked child", forked_cuda_works(), True)

    for device in inventory.visible:
        compare(f"alone with handle {device.handle}", [device.uuid[4:]], ask(CUDA, device.handle))
    for mask in masks(inventory):
        found = [device.uuid[4:] for device in apply_mask(inventory.driver, mask)]
        compare(f"CUDA, mask {mask!r}", found, ask(CUDA, mask))
    uuid = inventory.driver[0].uuid
    for mask in (None, "", "-1", "0", uuid, uuid[:10], "0,99", "99,0", "0,0"):
        found = [device.uuid[4:] for device in apply_mask(inventory.driver, mask)]
        compare(f"torch, mask {mask!r}", found, ask(TORCH, mask))
    slots = choose(inventory, asked=None, devices=None)
    for mode in MODES:
        cores = [list(slot.cores) for slot in bind(slots, mode, read())]
        compare(f"cores, {mode}", cores, ask(TORCH_CORES, None, mode))

    print(*(wrong or ["all the same"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
