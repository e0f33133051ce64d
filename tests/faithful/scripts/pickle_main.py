"""Classes of __main__ in pickles: written, read back, and read by another process."""

import dataclasses
import enum
import os
import pickle
import subprocess
import sys

import torch


class Mode(enum.Enum):
    TRAIN = "train"


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    mode: Mode = Mode.TRAIN
    weights: torch.Tensor = dataclasses.field(default_factory=lambda: torch.arange(3.0))


def double(number):
    return number * 2


if __name__ == "__main__":
    rank = os.environ["RANK"]
    if len(sys.argv) > 1:
        with open(sys.argv[1], "rb") as file:
            print("read", pickle.load(file))
        sys.exit()
    data = pickle.dumps((Config(lr=1 / 3), double))
    print(data[:60], pickle.loads(data), pickle.loads(data)[1] is double)
    with open(f"config-{rank}.pkl", "wb") as file:
        pickle.dump(Config(), file)
    torch.save(Config(), f"config-{rank}.pt")
    print(torch.load(f"config-{rank}.pt", weights_only=False))
    print(Config.__module__, Config.__qualname__, double.__globals__ is globals())
    subprocess.run([sys.executable, __file__, f"config-{rank}.pkl"], check=True)
