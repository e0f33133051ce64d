"""--check-collectives: whatever collective a rank calls is compared with what the others call, before it is started.

torch gives every collective to its dispatcher (c10d::allreduce_ …), whoever calls it: torch.distributed's functions,
DDP's buckets in C++, functional and compiled ones. A kernel in front of the backends' sees them all. What does not pass
there: send and receive, a backend that is called directly, and kernels that move data themselves (symmetric memory).
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import time
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

from .. import paths
from . import mismatch
from .exchange import WAIT, CallExchange, SharedMemoryExchange, StoreExchange
from .fingerprint import CALLS, CallReader, CollectiveCall, describe, fingerprint, own_call
from .ledger import CallLedger

_MOST = 4096  # of what is remembered

_OURS = tuple(paths.ROOT + folder for folder in paths.LIBRARY)
_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")
_kept: list[Any] = []

current: Checker | None = None  # of this process


def begin(ledger: CallLedger, slot: int) -> None:
    """Before the script, or as soon as it has imported torch: all ranks must count from the first collective on."""

    def lay() -> None:
        try:
            _lay(ledger, slot)
        except Exception as error:  # another torch than those that it was made for
            sys.stderr.write(f"phalanx: collectives cannot be checked with this torch: {error!r}\n")

    if "torch" in sys.modules:
        lay()
    else:
        sys.meta_path.insert(0, _Torch(lay))


class _Torch:
    """Finds torch as others do, and calls when it is there."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            plain, loader = spec.loader.exec_module, spec.loader

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                plain(module)
                self._then()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _lay(ledger: CallLedger, slot: int) -> None:
    torch: Any = sys.modules["torch"]
    if not torch.distributed.is_available():
        return
    global current
    checker = current = Checker(ledger, slot)
    library = torch.library.Library("c10d", "IMPL")
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    for name in CALLS:
        operator = getattr(getattr(torch.ops.c10d, name, None), "default", None)
        if operator is not None:
            # The last stop of any call before it comes to a backend: under autograd, in inference mode, in C++.
            library.impl(name, _kernel(checker, name, operator, after), "BackendSelect", with_keyset=True)
    _kept.append(library)
    os.register_at_fork(after_in_child=checker.leave)


def _kernel(checker: Checker, name: str, operator: Any, after: Any) -> Callable[..., Any]:
    reader = CallReader(name, [argument.name for argument in operator._schema.arguments])
    call = operator._handle.redispatch_boxed

    def kernel(keyset: Any, *args: Any) -> Any:
        checker.check(reader, args)
        return call(keyset & after, *args)

    return kernel


class CheckedGroup:
    """One group, as one of its ranks sees it."""

    def __init__(self, name: str, own: int, ranks: list[int], world: int, way: CallExchange) -> None:
        self.name = "all ranks" if len(ranks) == world else f"group {name}, ranks {mismatch.few(ranks)}"
        self.own = own
        self.ranks = ranks
        self.number = 0
        self.way: CallExchange | None = way


