"""A global csv log that is written when the interpreter closes it."""

import csv
import os

log = open(f"log-{os.environ['RANK']}.csv", "w", newline="")
rows = csv.writer(log)
rows.writerow(["step", "loss"])


def train(steps):
    for step in range(steps):
        rows.writerow([step, repr(1 / (step + 3))])


train(20)
print("trained", os.environ["RANK"])
