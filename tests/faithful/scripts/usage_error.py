"""An argument that argparse does not know."""

import argparse

parser = argparse.ArgumentParser(description="A training.")
parser.add_argument("--lr", type=float, default=0.1)
print("before")
print(parser.parse_args().lr)
