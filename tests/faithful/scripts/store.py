"""The store at the address in torchrun's environment, and stores that the script creates."""

import os
import tempfile

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
store.set(f"rank{rank}", str(rank * 10))
store.wait(["rank0", "rank1"])
print(store.get("rank0"), store.get("rank1"), store.add("count", 0))
dist.barrier()
store.add("count", rank + 1)
dist.barrier()
print(store.add("count", 0), store.check(["never"]))
if rank == 0:
    with tempfile.TemporaryDirectory() as folder:
        file_store = dist.FileStore(os.path.join(folder, "store"), 1)
        file_store.set("a", "b")
        print(file_store.get("a"), dist.HashStore().add("n", 3))
dist.barrier()
dist.destroy_process_group()
