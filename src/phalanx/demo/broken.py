"""The second part of `phalanx demo`: rank 1 raises an error while the other ranks wait for it."""

import phalanx


def train(run: phalanx.Run) -> None:
    """Train until rank 1 raises an exception."""
    for step in range(1000):
        if run.rank == 1 and step == 30:
            raise RuntimeError("this rank has read a broken sample")
        run.group.sum(step)


if __name__ == "__main__":
    phalanx.main(train)
