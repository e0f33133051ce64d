"""A script for the old launcher, which passes --local-rank as an argument."""

import argparse
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int, required=True)
parser.add_argument("--lr", type=float)
args = parser.parse_args()
print(sys.argv[1:], args.local_rank == int(os.environ["LOCAL_RANK"]), args.lr)