class Checker:
    def __init__(self, ledger: CallLedger, slot: int) -> None:
        self._ledger = ledger
        self._slot = slot
        self._groups: weakref.WeakKeyDictionary[Any, CheckedGroup | None] = weakref.WeakKeyDictionary()
        self._stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._calls: dict[CollectiveCall, tuple[int, bytes]] = {}
        self._sites: dict[tuple[CodeType, int], bytes] = {}
        self._foreign: dict[str, bool] = {}
        self._off = False
        self._unbox = sys.modules["torch._C._distributed_c10d"].ProcessGroup.unbox
        self._torch = os.path.join(os.path.dirname(sys.modules["torch"].__file__ or ""), "")

    def leave(self) -> None:
        """In a child of the worker."""
        self._off = True

    def check(self, reader: CallReader, args: tuple[Any, ...]) -> None:
        if self._off:
            return
        group = None
        try:
            group = self._group(self._unbox(args[reader.group]))
            if group is not None and group.way is not None:
                self._compare(group, group.way, reader, args)
        except mismatch.CollectiveMismatchError:
            raise
        except Exception:  # what only looks must not end what is run
            if group is not None:
                group.way = None

    def called(self, name: str, op: str, tensors: Any, reduction: str, root: int | None) -> None:
        """By a group of ours, which no dispatcher sees. Whether its caller waits is not known: all are held back."""
        if self._off:
            return
        world = sys.modules["torch.distributed.distributed_c10d"]._world
        group = None
        try:
            group = self._group(next(each for each, known in list(world.pg_names.items()) if known == name))
            if group is not None and group.way is not None:
                self._judge(group, group.way, own_call(op, tensors, reduction, root), waits=True)
        except mismatch.CollectiveMismatchError:
            raise
        except Exception:
            if group is not None:
                group.way = None

    def _compare(self, group: CheckedGroup, way: CallExchange, reader: CallReader, args: tuple[Any, ...]) -> None:
        self._judge(group, way, reader.call(args), waits=reader.waits(args))

    def _judge(self, group: CheckedGroup, way: CallExchange, call: CollectiveCall, *, waits: bool) -> None:
        if call.root >= 0:
            call = call._replace(root=group.ranks[call.root])  # as everybody knows it
        known = self._calls.get(call)
        if known is None:
            if len(self._calls) > _MOST:
                self._calls.clear()
            known = self._calls[call] = (fingerprint(call), describe(call).encode())
        mark, text = known
        group.number += 1
        sides = way.compare(group.number, mark, text[:200] + b"\0" + self._site(), waits=waits)
        if sides:
            loud = mismatch.loud(sides)
            if loud == group.own or not way.hold(loud):
                raise mismatch.CollectiveMismatchError(mismatch.told(sides, group.number, group.name))

    def _site(self) -> bytes:
        """File, line and text of the user's own line."""
        frame: Any = sys._getframe(4)
        bottom: Any = None  # the last of all
        outer: Any = None  # the last of torch
        while frame is not None and self._is_foreign(frame.f_code.co_filename):
            bottom = frame
            outer = frame if frame.f_code.co_filename.startswith(self._torch) else outer
            frame = frame.f_back
        if frame is None and outer is not None and _is_pythons(bottom.f_code.co_filename):
            frame = outer  # a thread of torch's, for its own ends
        if frame is None:  # a thread of autograd: the main thread waits for it
            frame = sys._current_frames().get(sys.modules["threading"].main_thread().ident)
            while frame is not None and frame.f_back is not None and self._is_foreign(frame.f_code.co_filename):
                frame = frame.f_back
        if frame is None:
            return b"?\0000\0"
        key = (frame.f_code, frame.f_lineno)
        site = self._sites.get(key)
        if site is None:
            file = frame.f_code.co_filename
            line = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
            site = f"{file[-160:]}\0{frame.f_lineno}\0{line[:100]}".encode(errors="replace")
            if len(self._sites) > _MOST:
                self._sites.clear()
            self._sites[key] = site
        return site

    def _is_foreign(self, file: str) -> bool:
        found = self._foreign.get(file)
        if found is None:
            found = self._foreign[file] = _is_pythons(file) or file.startswith((self._torch, "<frozen", *_OURS))
        return found

    def _group(self, group: Any) -> CheckedGroup | None:
        try:
            return self._groups[group]
        except KeyError:
            self._groups[group] = None  # if it cannot be known, it is not asked for again
            self._groups[group] = found = self._meet(group)
            return found

    def _meet(self, group: Any) -> CheckedGroup | None:
        """Before the first collective of a group. None: it cannot be known who is in it, or nobody else is."""
        world = sys.modules["torch.distributed.distributed_c10d"]._world
        places: dict[int, int] = world.pg_group_ranks.get(group) or {}
        if len(places) < 2 or group not in world.pg_map:
            return None
        store = self._store(world, group)
        ranks = sorted(places, key=lambda rank: places[rank])
        own = ranks[group.rank()]
        mark = _agree(store, len(ranks))
        if mark is None:
            return None
        seats = self._ledger.seats()
        way: CallExchange
        if seats.get(own) == self._slot and all(rank in seats for rank in ranks):
            peers = {rank: seats[rank] for rank in ranks if rank != own}
            way = nearby = SharedMemoryExchange(self._ledger, mark, own, self._slot, peers)
            weakref.finalize(group, self._ledger.close, nearby.lane).atexit = False
        else:
            way = StoreExchange(store, mark, own, group.rank(), len(ranks))
        whole = len(world.pg_group_ranks.get(world.default_pg) or ())
        return CheckedGroup(str(group.group_name), own, ranks, whole, way)

    def _store(self, world: Any, group: Any) -> Any:
        """A connection of our own, for another thread may wait with the first; one for all groups, as torch is seconds
        late with every 25th."""
        first = world.default_pg if world.default_pg in world.pg_map else group
        store = self._stores.get(first)
        if store is None:
            store = world.pg_map[first][1]
            with contextlib.suppress(Exception):
                store = store.clone()
            self._stores[first] = store
        return sys.modules["torch._C._distributed_c10d"].PrefixStore(f"phalanx-check-{group.group_name}", store)


def _is_pythons(file: str) -> bool:
    return file.startswith(_LIBRARY) and not file.startswith(("site-packages", "dist-packages"), len(_LIBRARY))


def _agree(store: Any, size: int) -> int | None:
    """A number that is this group's alone, not that of one before with the same name: the first to come draws it."""
    came = store.add("phalanx-check", 1) - 1
    key = f"phalanx-check-{came // size}"
    if came % size == 0:
        mark = int.from_bytes(os.urandom(8), "little") | 1
        store.set(key, str(mark))
        return mark
    end = time.monotonic() + WAIT
    while not store.check([key]):
        if time.monotonic() > end:
            return None
        time.sleep(0.001)
    return int(store.get(key))
