"""Scripts that break a rule about data, files, devices or the environment, and scripts that break none.

The line that a finding names ends in `# !`. `scripts.script` adds what all have in common.
"""

from __future__ import annotations

# rule -> title -> the middle of a script
BAD: dict[str, dict[str, str]] = {
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
        "one that never ends": """
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
