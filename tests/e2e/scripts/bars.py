"""bars.py [STEPS]: a progress bar that writes over itself on stderr, as tqdm does, and a line between."""

import os
import sys
import time

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
rank = os.environ.get("RANK", "0")
for step in range(1, steps + 1):
    bar = "█" * (20 * step // steps)
    sys.stderr.write(f"\r{rank}: {100 * step // steps:3d}%|{bar:20}| {step}/{steps}")
    sys.stderr.flush()
    if step == steps // 2:
        print(f"\nrank {rank} is half way", flush=True)
    time.sleep(0.01)
sys.stderr.write("\n")
