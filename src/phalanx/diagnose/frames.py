"""Interprets a stack: the innermost frame of user code, and what the library frames inside it do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from phalanx.diagnose.evidence import Frame, Process, Rank, ThreadStack
from phalanx.forkserver import paths

What = Literal[
    "collective", "message", "join", "new group", "store", "leaving", "loader", "lock", "input", "sleep", "subprocess",
    "file", "socket", "cuda", "backward", "work", "debugger", "nothing",
]  # fmt: skip

_THEIRS = re.compile(
    r"(site|dist)-packages/|/lib(64)?/python3(\.\d+)?/|/python3\d+\.zip/"
    rf"|/src/phalanx/(?!{'|'.join(paths.USER_CODE)})|/phalanx/{paths.FORK_SERVER}"
)
_TYPED = ("<string>", "<stdin>", "<ipython-input")
_LOADER = "torch/utils/data/"
_CACHED = 4096  # cached answers about files and functions: ranks run the same code
_SAYS_NOTHING = frozenset({"__call__", "wrapper", "<module>", "<lambda>", "run", "main"})


@dataclass(frozen=True)
class Act:
    """What a thread is doing. `shown`: a frame or the source line shows it, not only the kernel."""

    what: What
    words: str  # waiting for a lock
    shown: bool = True
    name: str = ""  # the library function, where it matters: all_reduce


NOTHING = Act("nothing", "", shown=False)

# Library frames. If several match, the one nearest to the user code decides.
_FRAMES: tuple[tuple[str, str, What, str], ...] = (
    (r"torch/distributed/distributed_c10d\.py$", r"init_process_group|_store_based_barrier", "join", "joining"),
    (r"torch/distributed/rendezvous\.py$", r".*", "join", "joining"),
    (r"torch/distributed/distributed_c10d\.py$", r"_?new_(sub)?group\w*|split_group", "new group", "making a group"),
    (r"torch/distributed/distributed_c10d\.py$", r"destroy_process_group|abort_process_group", "leaving", "leaving"),
    (r"torch/distributed/distributed_c10d\.py$", r"i?send|i?recv|\w+_object_list_(to|from)|(send|recv)_object_list"
     r"|batch_isend_irecv", "message", "a message"),
    (r"torch/distributed/distributed_c10d\.py$",
     r"(all_|monitored_)?(reduce|gather|barrier|broadcast|scatter|to_all)\w*|_all_gather\w*|_reduce_scatter\w*|wait",
     "collective", "a collective"),
    (r"torch/distributed/(nn/functional|_functional_collectives|utils)\.py$",
     r"(all_|wait_)?(reduce|gather|broadcast|scatter|tensor|to_all)\w*|_(sync|verify)_\w+",
     "collective", "a collective"),
    (r"torch/nn/parallel/distributed\.py$", r"_sync_\w+|_distributed_broadcast_coalesced|_verify_\w+",
     "collective", "a collective"),
    (rf"phalanx/({paths.WORK}|{paths.THREADED})$", r"wait|result|synchronize|settle|_work", "work",
     "waiting for an operation under way"),
    (r"torch/distributed/elastic/.*store\.py$|torch/distributed/.*_?store\w*\.py$", r"get|wait|barrier|synchronize",
     "store", "waiting for a key of the store"),
    (r"torch/utils/data/dataloader\.py$", r"_try_get_data|_get_data|_shutdown_workers", "loader",
     "waiting for its DataLoader workers"),
    (r"torch/autograd/graph\.py$", r"_engine_run_backward", "backward", "the backward pass"),
    (r"torch/cuda/(__init__|streams|graphs)\.py$|torch/accelerator/__init__\.py$", r"synchronize|wait\w*", "cuda",
     "waiting for the GPU"),
    (r"/pdb\.py$|/bdb\.py$|/debugpy/|/pydevd", r".*", "debugger", "in a debugger"),
    (r"/subprocess\.py$|/multiprocessing/(popen_\w+|process)\.py$",
     r"\w*wait\w*|communicate|run|call|check_\w+|join|poll",
     "subprocess", "waiting for a process that it has started"),
    (r"/multiprocessing/pool\.py$", r"get|wait|next|join", "subprocess", "waiting for a pool of processes"),
    (r"/threading\.py$", r"_shutdown", "leaving", "leaving"),
    (r"/threading\.py$", r"_wait_for_tstate_lock|join", "lock", "waiting for a thread to end"),
    (r"/threading\.py$", r"wait|wait_for|acquire|__enter__", "lock", "waiting for a lock"),
    (r"/multiprocessing/(synchronize|managers)\.py$", r"wait|wait_for|acquire|__enter__", "lock", "waiting for a lock"),
    (r"filelock/|/portalocker/", r"acquire|_acquire|__enter__|lock", "lock", "waiting for a file lock"),
    (r"/queue\.py$|/multiprocessing/queues\.py$", r"get|put|join", "lock", "waiting for a queue"),
    (r"/concurrent/futures/_?\w+\.py$", r"result|wait|exception|as_completed", "lock", "waiting for a future"),
    (r"/(requests|urllib3|httpx|httpcore|aiohttp|huggingface_hub|boto3|botocore|fsspec|s3fs|gcsfs|wandb|mlflow|paramiko)/",
     r".*", "socket", "waiting for the network"),
    (r"/urllib/request\.py$|/http/client\.py$|/ssl\.py$|/ftplib\.py$", r".*", "socket", "waiting for the network"),
    (r"/socket\.py$|/socketserver\.py$", r"readinto|recv\w*|accept|connect|create_connection|getaddrinfo|send\w*",
     "socket", "waiting for the network"),
    (r"/multiprocessing/connection\.py$", r"recv\w*|wait|poll|accept|Client|answer_challenge", "socket",
     "waiting for another process"),
    (r"/(selectors|asyncio/\w+)\.py$", r"select|_run_once|run_forever|run_until_complete|run", "socket",
     "waiting for a socket or a pipe"),
)  # fmt: skip

# Built-in calls have no frame. For these, the source line decides, if it is known.
_SOURCES: tuple[tuple[str, What, str], ...] = (
    (r"\binput\(|stdin\.(read|buffer)", "input", "waiting for input"),
    (r"\bsleep\(", "sleep", "sleeping"),
    (r"\bbreakpoint\(|set_trace\(", "debugger", "in a debugger"),
    (r"\.acquire\(|\bwith\b.*lock|\block\b.*:$", "lock", "waiting for a lock"),
    (r"\bstore\w*\.(get|wait|set|add|barrier)\(|\bst\.(get|wait)\(", "store", "waiting for a key of the store"),
    (r"\bos\.wait(pid)?\(|subprocess\.|\.communicate\(", "subprocess", "waiting for a process that it has started"),
    (r"flock\(|lockf\(", "lock", "waiting for a file lock"),
    (r"\.(recv|accept|connect)\(|\bselect\(", "socket", "waiting for the network"),
    (r"synchronize\(", "cuda", "waiting for the GPU"),
    (r"\.wait\(", "work", "waiting for an operation under way"),  # only torch's own objects: others would have a frame
)

_READS_GPU = re.compile(r"\.(item|tolist|cpu|numpy|nonzero)\(")

# As a last resort, the kernel function in which the main thread sleeps.
_KERNEL: tuple[tuple[str, What, str], ...] = (
    (r"nanosleep", "sleep", "sleeping"),
    (r"futex", "lock", "waiting for a lock"),
    (r"^(do_|kernel_)?wait(4|id|pid)?$", "subprocess", "waiting for a process that it has started"),
    (r"tty_read|wait_woken", "input", "waiting for input"),
    (r"pipe_(read|write)|wait_for_partner", "input", "waiting for a pipe, or its standard input"),
    (r"nfs|rpc_|lustre|ll_|ceph|fuse|cl_sync", "file", "waiting for a network file system"),
    (r"folio_wait|wait_on_page|io_schedule|filemap|wait_on_buffer|xfs|ext4|jbd2|blk", "file", "waiting for a disk"),
    (r"flock|locks_lock|fcntl_setlk", "lock", "waiting for a file lock"),
    (r"accept|sk_wait|tcp_|inet_|unix_stream|skb_", "socket", "waiting for the network"),
    (r"poll|select", "socket", "waiting for a socket or a pipe"),
)


# Compiled when the first stack is read: that takes longer than the rest of the import, and every run would wait for it.
@cache
def _frame_patterns() -> tuple[tuple[re.Pattern[str], re.Pattern[str], What, str], ...]:
    return tuple((re.compile(file), re.compile(function), what, words) for file, function, what, words in _FRAMES)


@cache
def _patterns(table: tuple[tuple[str, What, str], ...]) -> tuple[tuple[re.Pattern[str], What, str], ...]:
    return tuple((re.compile(pattern), what, words) for pattern, what, words in table)


def mine(frame: Frame) -> bool:
    """Return whether a frame is user code: not a library, not frozen or generated code, not phalanx."""
    return _is_users(frame.file)


@lru_cache(maxsize=_CACHED)
def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return file.startswith(_TYPED)
    return _THEIRS.search(file.replace("\\", "/")) is None


def own(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of user code."""
    return next((frame for frame in frames if mine(frame)), None)


