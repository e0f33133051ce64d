"""Memory that all ranks have mapped: sums are the same as elsewhere, and no mapping is left."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.collectives.engines import regions
from phalanx.collectives.engines.engine import CallKind, EngineCall, Op, Reduction
from phalanx.collectives.engines.regions import Region
from phalanx.contract import shared_memory
from phalanx.forkserver.signed_store import SignedStore
from tests.kit.cli import run

_native = pytest.importorskip("phalanx.collectives._native")

COUNT = regions.MIN_BYTES // 4 + 1001


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:phalanx-region")


def opened() -> int:
    names = Path("/proc/self/fd")
    return sum("memfd:phalanx-region" in os.readlink(one) for one in names.iterdir() if one.is_symlink())


def staged(rank: int, size: int) -> Any:
    """Return an engine as on a kernel that does not let ranks read each other's memory."""
    from phalanx.collectives.engines import segment
    from phalanx.collectives.engines.shm import ShmEngine

    store = dist.PrefixStore("staged", dist.distributed_c10d._get_default_store())
    fd, pids = segment.create(SignedStore(store, ""), rank, range(size), 60)
    try:
        return ShmEngine(fd, rank, pids, range(size), 60, direct=False)
    finally:
        os.close(fd)


def shown(engine: Any, count: int) -> torch.Tensor:
    region = Region.create(count * 4)
    assert regions.share(engine, [region], 60)
    return torch.frombuffer(region, dtype=torch.float32)


def summed(engine: Any, tensor: torch.Tensor, reduction: Reduction, *, started: bool = False) -> torch.Tensor:
    call = EngineCall(CallKind.ALL_REDUCE, outs=[tensor], reduction=reduction, timeout=60)
    if started:
        engine.start(call).wait()
    else:
        engine.run(call)
    return tensor


def reduced() -> tuple[int, int, int]:
    """Return the number of mappings before, between and after the calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before, world = mapped(), dist.group.WORLD._engine
    for engine in (world, staged(rank, size)):
        own = shown(engine, 2 * COUNT)
        other = shown(engine, COUNT)
        chance = torch.Generator().manual_seed(rank)
        for how in (Reduction(), Reduction(average=True), Reduction(Op.MAX), Reduction(scale=0.3)):
            data = torch.randn(COUNT, generator=chance)
            expected = summed(engine, data.clone(), how)
            # At another offset on every rank; on one rank outside the region; in another region. Then another type.
            for there in (own[rank : rank + COUNT], own[:COUNT] if rank else data.clone(), other):
                there.copy_(data)
                assert torch.equal(summed(engine, there, how, started=there is other), expected)
        halves = data.to(torch.bfloat16).repeat(2)
        there = own.view(torch.bfloat16)[3 : 3 + len(halves)]
        there.copy_(halves)
        assert torch.equal(summed(engine, there, how), summed(engine, halves, how))
        between = mapped()
        assert opened() == 2  # its own two, which mmap.mmap keeps open
        del own, other, there, expected
        summed(engine, data, how, started=True)  # the next started call releases the last one
        # different sizes: no region is shared
        assert not regions.share(engine, [Region.create(regions.MIN_BYTES + rank * 4096)], 60)
        assert mapped() == before
        engine.run(EngineCall(CallKind.BARRIER, timeout=60))
    return before, between, mapped()


def test_memory_that_can_shrink_is_not_mapped() -> None:
    size = os.sysconf("SC_PAGE_SIZE")
    region = Region.create(size)
    fd = shared_memory.create_unsealed("phalanx-region")
    os.ftruncate(fd, size)
    with pytest.raises(OSError, match="its size can change"):
        regions._open(os.getpid(), fd, size, 0, of=region)
    shared_memory.seal(fd)
    assert len(regions._open(os.getpid(), fd, size, 0, of=region)) == size
    os.close(fd)


def test_sums_are_the_same_wherever_they_lie() -> None:
    assert phalanx.spawn(reduced, 3, fresh=False) == [(0, 6, 0)] * 3


def trained() -> tuple[bool, int, int]:
    """Return whether run.wrap and plain DDP give the same parameters, and the mappings during and after."""
    run = phalanx.Run(phalanx.init())
    models = []
    for way in ("wrap", "ddp"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 4500), nn.ReLU(), nn.Linear(4500, 64))
        net: Any = run.wrap(model) if way == "wrap" else nn.parallel.DistributedDataParallel(model)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        assert pickle.loads(pickle.dumps(net))
        for step in range(4):
            torch.manual_seed(100 * step + run.rank)
            net(torch.randn(4, 64)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        models.append([one.detach().clone() for one in model.parameters()])
        if way == "wrap":
            there = mapped()
            net.close()
            del net, model, opt
    return all(map(torch.equal, *models)), there, mapped()


def test_gradients_of_a_wrapped_model_lie_in_it() -> None:
    (equal, there, after), other = phalanx.spawn(trained, 2, fresh=False)
    assert equal
    assert there in (2, 4)  # one per bucket that DDP makes, for each rank
    assert after == 0
    assert other == (equal, there, after)


@pytest.mark.extended
def test_no_rank_reads_what_another_still_writes(tmp_path: Path) -> None:
    native, program = Path(regions.__file__).parents[1] / "native", tmp_path / "ranks"
    sources = [Path(__file__).parent / "native" / "regions_test.c", *native.glob("*.c")]
    words = ["cc", "-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{native}"]
    words += ["-Wl,--wrap=mmap,--wrap=munmap", *(str(one) for one in sources if one.name != "binding.c")]
    if shutil.which("cc") is None or not sources[1:]:
        pytest.skip("no compiler")
    built = run((*words, "-o", str(program)), timeout=300)
    if built.code and "tsan" in built.err:
        pytest.skip("no sanitizer of threads")
    assert built.code == 0, built.err
    ended = run((str(program),), timeout=300)
    assert (ended.code, ended.out) == (0, "right\n"), ended.err
