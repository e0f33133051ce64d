"""A script in the style of torch.distributed.launch, which takes its local rank as an argument."""

import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int, required=True)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()
print(f"local rank {args.local_rank} lr {args.lr} RANK {os.environ['RANK']}\n", end="", flush=True)
