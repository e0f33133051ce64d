"""Writes everything that a process can observe about itself to DIR/<rank>.json.

    report.py --out DIR [--loaders] [--without-torch] [ARGS …]

State that an import could change, torch's above all, is read first, before anything is imported.
"""

NAMES_AT_START = sorted(globals())

import os  # noqa: E402
import signal  # noqa: E402
import stat  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402


def frames(frame):
    found = []
    while frame:
        found.append(f"{frame.f_code.co_name} in {os.path.basename(frame.f_code.co_filename)}")
        frame = frame.f_back
    return found


def kind(fd):
    mode = os.fstat(fd).st_mode
    if stat.S_ISCHR(mode):
        return "terminal" if os.isatty(fd) else os.readlink(f"/proc/self/fd/{fd}")
    return "pipe" if stat.S_ISFIFO(mode) else "file" if stat.S_ISREG(mode) else stat.filemode(mode)[0]


def other_fds():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that this listing used
            continue
        if int(name) > 2:
            found.append(f"{name} {target.split('[')[0]}")
    return found


def status(*names):
    with open("/proc/self/status") as file:
        rows = dict(line.rstrip("\n").split(":\t", 1) for line in file)
    return {name: rows[name] for name in names}


def kernel_signals():
    # glibc takes signals 32 and 33 for itself as soon as there was a thread.
    masks = status("SigIgn", "SigCgt", "SigBlk", "SigPnd", "ShdPnd")
    return {name: f"{int(mask, 16) & ~(0b11 << 31):016x}" for name, mask in masks.items()}


def umask():
    now = os.umask(0o77)
    os.umask(now)
    return oct(now)


EARLY = {
    "frames": frames(sys._getframe()),
    "fd kinds": [kind(fd) for fd in (0, 1, 2)],
    "fd flags": [os.get_inheritable(fd) for fd in (0, 1, 2)],
    "other fds": other_fds(),
    "kernel signals": kernel_signals(),
    "python signals": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
    "native threads": len(os.listdir("/proc/self/task")),
    "python threads": [thread.name for thread in threading.enumerate()],
    "excepthooks": [sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__],
    "displayhook": sys.displayhook is sys.__displayhook__,
    "breakpointhook": sys.breakpointhook is sys.__breakpointhook__,
    "trace and profile": [str(sys.gettrace()), str(sys.getprofile())],
    "argv": list(sys.argv),
    "path": list(sys.path),
    "path of importers": [type(finder).__name__ for finder in sys.meta_path],
    "env": dict(os.environ),
    "cwd": os.getcwd(),
    "umask": umask(),
}


class Thing:
    """Pickled by name: __main__.Thing must be found again, in this process and in loaders."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is type(self) and other.value == self.value

    __hash__ = None


class Numbers:
    """A dataset of 8 items. Each item names the process that made it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Thing((index, os.getpid()))


def first(batch):
    return batch


def interpreter():
    import faulthandler
    import gc

    return {
        "orig argv": sys.orig_argv,
        "flags": repr(sys.flags),
        "executable": sys.executable,
        "prefixes": [sys.prefix, sys.base_prefix, sys.exec_prefix],
        "warnoptions": [sys.warnoptions, sorted(sys._xoptions)],
        "path hooks": len(sys.path_hooks),
        "recursion limit": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(),
        "dlopen flags": sys.getdlopenflags(),
        "faulthandler": faulthandler.is_enabled(),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
        "main thread": threading.main_thread() is threading.current_thread(),
        "main thread id": threading.get_native_id() == os.getpid() == threading.main_thread().native_id,
    }


def module(names):
    """Return facts about the namespace of the started script."""
    main = sys.modules["__main__"]
    spec = names["__spec__"]
    return {
        "__name__": names["__name__"],
        "__file__": names["__file__"],
        "__cached__": names.get("__cached__"),
        "__package__": names["__package__"],
        "__doc__": names["__doc__"],
        "__spec__": spec and [spec.name, spec.origin, spec.parent, type(spec.loader).__name__],
        "__loader__": [type(names["__loader__"]).__name__, getattr(names["__loader__"], "name", None)],
        "__builtins__": type(names["__builtins__"]).__name__,
        "__annotations__": names.get("__annotations__"),
        "names at start": names["NAMES_AT_START"],
        "is __main__": vars(main) is names,
        "type of __main__": type(main).__name__,
    }


def streams():
    return {
        name: [
            stream.name,
            stream.mode,
            stream.encoding,
            stream.errors,
            stream.newlines,
            stream.line_buffering,
            getattr(stream, "write_through", None),
            stream.isatty(),
            stream.fileno(),
            type(stream.buffer).__name__,
            stream is getattr(sys, f"__{name}__"),
        ]
        for name in ("stdin", "stdout", "stderr")
        if (stream := getattr(sys, name)) is not None
    }


