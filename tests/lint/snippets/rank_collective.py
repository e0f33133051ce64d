"""Scripts in which only some ranks call a collective, and scripts in which all ranks do.

The line that a finding names ends in `# !`. `scripts.script` adds what all have in common.
"""

from __future__ import annotations

# rule -> title -> the middle of a script
BAD: dict[str, dict[str, str]] = {
    "rank-collective": {
        "under a condition": """
            if rank == 0:
                dist.all_reduce(x)  # !
        """,
        "in the other branch only": """
            if rank == 0:
                print(x)
            else:
                dist.broadcast(x, 0)  # !
        """,
        "by the environment": """
            if os.environ.get("RANK", "0") == "0":
                dist.barrier()  # !
        """,
        "by a name": """
            first = rank == 0
            if first and x is not None:
                dist.barrier()  # !
        """,
        "by a function of the file": """
            def chosen():
                return not dist.is_initialized() or dist.get_rank() == 0

            if chosen():
                dist.barrier()  # !
        """,
        "after return": """
            def save(x):
                if rank != 0:
                    return
                torch.save(x, "x.pt")
                dist.barrier()  # !

            save(x)
        """,
        "after continue": """
            for step in range(10):
                if rank > 0:
                    continue
                dist.all_reduce(x)  # !
        """,
        "before a break": """
            for step in range(10):
                dist.all_reduce(x)  # !
                if rank == 0 and step > 5:
                    break
        """,
        "one rank stops early": """
            best = 0
            for epoch in range(10):
                dist.all_reduce(x)  # !
                if rank == 0:
                    loss = judge(net)
                    if loss > best:
                        break
        """,
        "of a part of torch's name": """
            import torch.nn as nn
            if torch.distributed.get_rank() == 0:
                torch.distributed.barrier()  # !
        """,
        "after the end of some": """
            if rank == 0:
                sys.exit()
            dist.barrier()  # !
        """,
        "one call deep": """
            def average(x):
                dist.all_reduce(x)
                return x / world_size

            if rank == 0:
                print(average(x))  # !
        """,
        "in a method": """
            class Trainer:
                def __init__(self):
                    self.rank = dist.get_rank()
                    self.first = self.rank == 0

                def agree(self):
                    dist.barrier()

                def save(self):
                    if self.first:
                        self.agree()  # !
        """,
        "in an expression": """
            rank == 0 and dist.barrier()  # !
        """,
        "a world by name": """
            if rank == 0:
                dist.barrier(group=None)  # !
        """,
        "a checkpoint of all": """
            import torch.distributed.checkpoint as dcp
            if rank == 0:
                dcp.save({"x": x}, checkpoint_id="folder")  # !
        """,
        "only for the first, by a decorator": """
            from lightning.pytorch.utilities import rank_zero_only

            @rank_zero_only
            def log(x):
                dist.all_reduce(x)  # !
        """,
        "of Accelerate": """
            from accelerate import Accelerator
            accelerator = Accelerator()
            if accelerator.is_main_process:
                print(accelerator.gather(x))  # !
        """,
        "of Fabric": """
            from lightning.fabric import Fabric
            fabric = Fabric(devices=2)
            if fabric.is_global_zero:
                fabric.save("model.ckpt", {})  # !
        """,
        "of phalanx": """
            import phalanx

            def train(run: phalanx.Run):
                if run.rank == 0:
                    run.group.barrier()  # !
                    run.save()  # !

            phalanx.main(train)
        """,
        "of a group of phalanx": """
            import phalanx

            group = phalanx.init()
            if group.is_main:
                group.gather(1)  # !
        """,
        "of a run in a group of phalanx": """
            import phalanx

            run = phalanx.Run(phalanx.init())
            ranks = run.group
            if run.group.is_main:
                ranks.sum(1)  # !
        """,
        "of a model of phalanx": """
            import phalanx

            def train(run: phalanx.Run):
                net = run.wrap(Net())
                if run.group.is_main:
                    net.export("model.pt")  # !

            phalanx.main(train)
        """,
        "the old way": """
            import argparse
            parser = argparse.ArgumentParser()
            parser.add_argument("--local_rank", type=int)
            args = parser.parse_args()
            if args.local_rank == 0:
                dist.barrier()  # !
        """,
    },
}

GOOD: dict[str, dict[str, str]] = {
    "rank-collective": {
        "on all ranks": """
            dist.all_reduce(x)
            if rank == 0:
                print(x)
        """,
        "in both branches": """
            if rank == 0:
                dist.broadcast(x, 0)
            else:
                dist.broadcast(y, 0)
        """,
        "in every branch of a chain": """
            if rank == 0:
                dist.gather(x, parts)
            elif rank > 0:
                dist.gather(x)
        """,
        "from one to another": """
            if rank == 0:
                dist.send(x, 1)
            elif rank == 1:
                dist.recv(x, 0)
        """,
        "the first goes ahead": """
            if local_rank not in (-1, 0):
                dist.barrier()
            data = load()
            if local_rank == 0:
                dist.barrier()
        """,
        "those who leave do it too": """
            def save(x):
                if rank != 0:
                    dist.barrier()
                    return
                torch.save(x, "x.pt")
                dist.barrier()

            save(x)
        """,
        "whether there are others": """
            if local_rank != -1 and rank is not None and rank >= 0:
                dist.barrier()
            if world_size > 1 and dist.is_initialized():
                dist.barrier()
        """,
        "whether this is one of the ranks": """
            if rank < world_size:
                dist.barrier()
        """,
        "in a group of some": """
            pair = dist.new_group([0, 1])
            if rank < 2:
                dist.all_reduce(x, group=pair)
                dist.barrier(pair)
                dist.broadcast(x, 0, pair)
        """,
        "ranks of a loop": """
            for rank in range(4):
                if rank == 0:
                    dist.barrier()
        """,
        "the rank of a matrix": """
            def shrink(x, rank=8):
                if rank > 4:
                    dist.all_reduce(x)
        """,
        "a device": """
            device = local_rank if torch.cuda.is_available() else "cpu"
            if device != "cpu":
                dist.all_reduce(x)
        """,
        "another loop is left": """
            for step in range(10):
                for part in range(10):
                    if rank == 0:
                        break
                dist.all_reduce(x)
        """,
        "an error": """
            if rank == 0 and x is None:
                raise ValueError("nothing")
            dist.barrier()
        """,
        "silenced": """
            if rank == 0:
                dist.barrier()  # phalanx: ignore[rank-collective]
                dist.all_reduce(
                    x,
                )  # phalanx: ignore
        """,
        "what Accelerate does for one": """
            from accelerate import Accelerator
            accelerator = Accelerator()
            if accelerator.is_main_process:
                accelerator.save(x, "x.pt")
            accelerator.wait_for_everyone()
        """,
        "the first of a node, by phalanx": """
            import phalanx

            def train(run: phalanx.Run):
                with run.group.first() as first:
                    if first:
                        load()
                if run.group.is_main:
                    print(run.steps)

            phalanx.main(train)
        """,
    },
}
