"""Which processes that outlive their rank are waited for, and the message about them."""

from __future__ import annotations

import pytest

from phalanx.launcher.agent.stopping import linger
from phalanx.launcher.agent.stopping.linger import Orphan

UPLOAD = Orphan(7, "rclone copy logs s3:logs", 1)
DAEMON = Orphan(9, "python -u train.py", None)


@pytest.mark.parametrize(
    ("name", "command", "expected"),
    [
        ("pt_data_worker", "python -u train.py", True),
        ("torch_shm_manag", "torch_shm_manager", True),
        ("python", "python -c from multiprocessing.resource_tracker import main;main(5)", True),
        ("python", "python -c from multiprocessing.forkserver import main; main(7, 8)", True),
        ("python", "python /x/site-packages/torch/_inductor/compile_worker/__main__.py --workers=4", True),
        ("python", "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)", False),
        ("python", "python -u train.py", False),
        ("rclone", "rclone copy logs s3:logs", False),
    ],
)
def test_helpers_end_by_themselves(name: str, command: str, expected: bool) -> None:
    words = command.split(" ", 1) if " -c " not in command else ["python", "-c", command.partition(" -c ")[2]]
    assert linger.is_helper(name, words) is expected


@pytest.mark.parametrize(
    ("orphans", "limit", "expected"),
    [
        ([], 120.0, ""),
        (
            [UPLOAD],
            120.0,
            "waiting up to 120 s (--linger) for a process that is still running "
            "(pid 7 of rank 1: rclone copy logs s3:logs); Ctrl-C ends it now",
        ),
        (
            [UPLOAD, DAEMON],
            0.0,
            "ending 2 processes that are still running "
            "(pid 7 of rank 1: rclone copy logs s3:logs; pid 9: python -u train.py) (--linger 0)",
        ),
        ([DAEMON], None, "leaving a process that is still running (pid 9: python -u train.py) (--linger forever)"),
        ([DAEMON] * 9, None, f"({'; '.join(['pid 9: python -u train.py'] * 8)}; and 1 more)"),
    ],
)
def test_the_message_about_lingering_processes(orphans: list[Orphan], limit: float | None, expected: str) -> None:
    text = linger.text(orphans, limit)
    assert (expected in text) if len(orphans) > 2 else (text == expected)
    assert "\n" not in text
