"""Why a save failed, as it is reported."""

from __future__ import annotations

import pytest

from phalanx.train.checkpoint import saver
from phalanx.train.checkpoint.save_queue import causes

FULL = "No space left on device"
STAGING = "/data/kept/.step-60.part"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, FULL), FULL),
        (OSError(28, FULL, STAGING), FULL),  # the step is in the name: the next save must fail for the same reason
        (OSError(28, FULL, f"{STAGING}/rank0.safetensors"), f"{FULL}: rank0.safetensors"),
        (FileNotFoundError(2, "No such file", f"{STAGING}/rank1.safetensors"), saver.REMOVED),
        (FileNotFoundError(2, "No such file", f"{STAGING}-2"), f"No such file: {STAGING}-2"),
        (PermissionError(13, "Permission denied", "/data"), "Permission denied: /data"),
        (ValueError("a wrong shape"), "ValueError: a wrong shape"),
    ],
)
def test_a_reason_does_not_depend_on_the_step(error: Exception, reason: str) -> None:
    assert saver._reason(error, STAGING) == reason


def test_a_rank_that_found_the_folder_removed_is_not_a_cause() -> None:
    assert causes([FULL, saver.REMOVED, ""]) == {0: FULL}
    assert causes(["", saver.REMOVED]) == {1: saver.REMOVED}
    assert causes(["", ""]) == {}
