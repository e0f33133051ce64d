"""Writes when functions of phalanx are called, in the agent and in two ranks: one is killed, and later one stalls.

python traced.py run … traced.py     the command line, traced
traced.py                            the script of each rank

$TRACED names the functions, $TRACES is the folder for one file per process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

FOLDER, NAMES = os.environ["TRACES"], frozenset(os.environ["TRACED"].split())
ALARM, LAST = "launcher/hangs/detector.HangDetector._alarm", "launcher/hangs/hang_action.choose"


def trace() -> None:
    """Write the time of each call from here on, in this thread and in those that start later."""
    file = os.open(f"{FOLDER}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            module = frame.f_code.co_filename.rpartition("/phalanx/")[2].removesuffix(".py")
            name = f"{module}.{frame.f_code.co_qualname}"
            if name in NAMES:
                os.write(file, f"{time.monotonic()} {name}\n".encode())

    threading.setprofile(called)
    sys.setprofile(called)


def mark(what: str) -> float:
    """Write when something else happens, and return the time."""
    now = time.monotonic()
    with open(f"{FOLDER}/{what}", "w") as file:
        file.write(f"{now} {what}\n")
    return now


def answered(since: float) -> bool:
    """Return whether this stall was reported. On a busy machine the recovery before it may be reported as one, too."""
    for name in (ALARM, LAST):
        lines = (line.split() for entry in os.scandir(FOLDER) for line in Path(entry).read_text().splitlines())
        times = [float(words[0]) for words in lines if words[1:] == [name] and float(words[0]) >= since]
        if not times:
            return False
        since = min(times)
    return True


def main() -> None:
    """Train."""
    import torch

    import phalanx

    trace()  # not before: it slows imports down

    def train(run: phalanx.Run) -> None:
        model = torch.nn.Linear(2, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        run.keep(model, opt)
        ddp = run.wrap(model)
        while run.steps < 12:
            loss = ddp(torch.ones(2, 2)).mean()
            run.backward(loss)
            run.step(opt, loss=loss)
            if run.rank == 1 and run.steps == 5 and not run.group.generation:
                mark("kill")
                os.kill(os.getpid(), signal.SIGKILL)
            if run.rank == 1 and run.steps == 9:
                since = mark("stall")
                while not answered(since):
                    time.sleep(0.1)

    phalanx.main(train)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        trace()
        from phalanx.cli.main import main as command

        sys.exit(command(sys.argv[1:]))
