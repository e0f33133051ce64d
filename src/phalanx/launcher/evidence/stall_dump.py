"""Writes evidence, stacks and verdict of a stall into the run folder, all or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from phalanx.contract import encoding
from phalanx.diagnose.evidence import Evidence, encode
from phalanx.diagnose.verdict import Verdict
from phalanx.launcher.evidence import stacks


def write(folder: str, number: int, evidence: Evidence, verdicts: Sequence[Verdict]) -> str:
    """Write the dump and return its folder, or "" if the disk does not accept it."""
    path = os.path.join(folder, f"stall_{number}")
    part = f"{path}.part"
    try:
        os.mkdir(part, 0o700)
        for name, content in (
            ("evidence.json", encode(evidence)),
            ("stacks.txt", text(evidence).encode(errors="replace")),
            ("verdict.json", encoding.encode(verdicts)),
        ):
            with open(os.path.join(part, name), "wb") as file:
                file.write(content)
        os.rename(part, path)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        return ""
    return path


def text(evidence: Evidence) -> str:
    """Return the stacks of all ranks, formatted like Python does."""
    blocks = []
    for rank in evidence.ranks:
        process = f", process {rank.process.pid} ({rank.process.state})" if rank.process is not None else ""
        ended = f", ended with {rank.ended}" if rank.ended is not None else ""
        note = f": {rank.note}" if rank.note else ""
        blocks.append(f"rank {rank.rank} on node {rank.node}{process}{ended}{note}\n{stacks.text_of(rank.threads)}\n")
    return "\n".join(blocks)