def main_thread(rank: Rank) -> ThreadStack | None:
    """Return the stack of the main thread."""
    return next((thread for thread in rank.threads if thread.main), None)


def main_frames(rank: Rank) -> tuple[Frame, ...]:
    """Return the frames of the main thread, the innermost first."""
    thread = main_thread(rank)
    return thread.frames if thread is not None else ()


def act(frames: Sequence[Frame], process: Process | None = None) -> Act:
    """Return what a thread does, from its library frames, its source line, or the kernel."""
    found = NOTHING
    for frame in frames:
        if mine(frame):
            break
        meaning = _meaning(frame.file, frame.function)
        # A frame nearer to the user code says more: select < Queue.get < a DataLoader. Plain helpers say nothing.
        found = meaning or found
    if found is not NOTHING:
        return found
    if frames and mine(frames[0]) and frames[0].source:
        for pattern, what, words in _patterns(_SOURCES):
            if pattern.search(frames[0].source):
                return Act(what, words)
    return asleep(process)


def reads_gpu(frames: Sequence[Frame]) -> Act | None:
    """Return the activity of a rank whose source line reads a value from the GPU: it waits for all queued kernels.
    None: the line does not read one.
    """
    source = frames[0].source if frames and mine(frames[0]) else ""
    return Act("cuda", "waiting for the GPU") if _READS_GPU.search(source) else None


