"""A distributed checkpoint of a sharded model, saved and loaded by all ranks."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
fully_shard(model)
dcp.save({"model": get_model_state_dict(model)}, checkpoint_id="checkpoint")
torch.manual_seed(1)
other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
fully_shard(other)
state = {"model": get_model_state_dict(other)}
dcp.load(state, checkpoint_id="checkpoint")
set_model_state_dict(other, state["model"])
for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
    print(torch.equal(mine.full_tensor(), theirs.full_tensor()), theirs.full_tensor().sum().item())
dist.destroy_process_group()
