"""A script of torch.distributed.launch's time: phalanx run -g 2 --pass-local-rank examples/oldway.py"""

import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int, required=True)
options = parser.parse_args()
print(f"my local rank is {options.local_rank} of {os.environ['LOCAL_WORLD_SIZE']}")
