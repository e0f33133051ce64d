"""Calls that need a process with one thread, through ctypes and the os module."""

import ctypes
import os

NEW_USER, NEW_UTS = 0x10000000, 0x04000000

libc = ctypes.CDLL(None, use_errno=True)
print("errno", ctypes.get_errno())
own = os.open("/proc/self/ns/user", os.O_RDONLY)
print("unshare", libc.unshare(NEW_USER), ctypes.get_errno())
uts = os.open("/proc/self/ns/uts", os.O_RDONLY)
print("unshare", libc["unshare"](NEW_UTS))
libc.setns.restype, libc.setns.argtypes = ctypes.c_int, (ctypes.c_int, ctypes.c_int)
print("setns", libc.setns(uts, NEW_UTS), ctypes.get_errno(), libc.setns.__name__, type(libc.setns).__name__)
if hasattr(os, "unshare"):
    os.unshare(os.CLONE_NEWUTS)
