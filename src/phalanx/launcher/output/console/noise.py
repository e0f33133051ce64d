"""Recognizes messages of torch and NCCL when a rank loses a peer: dozens of lines per rank. They stay in the rank's
log; the console shows one line of phalanx instead. Those of a rank that can regroup are dropped at once, those of
others when the failure was reported (`withheld.py`).

    noise = Noise()
    shown = noise.without(b"…whole lines…")
"""

from __future__ import annotations

import re

_ERROR = re.compile(
    rb"(?:\[rank\d+\]:)?\[[EF]\d{4} [\d:.]+ (?:ProcessGroup\w+|NCCLUtils|TCPStore|HeartbeatMonitor)\.cpp:\d+\]"
)
_ABORT = re.compile(rb"terminate called (?:after throwing|recursively)")
_WARNING = re.compile(
    rb"(?:\[rank\d+\]:)?\[W\d{4} [\d:.]+ (?:ProcessGroupNCCL|ProcessGroupGloo|TCPStore)\.cpp:\d+\].*"
    rb"(?:unbatched P2P op|recvValue\w* failed|sendBytes failed|Failed to check the|should dump|ProcessGroupGloo::split"
    rb"|destroy_process_group\(\) was not called|TCP client failed to connect/validate .*Failed to recv, got 0 bytes)"
)
# Further lines of a message: NCCL's own, and two kinds of stacks.
_MORE = re.compile(
    rb"  what\(\): |nccl\w+: |Last error:|Exception raised from |frame #\d+: |<omitting python frames>"
    rb"|#\d+ .* from .*:\d+|\s*$"
)
_RAISED = b"Exception raised from "  # a stack may follow a warning too
_QUOTED = b"Last error:"  # the next line is NCCL's, with any text


class Noise:
    """Filters one stream. A message may arrive in several parts.

    `aborts`: output of a process that an exception in C++ ends is noise, too.
    """

    def __init__(self, *, aborts: bool = False) -> None:
        self._aborts = aborts
        self._inside = False
        self._warned = False
        self._quoted = False

    def without(self, lines: bytes) -> bytes:
        """Return the lines without noise."""
        return b"".join(line for line in lines.splitlines(keepends=True) if not self.drops(line))

    @property
    def inside(self) -> bool:
        """Return whether a message has begun that may have further lines."""
        return self._inside or self._warned or self._quoted

    def drops(self, line: bytes) -> bool:
        """Process the next line, and return whether it is noise."""
        text = line.rstrip(b"\r\n")
        if self._quoted:
            self._quoted = False
            return True
        warned, self._warned = self._warned, bool(_WARNING.match(text))
        if self._warned:
            self._inside = False
        elif _ERROR.match(text) or (self._aborts and _ABORT.match(text)) or (warned and text.startswith(_RAISED)):
            self._inside = True
        elif self._inside and _MORE.match(text):
            self._quoted = text.startswith(_QUOTED)
            self._inside = bool(text.strip())  # an empty line ends the message
        else:
            self._inside = False
            return False
        return True
