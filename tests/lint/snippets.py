"""Small scripts, each with the one rule that it breaks; and twins that break none.

The line that is to be named ends in `# !`. All have what comes first in common.
"""

from __future__ import annotations

import textwrap

FIRST = """
import os, sys, io, time, random, tempfile
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""
JOINED = """
dist.init_process_group()
rank, local_rank, world_size = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
torch.cuda.set_device(local_rank)
"""
LEFT = """
dist.destroy_process_group()
"""

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
                    run.barrier()  # !

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
    "rank-group": {
        "under a condition": """
            if rank < 2:
                pair = dist.new_group([0, 1])  # !
        """,
        "after return": """
            def pairs():
                if rank % 2:
                    return None
                return dist.new_group([0, 2])  # !
        """,
    },
    "rank-forward": {
        "forward": """
            model = DDP(net)
            if rank == 0:
                print(model(x))  # !
        """,
        "a model that a function calls": """
            def judge(net, data):
                with torch.no_grad():
                    return sum(net(x) for x in data)

            model = DDP(net)
            if rank == 0:
                judge(model, data)  # !
        """,
        "backward": """
            model = DDP(net)
            loss = model(x).sum()
            if rank != 0:
                loss.backward()  # !
        """,
        "the state of a model in parts": """
            from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
            model = FSDP(net)
            if rank == 0:
                torch.save(model.state_dict(), "model.pt")  # !
        """,
    },
    "chance-collective": {
        "a random number": """
            if random.random() < 0.1:
                dist.all_reduce(x)  # !
        """,
        "a clock": """
            began = time.time()
            for step in range(100):
                elapsed = time.time() - began
                if elapsed > 60:
                    break
                dist.all_reduce(x)  # !
        """,
        "while there is time": """
            began = time.monotonic()
            model = DDP(net)
            while time.monotonic() - began < 60:
                model(x).sum().backward()  # !
        """,
        "drawn by torch, seeded apart": """
            torch.manual_seed(rank)
            if torch.rand(1).item() > 0.5:
                dist.barrier()  # !
        """,
    },
    "uneven-loop": {
        "a slice": """
            for x in data[rank::world_size]:  # !
                dist.all_reduce(x)
        """,
        "by number": """
            mine = range(rank, len(data), world_size)
            for i in mine:  # !
                dist.all_reduce(data[i])
        """,
    },
    "no-set-epoch": {
        "in epochs": """
            sampler = DistributedSampler(data)  # !
            loader = DataLoader(data, sampler=sampler)
            for epoch in range(10):
                for x in loader:
                    step(x)
        """,
    },
    "unsharded-data": {
        "shuffled alike": """
            data = Digits()
            loader = DataLoader(data, batch_size=8, shuffle=True)  # !
            model = DDP(net)
            for x in loader:
                model(x).sum().backward()
        """,
        "in a function": """
            def main():
                loader = DataLoader(Digits(), batch_size=8)  # !
                model = DDP(net)
                for x in loader:
                    model(x).sum().backward()

            main()
        """,
    },
    "save-everywhere": {
        "the state": """
            torch.save(net.state_dict(), "model.pt")  # !
        """,
        "by a function": """
            def save(path):
                torch.save(net.state_dict(), path)  # !

            save("model.pt")
        """,
        "with Accelerate": """
            from accelerate import Accelerator
            accelerator = Accelerator()
            torch.save(net.state_dict(), os.path.join(folder, "model.pt"))  # !
        """,
    },
    "input": {
        "a question": """
            name = input("which model? ")  # !
        """,
    },
    "world-batch": {
        "times the world": """
            sampler = DistributedSampler(data, shuffle=False)
            loader = DataLoader(data, batch_size=64 * world_size, sampler=sampler)  # !
        """,
        "under a name": """
            size = 64 * dist.get_world_size()
            sampler = DistributedSampler(data, shuffle=False)
            loader = DataLoader(data, batch_size=size, sampler=sampler)  # !
        """,
    },
    "file-race": {
        "a folder": """
            os.makedirs("out")  # !
        """,
        "behind a check": """
            if not os.path.exists("out"):
                os.mkdir("out")  # !
        """,
        "of pathlib": """
            Path("out").mkdir(parents=True)  # !
        """,
        "a download": """
            from torchvision import datasets
            data = datasets.MNIST("data", download=True)  # !
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
                with run.first() as first:
                    if first:
                        load()
                if run.is_main:
                    print(run.steps)

            phalanx.main(train)
        """,
    },
    "rank-group": {
        "on all ranks": """
            pair = dist.new_group([0, 1])
            if rank < 2:
                dist.all_reduce(x, group=pair)
        """,
        "among its own": """
            if rank < 2:
                pair = dist.new_group([0, 1], use_local_synchronization=True)
        """,
    },
    "rank-forward": {
        "the model itself": """
            model = DDP(net)
            if rank == 0:
                print(model.module(x))
        """,
        "before it is wrapped": """
            if rank == 0:
                print(net(x))
            net = DDP(net)
        """,
        "unwrapped": """
            def show(model):
                model = model.module
                if rank == 0:
                    print(model(x))

            show(DDP(net))
        """,
        "another's": """
            model = DDP(net)
            if rank == 0:
                teacher(x).sum().backward()
        """,
        "of another class": """
            class Trainer:
                def __init__(self):
                    self.model = DDP(net)

            class Judge:
                def __call__(self, x):
                    if rank == 0:
                        return self.model(x)
        """,
    },
    "chance-collective": {
        "seeded alike": """
            random.seed(0)
            if random.random() < 0.1:
                dist.all_reduce(x)
        """,
        "decided by one": """
            stop = torch.tensor(time.time() - began > 60)
            dist.broadcast(stop, 0)
            if stop:
                dist.barrier()
        """,
        "replaced by what one decided": """
            for step in range(100):
                stop = time.time() - began > 60
                told = [stop]
                dist.broadcast_object_list(told, 0)
                stop = told[0]
                if stop:
                    break
        """,
        "only measured": """
            began = time.time()
            dist.all_reduce(x)
            if time.time() - began > 1:
                print("slow")
        """,
    },
    "uneven-loop": {
        "cut to fit": """
            for x in data[: len(data) // world_size * world_size][rank::world_size]:
                dist.all_reduce(x)
        """,
        "no collective in it": """
            for x in data[rank::world_size]:
                print(x)
            dist.barrier()
        """,
        "joined": """
            from torch.distributed.algorithms.join import Join
            model = DDP(net)
            with Join([model]):
                for x in data[rank::world_size]:
                    model(x).sum().backward()
        """,
    },
    "no-set-epoch": {
        "set": """
            sampler = DistributedSampler(data)
            for epoch in range(10):
                sampler.set_epoch(epoch)
        """,
        "one epoch": """
            sampler = DistributedSampler(data)
            for x in DataLoader(data, sampler=sampler):
                step(x)
        """,
        "in order": """
            sampler = DistributedSampler(data, shuffle=False)
            test_sampler = DistributedSampler(tests)
            for epoch in range(10):
                run(sampler)
        """,
    },
    "unsharded-data": {
        "a sampler": """
            loader = DataLoader(data, sampler=DistributedSampler(data, shuffle=False))
            for x in loader:
                DDP(net)(x).sum().backward()
        """,
        "tests": """
            test_loader = DataLoader(Digits(train=False))
            mine = Digits().shard(world_size, rank)
            for x in mine:
                DDP(net)(x).sum().backward()
        """,
        "a part": """
            data = torch.utils.data.Subset(Digits(), range(rank, 1000, world_size))
            loader = DataLoader(data)
            DDP(net)(x).sum().backward()
        """,
        "its own random data": """
            torch.manual_seed(rank)
            loader = DataLoader(Digits(), shuffle=True)
            DDP(net)(x).sum().backward()
        """,
        "one that goes on for ever": """
            class Text(torch.utils.data.IterableDataset):
                def __iter__(self):
                    return iter(())

            loader = DataLoader(Text())
            DDP(net)(x).sum().backward()
        """,
        "prepared": """
            from accelerate import Accelerator
            accelerator = Accelerator()
            loader = accelerator.prepare(DataLoader(Digits(), shuffle=True))
            accelerator.backward(loss)
        """,
    },
    "save-everywhere": {
        "by the first": """
            if rank == 0:
                torch.save(net.state_dict(), "model.pt")
        """,
        "a function that the first calls": """
            def save(path):
                torch.save(net.state_dict(), path)

            if rank == 0:
                save("model.pt")
        """,
        "a file a rank": """
            torch.save(x, f"part{rank}.pt")
            path = os.path.join("out", str(dist.get_rank()))
            torch.save(x, path)
        """,
        "no file": """
            buffer = io.BytesIO()
            torch.save(x, buffer)
            with tempfile.TemporaryDirectory() as folder:
                torch.save(x, folder + "/x.pt")
        """,
        "a function that nobody calls here": """
            def save(path):
                torch.save(net.state_dict(), path)
        """,
        "a checkpoint of all": """
            import torch.distributed.checkpoint as dcp
            dcp.save({"x": x}, checkpoint_id="folder")
        """,
    },
    "first-gpu": {
        "chosen": """
            x = x.cuda()
            y = y.to("cuda")
        """,
        "of the local rank": """
            x = x.to(torch.device("cuda", local_rank))
            y = y.to(f"cuda:{local_rank}")
            z = z.cuda(local_rank)
        """,
    },
    "input": {
        "of the first": """
            if rank == 0:
                name = input("which model? ")
        """,
    },
    "world-batch": {
        "divided": """
            loader = DataLoader(data, batch_size=64 // world_size, sampler=DistributedSampler(data, shuffle=False))
        """,
        "with its rate": """
            loader = DataLoader(data, batch_size=64 * world_size, sampler=DistributedSampler(data, shuffle=False))
            opt = torch.optim.SGD(net.parameters(), lr=0.1 * world_size)
        """,
    },
    "file-race": {
        "may exist": """
            os.makedirs("out", exist_ok=True)
            Path("out").mkdir(parents=True, exist_ok=True)
        """,
        "a folder a rank": """
            os.makedirs(f"out/{rank}")
        """,
        "by the first": """
            if rank == 0:
                os.makedirs("out")
            dist.barrier()
        """,
        "caught": """
            try:
                os.mkdir("out")
            except FileExistsError:
                pass
        """,
    },
    "fixed-address": {
        "where none is given": """
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            if "RANK" not in os.environ:
                os.environ["RANK"] = "0"
        """,
        "from elsewhere": """
            os.environ["MASTER_ADDR"] = sys.argv[1]
            os.environ.update({"MASTER_PORT": sys.argv[2]}, OMP_NUM_THREADS="1")
        """,
    },
    "nested-spawn": {
        "of helpers": """
            import torch.multiprocessing as mp
            data = mp.Pool(4).map(str, range(10))
        """,
    },
}

# Whole scripts, for what belongs to the beginning and the end.
BAD_WHOLE: dict[str, dict[str, str]] = {
    "no-destroy": {
        "never left": """
            dist.init_process_group("gloo")  # !
            dist.barrier()
        """,
    },
    "first-gpu": {
        "moved": """
            dist.init_process_group()
            model = net.cuda()  # !
            x = x.to("cuda")
            dist.destroy_process_group()
        """,
        "if there is one": """
            def main():
                dist.init_process_group()
                device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # !
                dist.destroy_process_group()

            if __name__ == "__main__":
                main()
        """,
        "by its number": """
            dist.init_process_group()
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            state = torch.load("model.pt", map_location="cuda:0")  # !
            dist.destroy_process_group()
        """,
    },
    "fixed-address": {
        "by the environment": """
            os.environ["MASTER_ADDR"] = "10.0.0.1"  # !
            os.environ["MASTER_PORT"] = "29500"
            dist.init_process_group()
            dist.destroy_process_group()
        """,
        "by arguments": """
            dist.init_process_group("gloo", init_method="tcp://10.0.0.1:29500", rank=0, world_size=2)  # !
            dist.destroy_process_group()
        """,
        "in a function, by a name": """
            PORT = 29500

            def setup():
                os.environ["MASTER_PORT"] = str(PORT)  # !
                dist.init_process_group()

            setup()
            dist.destroy_process_group()
        """,
        "several at once": """
            os.environ.update({"MASTER_ADDR": "localhost"}, MASTER_PORT="12355")  # !
            dist.init_process_group()
            dist.destroy_process_group()
        """,
    },
    "nested-spawn": {
        "the tutorial's": """
            import torch.multiprocessing as mp

            def setup(rank, world_size):
                os.environ["MASTER_ADDR"] = "localhost"
                os.environ["MASTER_PORT"] = "12355"
                dist.init_process_group("gloo", rank=rank, world_size=world_size)

            def demo(rank, world_size):
                setup(rank, world_size)
                dist.destroy_process_group()

            def run_demo(fn, world_size):
                mp.spawn(fn, args=(world_size,), nprocs=world_size, join=True)  # !

            if __name__ == "__main__":
                run_demo(demo, 2)
        """,
        "in main": """
            from torch.multiprocessing import spawn

            def work(rank):
                dist.init_process_group("gloo", rank=rank, world_size=2)
                dist.destroy_process_group()

            def main():
                spawn(work, nprocs=2)  # !

            main()
        """,
    },
    "rank-collective": {
        "the first argument of what is spawned": """
            import torch.multiprocessing as mp

            def work(number, size):
                dist.init_process_group("gloo", rank=number, world_size=size)
                if number == 0:
                    dist.barrier()  # !
                dist.destroy_process_group()

            mp.spawn(work, (2,), 2)  # phalanx: ignore[nested-spawn]
        """,
        "a trainer's file": """
            from lightning import Trainer
            trainer = Trainer(devices=2)
            if trainer.is_global_zero:
                trainer.save_checkpoint("x.ckpt")  # !
        """,
    },
}

GOOD_WHOLE: dict[str, str] = {
    "ranks that it starts only without a launcher": """
        import torch.multiprocessing as mp

        def work(rank):
            dist.init_process_group("gloo", rank=rank, world_size=2)
            dist.destroy_process_group()

        if "RANK" in os.environ:
            work(int(os.environ["RANK"]))
        else:
            mp.spawn(work, nprocs=2)

        def main(launched):
            if launched:
                return work(0)
            mp.spawn(work, nprocs=2)
    """,
    "no ranks at all": """
        import torch
        rank = 0
        if rank == 0:
            x = torch.zeros(1).cuda()
            torch.save(x, "x.pt")
        os.makedirs("out")
        name = input()
        loader = torch.utils.data.DataLoader(data, shuffle=True)
    """,
    "it starts its ranks itself": """
        import torch.multiprocessing as mp

        def work(rank, size):
            os.environ["MASTER_ADDR"] = "localhost"
            os.environ["MASTER_PORT"] = "12355"
            dist.init_process_group("nccl", rank=rank, world_size=size)
            torch.cuda.set_device(rank)
            model = DDP(net.to(rank), device_ids=[rank])
            if rank == 0:
                torch.save(model.state_dict(), "model.pt")
            dist.barrier()
            dist.destroy_process_group()

        def main():
            os.makedirs("out")
            name = input("which model? ")
            mp.spawn(work, args=(2,), nprocs=2)  # phalanx: ignore[nested-spawn]

        if __name__ == "__main__":
            main()
    """,
    "with and without ranks": """
        ddp = int(os.environ.get("RANK", -1)) != -1
        if ddp:
            dist.init_process_group(backend="nccl")
            ddp_rank = int(os.environ["RANK"])
            device = f"cuda:{int(os.environ['LOCAL_RANK'])}"
            torch.cuda.set_device(device)
            master_process = ddp_rank == 0
        else:
            master_process = True
            device = "cuda"
        if master_process:
            os.makedirs("out", exist_ok=True)
        model = net.to(device)
        if ddp:
            model = DDP(model)
        while True:
            if step % 100 == 0 and master_process:
                torch.save(model.module.state_dict(), "out/ckpt.pt")
            model(x).mean().backward()
            step += 1
            if step > 1000:
                break
        if ddp:
            dist.destroy_process_group()
    """,
    "a fake group": """
        dist.init_process_group("fake", rank=0, world_size=8)
        x = x.to("cuda:0")
        dist.destroy_process_group()
    """,
    "Lightning on one device": """
        from lightning.fabric import Fabric
        fabric = Fabric(devices=1)
        os.makedirs("out")
    """,
}


def script(middle: str) -> str:
    return FIRST + JOINED + textwrap.dedent(middle) + LEFT


def whole(text: str) -> str:
    return FIRST + textwrap.dedent(text)
