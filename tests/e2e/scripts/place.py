"""Prints its location."""

import os

e = os.environ
print(
    f"rank {e['RANK']} of {e['WORLD_SIZE']}, local {e['LOCAL_RANK']} of {e['LOCAL_WORLD_SIZE']}, "
    f"node {e['GROUP_RANK']} of {e['GROUP_WORLD_SIZE']}, on {os.uname().nodename}",
    flush=True,
)
