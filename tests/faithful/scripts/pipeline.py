"""A pipeline of two stages."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [torch.nn.Linear(8, 8) for _ in range(size)]
stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"), input_args=(torch.zeros(2, 8),))
schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
inputs, targets = torch.randn(4, 8), torch.randn(4, 8)
losses = []
if rank == 0:
    schedule.step(inputs)
else:
    print(schedule.step(target=targets, losses=losses).sum().item())
print([loss.item() for loss in losses], layers[rank].weight.grad.norm().item())
dist.barrier()
dist.destroy_process_group()
