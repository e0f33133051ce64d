"""Run by hand on a machine with a GPU: `phalanx run -g 1 tests/launcher/gpu_probe.py`. Checks what a probe reads from
NCCL.

Prints the content of the recorder and the status slot, and fails if it is wrong.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

PROBE: Any = sys.modules["_phalanx_forkserver.probe.probe"].current
REPORT: Any = sys.modules["_phalanx_forkserver.probe.report"]
SLOT: Any = sys.modules["_phalanx_forkserver.board.status_slot"]


def read() -> Any:
    own = PROBE._sampler._slot
    return SLOT.read(own._memory, own._base // SLOT.SIZE)


def probe() -> dict[str, Any]:
    """Read from another thread, like requests of the agent; twice, because a group in motion is not read."""
    found: list[dict[str, Any]] = []
    asker = threading.Thread(target=lambda: found.append(REPORT.full()))
    asker.start()
    asker.join()
    return found[0]


def short(call: dict[str, Any]) -> dict[str, Any]:
    return {name: call[name] for name in ("group", "seq", "op", "dtypes", "shapes", "outputs", "done", "age", "peer")}


def collectives(device: torch.device) -> None:
    tensor = torch.ones(3, 4, device=device)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.all_gather_into_tensor(torch.empty(3, 4, device=device), tensor)
    dist.reduce_scatter_tensor(torch.empty(3, 4, device=device), tensor)
    dist.all_gather([torch.empty(3, 4, device=device)], tensor)
    dist.barrier()
    torch.cuda.synchronize()


def captured(device: torch.device) -> None:
    """Capture a graph while the probe is queried continuously: neither disturbs the other."""
    tensor = torch.ones(1000, device=device)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            REPORT.full()

    asker = threading.Thread(target=ask)
    asker.start()
    for _ in range(5):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                tensor = tensor * 1.0
            time.sleep(0.3)
        graph.replay()
    over.set()
    asker.join()
    torch.cuda.synchronize()


def pending(device: torch.device) -> None:
    """Keep the GPU busy for seconds before a collective, which the main thread waits for."""
    tensor = torch.ones(5, device=device)
    torch.cuda._sleep(int(6e9))
    dist.all_reduce(tensor)
    seen: list[Any] = []

    def watch() -> None:
        time.sleep(1.5)
        seen.extend([REPORT.full(), read()])

    watcher = threading.Thread(target=watch)
    watcher.start()
    torch.cuda.synchronize()
    watcher.join()
    everything, page = seen
    last = everything["calls"][-1]
    print("while it waits:", json.dumps(short(last)), page.text)
    assert (last["op"], last["done"], last["shapes"]) == ("all_reduce", False, [[5]]), last
    assert page.text["phase"] == "collective", page.text


def main() -> None:
    print("torch", torch.__version__, "nccl", torch.cuda.nccl.version())
    c10d = sys.modules["torch._C._distributed_c10d"]
    print("recorders:", sorted(name for name in dir(c10d) if name.startswith("_dump_")))
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    model = torch.nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 4, device=device)).sum().backward()
        optimizer.step()
    collectives(device)
    time.sleep(1.0)  # NCCL's watchdog polls ten times per second for completed work
    raw = json.loads(c10d._dump_nccl_trace_json(includeCollectives=True))
    print("raw:", {name: value for name, value in raw.items() if name != "entries"})
    for entry in raw["entries"]:
        print("raw:", entry)
    found = probe()
    print("groups:", found["groups"])
    for call in found["calls"]:
        print("call:", short(call), call["site"][-1:])
    ops = [call["op"] for call in found["calls"]]
    wanted = {"all_reduce", "broadcast", "all_gather", "barrier"}
    assert wanted <= set(ops), ops
    assert any(op.startswith("reduce_scatter") for op in ops), ops
    assert all(call["done"] for call in found["calls"]), found["calls"]
    assert all(call["site"] and call["site"][-1][0] == __file__ for call in found["calls"]), found["calls"]
    group = found["groups"][0]
    assert group["ranks"] == [0], group
    assert "nccl" in group["backend"], group
    assert group["enqueued"] == group["completed"] > 0, group
    page = read()
    print("page:", page)
    assert page.step == 3, page
    assert page.text["groups"][0]["completed"] == group["completed"], page
    pending(device)
    captured(device)
    dist.destroy_process_group()
    print("all right")


if __name__ == "__main__":
    main()
