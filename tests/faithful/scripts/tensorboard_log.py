"""A SummaryWriter that is never closed: what can be read afterwards."""

import glob
import os

from torch.utils.tensorboard import SummaryWriter

folder = f"board-{os.environ['RANK']}"
writer = SummaryWriter(folder)
for step in range(5):
    writer.add_scalar("loss", 1 / (step + 1), step)
writer.flush()
writer.add_text("note", "written at exit")
print(len(glob.glob(f"{folder}/*")))
