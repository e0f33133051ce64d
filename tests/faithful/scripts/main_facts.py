"""What a script sees of itself."""

import __main__
import gc
import inspect
import os
import sys
import threading

print(sys.argv, sys.path[0], sys.orig_argv[1:], sys.executable)
print(__name__, __file__, __package__, __spec__, __doc__, type(__loader__).__name__)
print(__main__ is sys.modules["__main__"], sorted(n for n in vars(__main__) if n.startswith("__")))
print("stack", [frame.function for frame in inspect.stack()])
print(os.getcwd(), sys.flags, sys.dont_write_bytecode, sys.warnoptions)
print("frozen objects", gc.get_freeze_count() > 0)
print(gc.isenabled(), gc.get_threshold(), gc.callbacks, sys.getrecursionlimit(), sys.getswitchinterval())
print(threading.current_thread().name, threading.active_count(), threading.main_thread().name)
print(sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.errors, sys.stdin.encoding)
print(sys.gettrace(), sys.getprofile(), sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__)
print(os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid(), sorted(os.sched_getaffinity(0)), os.nice(0))
print(inspect.getsource(__main__)[:40], inspect.getfile(threading.Thread)[-12:])
