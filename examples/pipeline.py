"""phalanx run -g 2 examples/pipeline.py: a model in two stages, one per rank; the same gradients as in one process"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert world == 2, "two stages: -g 2"

torch.manual_seed(0)  # the same model and data on both
whole = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
x, y = torch.randn(32, 16), torch.randint(4, (32,))

# What it must come to: all in one process.
alone = nn.functional.cross_entropy(whole(x), y)
alone.backward()
expected = [p.grad.clone() for p in whole.parameters()]
whole.zero_grad()

# This rank's half. A batch goes through in 4 parts, so that both ranks have something to do.
half = whole[:2] if rank == 0 else whole[2:]
stage = PipelineStage(half, stage_index=rank, num_stages=world, device=torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
if rank == 0:
    schedule.step(x)
else:
    losses: list[torch.Tensor] = []
    schedule.step(target=y, losses=losses)
    torch.testing.assert_close(torch.stack(losses).mean(), alone)

mine = expected[:2] if rank == 0 else expected[2:]
for parameter, gradient in zip(half.parameters(), mine, strict=True):
    torch.testing.assert_close(parameter.grad, gradient)
print(
    f"rank {rank} of {world}: stage {rank}, {len(mine)} gradients as in one process, whose loss is {alone.item():.4f}"
)
dist.destroy_process_group()
