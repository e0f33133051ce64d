"""--check-collectives: compares each collective with those of the other ranks before it starts.

torch passes every collective to its dispatcher (c10d::allreduce_ …): from torch.distributed's functions, DDP's buckets
in C++, functional and compiled collectives. A kernel in front of the backends' kernels intercepts them all. It does not
see send and receive, direct calls of a backend, and kernels that move data themselves (symmetric memory).
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

from .. import hidden_modules, log, paths, thread_frames
from ..board.ledger import CallLedger
from ..signed_store import SignedStore
from . import mismatch
from .exchange import WAIT, CallExchange, SharedMemoryExchange, StoreExchange
from .fingerprint import CALLS, CallReader, CollectiveCall, describe, fingerprint, own_call

_MAX_CACHED = 4096  # cached entries

_OURS = tuple(paths.ROOT + folder for folder in paths.LIBRARY)
_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")
_libraries: list[Any] = []

current: Checker | None = None  # of this process


def begin(ledger: CallLedger, slot: int) -> None:
    """Install the checker before the script, or as soon as torch is imported: all ranks count from the first
    collective.
    """

    def install() -> None:
        try:
            _install(ledger, slot)
        except Exception as error:  # an unknown version of torch
            log.swallowed("forkserver.collective_check.checker")
            sys.stderr.write(f"phalanx: collectives cannot be checked with this torch: {error!r}\n")

    if "torch" in sys.modules:
        install()
    elif "torch" in hidden_modules.modules:
        hidden_modules.when_imported("torch", install)
    else:
        sys.meta_path.insert(0, _TorchImportHook(install))


class _TorchImportHook:
    """Finds torch like the other finders, and calls `then` after the import."""

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


def _install(ledger: CallLedger, slot: int) -> None:
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
            # The last dispatch key before a backend: reached under autograd, in inference mode and from C++.
            library.impl(name, _kernel(checker, name, operator, after), "BackendSelect", with_keyset=True)
    _libraries.append(library)
    os.register_at_fork(after_in_child=checker.detach)


def _kernel(checker: Checker, name: str, operator: Any, after: Any) -> Callable[..., Any]:
    reader = CallReader(name, [argument.name for argument in operator._schema.arguments])
    call = operator._handle.redispatch_boxed

    def kernel(keyset: Any, *args: Any) -> Any:
        checker.check(reader, args)
        return call(keyset & after, *args)

    return kernel


class CheckedGroup:
    """One group, as one of its ranks sees it."""

    def __init__(self, name: str, own: int, ranks: list[int], world: int, exchange: CallExchange) -> None:
        self.name = "all ranks" if len(ranks) == world else f"group {name}, ranks {mismatch.list_ranks(ranks)}"
        self.own = own
        self.ranks = ranks
        self.number = 0
        self.exchange: CallExchange | None = exchange


class Checker:
    """Compares the collectives of this rank with those of the others."""

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

    def detach(self) -> None:
        """Stop checking, in a child of the worker."""
        self._off = True

    def check(self, reader: CallReader, args: tuple[Any, ...]) -> None:
        """Check a call; raise CollectiveMismatchError if it differs."""
        if self._off:
            return
        group = None
        try:
            group = self._group(self._unbox(args[reader.group]))
            if group is not None and group.exchange is not None:
                self._compare(group, group.exchange, reader, args)
        except mismatch.CollectiveMismatchError:
            raise
        except Exception:  # the check must not end the script
            log.swallowed("forkserver.collective_check.checker")
            if group is not None:
                group.exchange = None

    def check_own(self, name: str, op: str, tensors: Any, reduction: str, root: int | None) -> None:
        """Check a call of one of phalanx's groups, which the dispatcher does not see. All calls are held back, because
        it is unknown whether the caller waits.
        """
        if self._off:
            return
        world = sys.modules["torch.distributed.distributed_c10d"]._world
        group = None
        try:
            group = self._group(next(each for each, known in list(world.pg_names.items()) if known == name))
            if group is not None and group.exchange is not None:
                self._compare_call(group, group.exchange, own_call(op, tensors, reduction, root), waits=True)
        except mismatch.CollectiveMismatchError:
            raise
        except Exception:  # as above
            log.swallowed("forkserver.collective_check.checker")
            if group is not None:
                group.exchange = None

    def _compare(self, group: CheckedGroup, exchange: CallExchange, reader: CallReader, args: tuple[Any, ...]) -> None:
        self._compare_call(group, exchange, reader.call(args), waits=reader.waits(args))

    def _compare_call(self, group: CheckedGroup, exchange: CallExchange, call: CollectiveCall, *, waits: bool) -> None:
        if call.root >= 0:
            call = call._replace(root=group.ranks[call.root])  # global rank
        known = self._calls.get(call)
        if known is None:
            if len(self._calls) > _MAX_CACHED:
                self._calls.clear()
            known = self._calls[call] = (fingerprint(call), describe(call).encode())
        mark, text = known
        group.number += 1
        sides = exchange.compare(group.number, mark, text[:200] + b"\0" + self._site(), waits=waits)
        if sides:
            reporter = mismatch.reporter(sides)
            if reporter == group.own or not exchange.wait_for_reporter(reporter):
                raise mismatch.CollectiveMismatchError(mismatch.message(sides, group.number, group.name))

    def _site(self) -> bytes:
        """Return file, line and text of the line of user code."""
        frame: Any = sys._getframe(4)
        bottom: Any = None  # the outermost frame
        outer: Any = None  # the outermost frame of torch
        while frame is not None and self._is_foreign(frame.f_code.co_filename):
            bottom = frame
            outer = frame if frame.f_code.co_filename.startswith(self._torch) else outer
            frame = frame.f_back
        if frame is None and outer is not None and _is_pythons(bottom.f_code.co_filename):
            frame = outer  # a thread of torch
        if frame is None:  # a thread of autograd: the main thread waits for it
            with thread_frames.reading():
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
            if len(self._sites) > _MAX_CACHED:
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
            self._groups[group] = None  # if opening fails, do not try again
            self._groups[group] = found = self._open_group(group)
            return found

    def _open_group(self, group: Any) -> CheckedGroup | None:
        """Return the data to check a group, before its first collective. None: its ranks are unknown, or it has only
        one.
        """
        world = sys.modules["torch.distributed.distributed_c10d"]._world
        places: dict[int, int] = world.pg_group_ranks.get(group) or {}
        if len(places) < 2 or group not in world.pg_map:
            return None
        store = self._store(world, group)
        ranks = sorted(places, key=lambda rank: places[rank])
        own = ranks[group.rank()]
        mark = _group_number(store, len(ranks))
        if mark is None:
            return None
        slots_by_rank = self._ledger.slots_by_rank()
        exchange: CallExchange
        if slots_by_rank.get(own) == self._slot and all(rank in slots_by_rank for rank in ranks):
            peers = {rank: slots_by_rank[rank] for rank in ranks if rank != own}
            exchange = shared = SharedMemoryExchange(self._ledger, mark, own, self._slot, peers)
            weakref.finalize(group, self._ledger.close, shared.lane).atexit = False
        else:
            exchange = StoreExchange(store, mark, own, group.rank(), len(ranks))
        whole = len(world.pg_group_ranks.get(world.default_pg) or ())
        return CheckedGroup(str(group.group_name), own, ranks, whole, exchange)

    def _store(self, world: Any, group: Any) -> SignedStore:
        """Return a separate connection to the store, because another thread may block the script's. All groups share
        it: every 25th connection takes torch seconds.
        """
        first = world.default_pg if world.default_pg in world.pg_map else group
        store = self._stores.get(first)
        if store is None:
            store = world.pg_map[first][1]
            with contextlib.suppress(RuntimeError):  # not all stores can be cloned
                store = store.clone()
            self._stores[first] = store
        return SignedStore(store, "phalanx-check").at(f"phalanx-check-{group.group_name}")


def _is_pythons(file: str) -> bool:
    return file.startswith(_LIBRARY) and not file.startswith(("site-packages", "dist-packages"), len(_LIBRARY))


def _group_number(store: SignedStore, size: int) -> int | None:
    """Return a number unique to this group, not shared with an earlier one of the same name. The first rank chooses
    it.
    """
    arrived = store.add("phalanx-check", 1) - 1
    key = f"phalanx-check-{arrived // size}"
    if arrived % size == 0:
        mark = int.from_bytes(os.urandom(8), "little") | 1
        store.set(key, str(mark))
        return mark
    end = time.monotonic() + WAIT
    while not store.check([key]):
        if time.monotonic() > end:
            return None
        time.sleep(0.001)
    return int(store.get(key))
