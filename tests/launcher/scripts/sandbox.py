"""A seccomp filter that kills every thread of this process that polls: a plain interpreter has none."""

import ctypes
import os
import struct
import sys
import time

POLL = {"x86_64": (7, 271), "aarch64": (73, 73)}[os.uname().machine]
SECCOMP = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
LOAD, IS, RETURN, ALLOW, KILL = 0x20, 0x15, 0x06, 0x7FFF0000, 0x80000000
NO_NEW_PRIVILEGES, SET_SECCOMP, ALL_THREADS = 38, 22, 1

program = b"".join(
    struct.pack("HBBI", *line)
    for line in (
        (LOAD, 0, 0, 0),
        (IS, 1, 0, POLL[0]),
        (IS, 0, 1, POLL[1]),
        (RETURN, 0, 0, KILL),
        (RETURN, 0, 0, ALLOW),
    )
)
held = ctypes.create_string_buffer(program)
filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
libc = ctypes.CDLL(None)
assert libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
if sys.argv[1] == "syscall":
    code = libc.syscall(ctypes.c_long(SECCOMP), 1, ALL_THREADS, filters)
else:
    code = libc.prctl(SET_SECCOMP, 2, filters, 0, 0)
print("filter", code)
time.sleep(0.5)  # the thread polls ten times per second
if os.fork() == 0:
    os._exit(0)
print(os.wait()[1], len(os.listdir("/proc/self/task")))
