"""Ends waits of gloo's that nobody else would end before the timeout.

When a connection breaks while gloo's own thread is sending, it tells everybody but the one who waits for that send, for
the operation is in none of its lists any more: a survivor would wait for minutes for a peer that is long dead. gloo can
end such a wait, by `UnboundBuffer::abortWaitSend`, if told for which buffer; whoever waits has a pointer to it on its
stack. Only waits for sending are ended: what this rank receives is never taken for complete when it is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable

_TABLE = "_ZTVN4gloo9transport3tcp13UnboundBufferE"  # what every such buffer begins with a pointer to
_ABORT = "_ZN4gloo9transport3tcp13UnboundBuffer13abortWaitSendEv"
_WORD = ctypes.sizeof(ctypes.c_void_p)


def end_sends(doomed: Callable[[], bool]) -> int:
    """Every wait for a send, in all threads of this process, if all of its groups are still `doomed` by then."""
    torch = sys.modules.get("torch")
    if torch is None or _WORD != 8:
        return 0
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a torch that is built otherwise
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__ or ""), "lib", "libtorch_cpu.so"))
        begin = ctypes.addressof(ctypes.c_void_p.in_dll(library, _TABLE)) + 2 * _WORD
        abort = getattr(library, _ABORT)
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            found = {address for address in _pointers(memory.fileno()) if _word(memory.fileno(), address) == begin}
        for address in found if doomed() else ():
            abort(ctypes.c_void_p(address))
        return len(found)
    return 0


def _pointers(memory: int) -> set[int]:
    """Whatever could be one, on the stacks of all threads."""
    found: set[int] = set()
    for start, end in _stacks():
        with contextlib.suppress(OSError):
            data = os.pread(memory, end - start, start)
            words = set(memoryview(data)[: len(data) // _WORD * _WORD].cast("Q"))
            found |= {word for word in words if 1 << 16 < word < 1 << 47 and not word % _WORD}
    return found


def _stacks() -> list[tuple[int, int]]:
    """The kernel names the first thread's; those of others lie behind a page that nobody may touch."""
    found = []
    guard = 0
    with open("/proc/self/maps") as file:
        for line in file:
            place, rights, _, _, inode, *name = line.split()
            start, end = (int(number, 16) for number in place.split("-"))
            if rights.startswith("---") and inode == "0":
                guard = end
            elif name == ["[stack]"] or (start == guard and rights.startswith("rw") and inode == "0"):
                found.append((start, end))
    return found


def _word(memory: int, address: int) -> int:
    """Read as a file: an address that is none is an error, and not the end of this process."""
    try:
        return int.from_bytes(os.pread(memory, _WORD, address), sys.byteorder)
    except OSError:
        return 0