def process():
    import resource

    def read(name):
        with open(f"/proc/self/{name}") as file:
            return file.read()

    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "cmdline": read("cmdline").split("\0"),
        "comm": read("comm"),
        "exe": os.readlink("/proc/self/exe"),
        "oom score": read("oom_score_adj"),
        "is session leader": os.getsid(0) == os.getpid(),
        "is group leader": os.getpgid(0) == os.getpid(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "scheduler": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "ids": [os.getresuid(), os.getresgid(), os.getgroups()],
        "kernel": status("NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "Cpus_allowed_list", "THP_enabled"),
        "timers": [signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_PROF)],
        "children": has_children(),
        "ancestors": ancestors(),
        "has terminal": has_terminal(),
    }


def has_children():
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def ancestors():
    """The pids of parent, grandparent and so on."""
    found = [os.getppid()]
    while found[-1] > 1:
        with open(f"/proc/{found[-1]}/stat") as file:
            found.append(int(file.read().rpartition(")")[2].split()[1]))
    return found


def has_terminal():
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError as error:
        return error.strerror
    return True


def libraries():
    import asyncio
    import decimal
    import locale
    import multiprocessing
    import pickle
    import tempfile

    async def nothing():
        return asyncio.get_running_loop().is_running()

    return {
        "locale": [locale.setlocale(locale.LC_ALL, None), locale.getpreferredencoding()],
        "decimal": str(decimal.getcontext()),
        "asyncio": [type(asyncio.get_event_loop_policy()).__name__, asyncio.run(nothing())],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "parent process": str(multiprocessing.parent_process()),
        "current process": [multiprocessing.current_process().name, multiprocessing.current_process().daemon],
        "active children": str(multiprocessing.active_children()),
        "pickles": [Thing.__module__, pickle.loads(pickle.dumps(Thing(3))) == Thing(3)],
        "temporary directory": tempfile.gettempdir() == os.environ.get("TMPDIR", "/tmp"),
    }


def torch_and_numpy():
    """Return facts about torch and NumPy, and the changes made by importing them."""
    import logging
    import warnings

    import numpy as np
    import torch
    import torch.distributed as dist

    return {
        "warnings filters": [str(row) for row in warnings.filters],
        "logging": [
            str(logging.root.handlers),
            logging.root.level,
            logging.getLogger("torch").level,
            logging._srcfile is not None,
            logging.raiseExceptions,
        ],
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "torch modes": [torch.is_grad_enabled(), torch.get_deterministic_debug_mode()],
        "torch elastic": [dist.is_available(), dist.is_initialized(), dist.is_torchelastic_launched()],
        "torch sharing": torch.multiprocessing.get_sharing_strategy(),
        "cuda": [torch.cuda.is_initialized(), torch.cuda.is_available(), torch.cuda._is_in_bad_fork()],
        "numpy errors": str(np.geterr()),
    }


def chance():
    """Return values that must differ between two processes."""
    import random
    import secrets
    import uuid

    return {
        "random": random.random(),
        "uuid": str(uuid.uuid4()),
        "secrets": secrets.token_hex(),
        "pid": os.getpid(),
    }


def chance_of_torch_and_numpy():
    import numpy as np
    import torch

    return {
        "torch seed": torch.initial_seed(),  # without a manual seed, torch takes one from the system at import
        "torch": torch.rand(1).item(),
        "numpy": float(np.random.rand()),
        "numpy generator": float(np.random.default_rng().random()),
    }


def loaders():
    """Start workers of a DataLoader over a class of the script, with each start method; two where that costs no
    import.
    """
    from torch.utils.data import DataLoader

    found = {}
    for method, count in (("fork", 2), ("forkserver", 1), ("spawn", 1)):
        loader = DataLoader(
            Numbers(), batch_size=2, num_workers=count, collate_fn=first, multiprocessing_context=method
        )
        items = [thing.value for batch in loader for thing in batch]
        pids = {pid for _, pid in items}
        found[method] = [[index for index, _ in items], len(pids), os.getpid() in pids]
    return found


def write(names, early=EARLY):
    args = sys.argv[1:]
    folder = args[args.index("--out") + 1]
    rank = os.environ.get("RANK", "0")
    report = early | interpreter() | module(names) | {"streams": streams()} | process() | libraries()
    report["chance"] = chance()
    if "--without-torch" not in args:
        report |= torch_and_numpy()
        report["chance"] |= chance_of_torch_and_numpy()
    if "--loaders" in args:
        report["loaders"] = loaders()
    report["modules"] = sorted(sys.modules)

    import atexit
    import json

    # Non-daemon threads are waited for and exit functions run: an os._exit instead would skip both.
    thread = threading.Timer(0.05, append, [f"{folder}/{rank}.atexit", "thread "])
    thread.start()
    atexit.register(append, f"{folder}/{rank}.atexit", "atexit ")
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(report, file, indent=1)
    # Unbuffered, print writes a text and its newline separately, and the output of two ranks mixes.
    sys.stdout.write(f"rank {rank} writes to stdout\n")
    sys.stderr.write(f"rank {rank} writes to stderr\n")


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


if __name__ == "__main__":
    write(globals())
