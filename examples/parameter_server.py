"""phalanx run -g 3 examples/parameter_server.py: rank 0 holds the parameters, the others send it gradients by RPC"""

import os
import threading
import warnings

import torch
from torch import nn
from torch.distributed import rpc
from torch.futures import Future

warnings.filterwarnings("ignore", module=r"torch\.distributed")  # about torch's own affairs
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TRUTH = torch.tensor([3.0, -2.0, 0.5])
STEPS = 60


class Server:
    """The parameters and their optimizer. A step is made when every trainer has sent its gradient."""

    def __init__(self, trainers: int) -> None:
        self.model = nn.Linear(3, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        self.trainers = trainers
        self.lock = threading.Lock()
        self.arrived = 0
        self.steps = 0
        self.next: Future[torch.Tensor] = Future()

    def weights(self) -> torch.Tensor:
        return self.model.weight.detach().clone()

    @staticmethod
    @rpc.functions.async_execution
    def push(server: "rpc.RRef[Server]", gradient: torch.Tensor) -> Future[torch.Tensor]:
        """Returns at once with a promise of the next weights: no thread of the server waits."""
        self = server.local_value()
        with self.lock:
            weight, promised = self.model.weight, self.next
            weight.grad = gradient if self.arrived == 0 else weight.grad + gradient
            self.arrived += 1
            if self.arrived == self.trainers:
                weight.grad /= self.trainers
                self.optimizer.step()
                self.arrived, self.steps, self.next = 0, self.steps + 1, Future()
                promised.set_result(self.weights())
        return promised


def train() -> None:
    server = rpc.remote("rank0", get_server)
    chance = torch.Generator().manual_seed(rank)  # each trainer has its own data
    weights = server.rpc_sync().weights()
    for _ in range(STEPS):
        x = torch.randn(32, 3, generator=chance)
        weights = weights.detach().requires_grad_()
        loss = nn.functional.mse_loss(x @ weights.T, x @ TRUTH[:, None])
        loss.backward()
        weights = rpc.rpc_sync("rank0", Server.push, (server, weights.grad))
    print(
        f"rank {rank} of {world}: trainer, weights {[round(w, 2) for w in weights[0].tolist()]}, loss {loss.item():.6f}"
    )


def get_server() -> Server:
    return the_server


if __name__ == "__main__":
    the_server = Server(trainers=world - 1)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world)
    if rank:
        train()
    rpc.shutdown()  # the server serves until every trainer has come here
    if rank == 0:
        weights = [round(w, 2) for w in the_server.weights()[0].tolist()]
        print(f"rank {rank} of {world}: server, weights {weights} after {the_server.steps} steps")
