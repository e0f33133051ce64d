"""Which device a replacement opens a CUDA context on before its script runs."""

from __future__ import annotations

import pytest

from phalanx.contract.worker_messages import Hello
from phalanx.launch.agent.worker import cuda_device

GIVEN = {"CUDA_VISIBLE_DEVICES": "1", "RANK": "0"}


@pytest.mark.parametrize(
    ("before", "device"),
    [
        (None, None),  # the first of its place: its script may set anything
        (Hello(), None),  # it used no GPU
        (Hello(cuda=0, variables={"CUDA_VISIBLE_DEVICES": "1"}), 0),
        (Hello(cuda=0, variables={"CUDA_VISIBLE_DEVICES": "3"}), None),  # the script has chosen another one
        (Hello(cuda=0, variables={"CUDA_VISIBLE_DEVICES": "1", "CUDA_LAUNCH_BLOCKING": "1"}), None),
    ],
)
def test_only_where_the_script_has_not_changed_what_cuda_reads(before: Hello | None, device: int | None) -> None:
    assert cuda_device(before, GIVEN) == device
