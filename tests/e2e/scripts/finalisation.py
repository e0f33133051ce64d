"""Everything that Python does at its end, one line each in the order in which it happens.

Printed with os.write, because nothing else works up to the end.
"""

import atexit
import contextvars
import os
import sys

OUT = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
FOLDER = os.path.dirname(os.path.abspath(sys.argv[1]))


def write_line(what, write=os.write, out=OUT):
    write(out, f"{what}\n".encode())


class PrintsAtDeletion:
    def __init__(self, name):
        self.name = name

    def __del__(self, write_line=write_line):
        write_line(f"del {self.name}")


# Registered before the imports that register something themselves.
atexit.register(write_line, "atexit 1: before logging and weakref")

import concurrent.futures  # noqa: E402
import gzip  # noqa: E402
import logging  # noqa: E402
import logging.handlers  # noqa: E402
import multiprocessing  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
import weakref  # noqa: E402
import zipfile  # noqa: E402

import pkg.final  # noqa: E402

atexit.register(write_line, "atexit 2: after them")

if "torch" in sys.argv:
    atexit.register(write_line, "atexit 3: before torch")
    import torch

    atexit.register(write_line, "atexit 4: after torch")
    tensor = torch.ones(3)
    torch.mine = PrintsAtDeletion("an attribute of torch")

log = open(f"{FOLDER}/log.csv", "w")  # noqa: SIM115
zipped = gzip.open(f"{FOLDER}/log.gz", "wt")  # noqa: SIM115
archive = zipfile.ZipFile(f"{FOLDER}/log.zip", "w")
temporary = tempfile.NamedTemporaryFile(dir=FOLDER, prefix="temporary")  # noqa: SIM115
directory = tempfile.TemporaryDirectory(dir=FOLDER, prefix="directory")
handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler(f"{FOLDER}/memory.log"))
logging.getLogger().addHandler(handler)


def train():
    for step in range(5):
        print(step, file=log)
        print(step, file=zipped)
        archive.writestr(f"{step}.txt", str(step))
        logging.warning("step %d", step)


train()


class Cycle(PrintsAtDeletion):
    def __init__(self, name):
        super().__init__(name)
        self.me = self


class Closing(logging.Handler):
    def close(self):
        write_line("a handler of logging is closed")
        super().close()


def generator():
    try:
        yield
    finally:
        write_line("a generator is closed")


class Meta(type):
    def __del__(cls, write_line=write_line):
        write_line(f"del class {cls.__name__}")


class Gone(metaclass=Meta):
    pass


closing = Closing()
plain = PrintsAtDeletion("a global")
_private = PrintsAtDeletion("a private global")
cycle = Cycle("a cycle")
in_list = [PrintsAtDeletion("in a list")]
pkg.final.mine = PrintsAtDeletion("an attribute of a module")
if "held" in sys.argv:  # by Python itself, to its very end: what it refers to in turn goes late, or never
    sys.mine = PrintsAtDeletion("an attribute of sys")
    os.mine = PrintsAtDeletion("an attribute of os")
    variable = contextvars.ContextVar("variable")
    variable.set(PrintsAtDeletion("in a context variable"))
    local = threading.local()
    local.kept = PrintsAtDeletion("of a thread-local")
running = generator()
next(running)
referent = PrintsAtDeletion("with callbacks")
callback = weakref.ref(referent, lambda _: write_line("a weak reference's callback"))
finalizer = weakref.finalize(referent, write_line, "weakref.finalize")
late = weakref.finalize(write_line, write_line, "weakref.finalize of a function")
late.atexit = "atexit" in sys.argv
thread = threading.Thread(
    target=lambda: (threading.main_thread().join(), write_line("a thread ends after the main one"))
)
thread.start()
pool = concurrent.futures.ThreadPoolExecutor(1)
future = pool.submit(write_line, "a pool's thread")
future.add_done_callback(lambda _: None)
future.result()
child = multiprocessing.get_context("fork").Process(target=write_line, args=("a child process",))
child.start()
child.join()
daemon = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)
daemon.start()
threading._register_atexit(write_line, "threading's atexit")
atexit.register(write_line, "atexit 5: the last")
write_line("the last line")
if "raise" in sys.argv:
    raise RuntimeError("at the end")
if "exit" in sys.argv:
    sys.exit(3)
