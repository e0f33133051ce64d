"""Scripts whose ranks take different paths through groups, models and loops, and scripts whose ranks do not.

The line that a finding names ends in `# !`. `scripts.script` adds what all have in common.
"""

from __future__ import annotations

# rule -> title -> the middle of a script
BAD: dict[str, dict[str, str]] = {
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
}

GOOD: dict[str, dict[str, str]] = {
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
                decision = [stop]
                dist.broadcast_object_list(decision, 0)
                stop = decision[0]
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
}
