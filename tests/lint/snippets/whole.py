"""Whole scripts, for rules about the beginning and the end: some break a rule, others break none.

The line that a finding names ends in `# !`.
"""

from __future__ import annotations

# rule -> title -> a script without its imports
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
