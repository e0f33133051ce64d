"""Progress bars on stderr, and a line of output between their steps."""

import os

from tqdm import tqdm, trange

FORMAT = "{desc}: {n_fmt}/{total_fmt} {bar}|"

total = 0
for step in trange(5, desc=f"rank {os.environ['RANK']}", bar_format=FORMAT, mininterval=0, ncols=60):
    total += step
    if step == 2:
        tqdm.write("half")
bar = tqdm(total=3, desc="manual", bar_format=FORMAT, mininterval=0, ncols=60, leave=False)
for _ in range(3):
    bar.update()
bar.close()
print("total", total)
