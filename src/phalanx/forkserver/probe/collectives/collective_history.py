"""The collectives in the flight recorders of this process, in compact form.

A recorder keeps the last 2,000 entries (TORCH_FR_BUFFER_SIZE). A training loop repeats a few collectives at a few
places, so call sites and signatures are written once, and an entry is two numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

from .. import phases

MAX_BYTES = 64 * 1024  # bytes per rank
_MAX_BYTES_ALL_RANKS = 8 * 1024 * 1024  # bytes of all ranks: they are sent together
_MIN_BYTES = 4 * 1024
_MAX_FRAMES = 8  # frames per call site
_MAX_TENSORS = 8  # tensors per call whose shapes are kept
_DDP = "torch/nn/parallel/distributed.py"
_BACKWARD = "_engine_run_backward"

# Called by pairs of ranks, or by each rank for itself: their numbers do not match by position.
_UNPAIRED = frozenset({"send", "recv", "recvAnySource", "recvanysource", "split", "new_window"})

Entry = dict[str, Any]


class CollectiveHistory:
    """Builds the history. `name` returns the name in torch.distributed from call site and record, `dtypes` the dtypes,
    and `root` the global rank of a root.
    """

    def __init__(
        self,
        name: Callable[[list[list[Any]], str], str],
        dtypes: Callable[[list[str]], list[str]],
        root: Callable[[str, int], int],
    ) -> None:
        self._name = name
        self._dtypes = dtypes
        self._root = root
        self._called: dict[Any, tuple[str, int]] = {}  # frames and record -> name and site
        self._sites: dict[Any, int] = {}
        self._signatures: dict[Any, int] = {}
        self._rows: list[tuple[str, str, int, int]] = []  # group, backend, number, signature
        self._cut: set[tuple[str, str]] = set()  # groups whose oldest entries are overwritten

    def add(self, entries: Iterable[Entry]) -> None:
        """Add the entries of one recorder, oldest first."""
        for index, entry in enumerate(entries):
            backend, _, text = str(entry["profiling_name"]).rpartition(":")
            op, group = text.partition(" ")[0], str(entry["process_group"][0])
            if index == 0 and int(entry.get("record_id") or 0) > 0:
                self._cut.add(("", backend))
            if entry.get("is_p2p") or op in _UNPAIRED or _ends_coalescing(op, entry):
                continue
            number = int(entry["collective_seq_id"])
            if number > 0:
                self._rows.append((group, backend, number, self._signature(op, group, backend, entry)))

    def to_dict(self) -> dict[str, Any]:
        """Return the history in the form of evidence.History, with frames as lists. Drops the oldest entries if it is
        too large.
        """
        limit = max(_MIN_BYTES, min(MAX_BYTES, _MAX_BYTES_ALL_RANKS // max(1, _world_size())))
        rows = self._rows
        while len(json.dumps(found := self._table(rows, cut=len(rows) < len(self._rows)))) > limit and rows:
            rows = rows[(len(rows) + 1) // 2 :]
        return found

    def _signature(self, op: str, group: str, backend: str, entry: Entry) -> int:
        frames = tuple([(one["filename"], one["line"], one["name"]) for one in entry.get("frames") or ()])
        if (frames, op) not in self._called:
            self._called[frames, op] = self._name([list(frame) for frame in frames], op), self._site(frames)
        called, site = self._called[frames, op]
        shapes = [tuple(shape) for shape in entry.get("input_sizes") or ()]
        outputs = [tuple(shape) for shape in entry.get("output_sizes") or ()]
        if op == "scatter" and backend == "nccl":
            shapes, outputs = outputs, shapes  # NCCL's recorder has them the wrong way round
        if "gather" in op:
            # the recorder keeps only so many sizes; the others may differ
            if backend == "phalanx" and len(outputs) >= _MAX_TENSORS:
                shapes = []
            outputs = list(dict.fromkeys(outputs))
        root = entry.get("root")
        signature = (
            op,
            called,
            tuple(self._dtypes(list(entry.get("input_dtypes") or entry.get("output_dtypes") or ()))),
            tuple(shapes[:_MAX_TENSORS]),
            tuple(outputs[:_MAX_TENSORS]),
            str(entry.get("reduction") or ""),
            None if root is None else self._root(group, root),
            site,
        )
        return self._signatures.setdefault(signature, len(self._signatures))

    def _site(self, frames: tuple[tuple[str, int, str], ...]) -> int:
        site = tuple(frame for frame in frames if _is_shown(frame[0], frame[2]))[:_MAX_FRAMES]
        return self._sites.setdefault(site, len(self._sites)) if site else -1

    def _table(self, rows: list[tuple[str, str, int, int]], *, cut: bool) -> dict[str, Any]:
        groups: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        signatures: dict[int, int] = {}
        for group, backend, number, signature in self._complete(rows, cut=cut):
            seqs, kinds = groups.setdefault((group, backend), ([], []))
            seqs.append(number)
            kinds.append(signatures.setdefault(signature, len(signatures)))
        sites: dict[int, int] = {-1: -1}
        all_signatures, all_sites = list(self._signatures), list(self._sites)
        to_dict = []
        for index in signatures:
            op, called, dtypes, shapes, outputs, reduction, root, site = all_signatures[index]
            to_dict.append(
                {
                    "op": op,
                    "called": called,
                    "dtypes": dtypes,
                    "shapes": shapes,
                    "outputs": outputs,
                    "reduction": reduction,
                    "root": root,
                    "site": sites.setdefault(site, len(sites) - 1),
                }
            )
        return {
            "sites": [list(all_sites[index]) for index in sites if index >= 0],
            "signatures": to_dict,
            "groups": [
                {"group": group, "backend": backend, "seqs": seqs, "kinds": kinds}
                for (group, backend), (seqs, kinds) in groups.items()
            ],
        }

    def _complete(self, rows: list[tuple[str, str, int, int]], *, cut: bool) -> Iterable[tuple[str, str, int, int]]:
        """Drop the first number of a group if older entries are lost: some of its coalesced collectives may be
        missing.
        """
        first: dict[tuple[str, str], tuple[int, int]] = {}
        for group, backend, number, _ in rows:
            known, count = first.get((group, backend), (number, 0))
            first[group, backend] = (known, count + (number == known))
        for row in rows:
            number, count = first[row[0], row[1]]
            if count > 1 and row[2] == number and (cut or ("", row[1]) in self._cut):
                continue
            yield row


def _ends_coalescing(op: str, entry: Entry) -> bool:
    """Return whether this is the entry that follows those of a coalesced block."""
    return op.endswith("coalesced") and not entry.get("input_sizes") and not entry.get("output_sizes")


def _is_shown(file: str, function: str) -> bool:
    return function == _BACKWARD or file.replace("\\", "/").endswith(_DDP) or phases.own_file(file)


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1