def asleep(process: Process | None) -> Act:
    """Return what the kernel says about a sleeping process."""
    if process is None:
        return NOTHING
    for pattern, what, words in _patterns(_KERNEL):
        if pattern.search(process.wchan):
            return Act(what, words, shown=False)
    return Act("file", "waiting for a disk or another device", shown=False) if process.state == "D" else NOTHING


@lru_cache(maxsize=_CACHED)
def _meaning(path: str, function: str) -> Act | None:
    file = path.replace("\\", "/")
    for pattern, name, what, words in _frame_patterns():
        if pattern.search(file) and name.fullmatch(function):
            return Act(what, words, name="" if function in _SAYS_NOTHING else function)
    return None


def in_data(frames: Sequence[Frame]) -> bool:
    """Return whether the stack is in a DataLoader."""
    return any(_LOADER in frame.file.replace("\\", "/") for frame in frames)


def in_backward(frames: Sequence[Frame]) -> bool:
    """Return whether the stack is in the backward pass."""
    return any(frame.function == "_engine_run_backward" for frame in frames)


def in_work(frames: Sequence[Frame]) -> bool:
    """Return whether the stack waits for a collective of a phalanx group, even from C++ code of the backward pass."""
    return any(
        frame.file.replace("\\", "/").endswith(f"phalanx/{paths.WORK}") and frame.function == "wait" for frame in frames
    )


def in_model(frames: Sequence[Frame]) -> bool:
    """Return whether the stack is in the forward pass of DistributedDataParallel."""
    return any(
        frame.file.replace("\\", "/").endswith("torch/nn/parallel/distributed.py") and frame.function != "__init__"
        for frame in frames
    )


def in_compiler(frames: Sequence[Frame]) -> bool:
    """Return whether the stack compiles. Importing the compiler does not count."""
    inner = [frame.file.replace("\\", "/") for frame in frames]
    if any(file.startswith("<frozen importlib") for file in inner):
        return False
    return any(part in file for file in inner for part in ("torch/_dynamo/", "torch/_inductor/", "/triton/compiler/"))


def in_import(frames: Sequence[Frame]) -> bool:
    """Return whether the stack imports a module."""
    return any(frame.file.startswith("<frozen importlib") for frame in frames)


def in_checkpoint(frames: Sequence[Frame]) -> bool:
    """Return whether the stack writes or reads a checkpoint."""
    for frame in frames:
        file = frame.file.replace("\\", "/")
        if "torch/distributed/checkpoint/" in file or "/safetensors/" in file:
            return True
        if file.endswith("torch/serialization.py") and frame.function in (
            "save",
            "_save",
            "_legacy_save",
            "load",
            "_load",
        ):
            return True
    return False
