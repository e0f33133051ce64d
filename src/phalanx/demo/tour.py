"""The ranks of the tour: every call of torch.distributed, with the values before and after it, as JSON.

The tour shows the body of each function without its docstring and its last line.
"""

# All functions take the same three arguments. The address of a rank is in its environment.
# ruff: noqa: ARG001, TID251

import contextlib
import inspect
import json
import os
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from phalanx.demo.scenes import SCENES
from phalanx.errors import PhalanxError
from phalanx.forkserver import linux
from phalanx.launcher.spawn.spawn import spawn

_TIMEOUT = 60.0


def broadcast(t: Any, rank: int, world: int) -> Any:
    """Give every rank the tensor of rank 1."""
    dist.broadcast(t, src=1)
    return t


def scatter(t: Any, rank: int, world: int) -> Any:
    """Give each rank one number of rank 0."""
    mine = torch.empty(1, dtype=torch.long)
    dist.scatter(mine, list(t.split(1)) if rank == 0 else None, src=0)
    return mine


def gather(t: Any, rank: int, world: int) -> Any:
    """Collect the tensors of all ranks on rank 0."""
    parts = [torch.empty_like(t) for _ in range(world)] if rank == 0 else None
    dist.gather(t, parts, dst=0)
    return torch.cat(parts) if parts else t[:0]


def all_gather(t: Any, rank: int, world: int) -> Any:
    """Collect the tensors of all ranks on every rank, as a list."""
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t)
    return torch.cat(parts)


def all_gather_into_tensor(t: Any, rank: int, world: int) -> Any:
    """Collect the tensors of all ranks on every rank, in one tensor."""
    whole = t.new_empty(world * len(t))
    dist.all_gather_into_tensor(whole, t)
    return whole


def reduce(t: Any, rank: int, world: int) -> Any:
    """Add the tensors of all ranks on rank 0."""
    dist.reduce(t, dst=0)
    return t


def all_reduce(t: Any, rank: int, world: int) -> Any:
    """Add the tensors of all ranks on every rank."""
    dist.all_reduce(t)
    return t


def all_reduce_max(t: Any, rank: int, world: int) -> Any:
    """Give every rank the maximum of each number."""
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t


def all_reduce_async(t: Any, rank: int, world: int) -> Any:
    """Start an all_reduce, and wait for it."""
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    return t


def reduce_scatter(t: Any, rank: int, world: int) -> Any:
    """Add the tensors of all ranks, and give each rank one number of the sum."""
    mine = t.new_empty(1)
    dist.reduce_scatter_tensor(mine, t)
    return mine


def all_to_all(t: Any, rank: int, world: int) -> Any:
    """Send one number to each rank."""
    received = torch.empty_like(t)
    dist.all_to_all_single(received, t)
    return received


def barrier(t: Any, rank: int, world: int) -> Any:
    """Wait until all ranks have arrived; return when this rank continues."""
    time.sleep(0.03 * rank)
    t.append(time.monotonic())
    dist.barrier()
    return [time.monotonic()]


def broadcast_objects(t: Any, rank: int, world: int) -> Any:
    """Give every rank the Python objects of rank 1."""
    dist.broadcast_object_list(t, src=1)
    return t


def scatter_objects(t: Any, rank: int, world: int) -> Any:
    """Give each rank one Python object of rank 0."""
    mine = [None]
    dist.scatter_object_list(mine, t if rank == 0 else None, src=0)
    return mine


def gather_objects(t: Any, rank: int, world: int) -> Any:
    """Collect a Python object of every rank on rank 0."""
    objects = [None] * world if rank == 0 else None
    dist.gather_object(t[0], objects, dst=0)
    return objects or []


def all_gather_objects(t: Any, rank: int, world: int) -> Any:
    """Collect a Python object of every rank on every rank."""
    objects = [None] * world
    dist.all_gather_object(objects, t[0])
    return objects


def send_recv(t: Any, rank: int, world: int) -> Any:
    """Send the tensor of each even rank to the next rank."""
    if rank % 2 == 0 and rank + 1 < world:
        dist.send(t, dst=rank + 1)
    elif rank % 2 == 1:
        dist.recv(t, src=rank - 1)
    return t


def ring(t: Any, rank: int, world: int) -> Any:
    """Send the tensor of each rank to the next rank, and receive that of the previous one."""
    received = torch.empty_like(t)
    to_next = dist.P2POp(dist.isend, t, (rank + 1) % world)
    from_last = dist.P2POp(dist.irecv, received, (rank - 1) % world)
    for work in dist.batch_isend_irecv([to_next, from_last]):
        work.wait()
    return received


def groups(t: Any, rank: int, world: int) -> Any:
    """Add the tensors of the even ranks, and those of the odd ranks."""
    even = dist.new_group(list(range(0, world, 2)))  # every rank makes both,
    odd = dist.new_group(list(range(1, world, 2)))  # also the one it is not in
    dist.all_reduce(t, group=odd if rank % 2 else even)
    return t


def store(t: Any, rank: int, world: int) -> Any:
    """Publish a value of this rank in a store, and read that of the next rank."""
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(*where)
    shared.set(f"tour/{rank}", t[0])
    shared.add("tour/count", 1)
    following = shared.get(f"tour/{(rank + 1) % world}")  # waits for it
    dist.barrier()
    return [following.decode(), shared.add("tour/count", 0)]


def run_scene(name: str, held: list[Any], rank: int, world: int) -> dict[str, Any]:
    """Run one scene on one rank. Return `before`, `after`, and the `code` that ran between."""
    call: Callable[..., Any] = globals()[name]
    thing = torch.tensor(held, dtype=torch.long) if held and isinstance(held[0], int) else list(held)
    before, began = list(held), time.monotonic()
    with warnings.catch_warnings():
        # Newer versions of torch deprecate some of these names; older versions have only these.
        warnings.simplefilter("ignore", FutureWarning)
        after = call(thing, rank, world)
    if name == "barrier":  # its times: all ranks read the same clock
        before = thing
    values = after.tolist() if isinstance(after, torch.Tensor) else list(after)
    return {"name": name, "before": before, "after": values, "code": code(call), "seconds": time.monotonic() - began}


def code(call: Callable[..., Any]) -> str:
    """Return the lines that ran: the body without its docstring, and without its last line, which only returns."""
    lines = inspect.getsource(call).splitlines()[2:-1]  # without signature and docstring
    return textwrap.dedent("\n".join(lines))


def perform(names: list[str]) -> list[dict[str, Any]]:
    """Run the scenes on one rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for scene in SCENES:
        if scene.name in names:
            dist.barrier()
            held = [cell.value for cell in scene.before(rank, world) if cell is not None]
            found.append(run_scene(scene.name, held, rank, world))
    return found


def main() -> int:
    """Run `tour.py RANKS NAME…`."""
    linux.die_with_parent(os.getppid())
    ranks, names = int(sys.argv[1]), sys.argv[2:]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # only the result goes to stdout
            results = spawn(perform, ranks, (names,), backend="gloo", timeout=_TIMEOUT)
    except PhalanxError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    json.dump(results, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
