"""Whether a frame is user code, and what a stack means."""

from __future__ import annotations

import pytest

from phalanx.diagnose import frames
from phalanx.diagnose.evidence import Frame
from phalanx.diagnose.source import annotate
from tests.diagnose.made_evidence import C10D, LIB, STD, WORK, backward, collective, frame, process, workers


@pytest.mark.parametrize(
    ("file", "mine"),
    [
        ("/home/user/train.py", True),
        ("train.py", True),
        ("/home/user/phalanx/train.py", True),
        ("<string>", True),
        ("/repo/src/phalanx/demo/digits/train.py", True),
        (LIB + "torch/nn/modules/module.py", False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", False),
        ("/opt/conda/lib/python3.12/threading.py", False),
        ("/home/user/.venv/lib64/python3.11/site-packages/a.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<eval_with_key>.3", False),
        ("/repo/src/phalanx/train/loop.py", False),
        ("/opt/x/site-packages/phalanx/worker/process_group/group.py", False),
    ],
)
def test_own_frames_are_recognized(file: str, mine: bool) -> None:
    assert frames.mine(Frame(file, 1, "f")) is mine


@pytest.mark.parametrize(
    ("stack", "wchan", "what", "shown"),
    [
        (collective("all_reduce"), "futex_do_wait", "collective", True),
        (collective("all_gather_object"), "", "collective", True),
        (collective("monitored_barrier"), "", "collective", True),
        (collective("recv"), "", "message", True),
        (collective("destroy_process_group"), "", "leaving", True),
        (collective("new_group"), "", "new group", True),
        ([frame(LIB + "torch/distributed/rendezvous.py", 1, "x"), *collective("init_process_group")], "", "join", True),
        ([frame(WORK, 50, "wait"), frame("a.py", 1)], "futex_do_wait", "work", True),
        ([frame(WORK, 50, "wait"), *backward()], "futex_do_wait", "backward", True),
        (workers(), "poll_schedule_timeout", "loader", True),
        ([frame(STD + "queue.py", 171, "get"), frame("a.py", 1)], "", "lock", True),
        ([frame("a.py", 1, source="time.sleep(3)")], "", "sleep", True),
        ([frame("a.py", 1, source="with self.lock:")], "futex_do_wait", "lock", True),
        ([frame("a.py", 1)], "futex_do_wait", "lock", False),
        ([frame("a.py", 1)], "do_wait", "subprocess", False),
        ([frame("a.py", 1)], "inet_csk_accept", "socket", False),
        ([frame("a.py", 1)], "0", "nothing", False),
        # Only what the innermost user code calls counts, not the frames outside it.
        ([frame("a.py", 1, "hook"), frame(C10D, 9, "all_reduce"), frame("b.py", 2)], "", "nothing", False),
        ([], "", "nothing", False),
    ],
)  # fmt: skip
def test_the_action_of_a_stack(stack: list[Frame], wchan: str, what: str, shown: bool) -> None:
    act = frames.act(stack, process(wchan=wchan))
    assert (act.what, act.shown) == (what, shown)


SCRIPT = """\
import torch.distributed as dist
def main(rank):
    for batch in range(3):
        if rank == 0 and batch == 2:
            dist.barrier()
        else:
            dist.all_reduce(x)
        if batch:
            step()
    dist.barrier()
if is_main_process():
    main(0)
"""


@pytest.mark.parametrize(
    ("line", "source", "guard", "loop"),
    [
        (5, "dist.barrier()", "if rank == 0 and batch == 2", 3),
        (7, "dist.all_reduce(x)", "else of if rank == 0 and batch == 2", 3),
        (9, "step()", "", 3),
        (10, "dist.barrier()", "", 0),
        (12, "main(0)", "if is_main_process()", 0),
        (99, "", "", 0),
    ],
)
def test_source_lines_are_annotated(line: int, source: str, guard: str, loop: int) -> None:
    found = annotate(frame("train.py", line), SCRIPT)
    assert (found.source, found.guard, found.loop) == (source, guard, loop)


def test_text_that_is_no_python() -> None:
    assert annotate(frame("x.py", 1), "def (:\n").source == "def (:"
