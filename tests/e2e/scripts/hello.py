"""Says "hello RANK of WORLD_SIZE", and needs no torch."""

import os

print(f"hello {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\n", end="", flush=True)
