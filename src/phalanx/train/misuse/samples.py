"""The values that ranks compare: parameters, and checksums of data sets, computed without reading samples."""

from __future__ import annotations

import gc
import inspect
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

logger = logging.getLogger(__name__)
_PARAMETERS, _ELEMENTS, _DEPTH = 64, 4, 4  # limits of the comparison


def sampled(parameters: Sequence[Any]) -> list[float] | None:
    """Return some values of trained parameters. None: they are sharded, so ranks have different ones."""
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.numel()]
    if not trained or any(_is_sharded(parameter) for parameter in trained):
        return None
    some = trained[:: -(-len(trained) // _PARAMETERS)]
    values = []
    for parameter in some:
        flat = parameter.detach().reshape(-1)
        places = torch.linspace(0, flat.numel() - 1, min(_ELEMENTS, flat.numel())).long().to(flat.device)
        values.append(flat[places].float())
    return [float(value) for value in torch.cat([value.cpu() for value in values]).tolist()]


def _is_sharded(parameter: Any) -> bool:
    return (
        hasattr(parameter, "placements") or parameter.is_meta or not parameter.is_floating_point()
    ) or "FlatParameter" in type(parameter).__name__


def differ(before: Sequence[list[float] | None], after: Sequence[list[float] | None]) -> bool:
    """Return whether all ranks had the same values before, and have different ones now.

    The difference is compared with the change by the steps: rounding does not count. Ranks that began with different
    values, or with models of different sizes, divide a model or train several on purpose.
    """
    first, now = before[0], after[0]
    if first is None or now is None or len(first) != len(now):
        return False
    if any(other != first for other in before):
        return False
    changed = max((abs(a - b) for a, b in zip(first, now, strict=True)), default=0.0)
    for other in after:
        if other is None or len(other) != len(now):
            return False
        if max((abs(a - b) for a, b in zip(now, other, strict=True)), default=0.0) > 0.05 * changed > 0.0:
            return True
    return False


class IteratedData(NamedTuple):
    """The data that a DataLoader reads, over which the script iterates."""

    dataset: Any
    sampler: Any
    batch_size: int
    drawn: int = 0  # batches


def iterated_data() -> IteratedData | None:
    """Return the data that the script reads, if it iterates over one DataLoader without `run.batches`.

    Only the interpreter knows the iterator of a `for` loop, so this searches all objects: call it once per training.
    """
    kinds = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
    iterators: list[Any] = [one for one in gc.get_objects() if type(one) in kinds]
    if len(iterators) != 1:
        return None
    batches = getattr(iterators[0], "_index_sampler", None)
    if batches is None or type(batches) is not BatchSampler:  # None: torch has renamed it
        return None
    drawn = getattr(iterators[0], "_num_yielded", 0)
    return IteratedData(iterators[0]._dataset, batches.sampler, batches.batch_size, drawn)


def shapes(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the shape of a tensor, and if it is a view of all elements of another one, such as a batch that the script
    has flattened, that of the other one.
    """
    base = tensor._base
    found = [tuple(tensor.shape)]
    return found if base is None or base.numel() != tensor.numel() else [*found, tuple(base.shape)]


def has_batch(shapes: Sequence[tuple[int, ...]], batch: int, ranks: int) -> bool:
    """Return whether one of these tensors is a whole batch, of this many samples: in its first dimension, or in its
    second, as recurrent networks have it.

    Else the script may have taken a part for this rank. So it may have if the first dimension is as long as such a
    part, even if the second one, such as the number of features, is as long as the batch. A copy of a batch that the
    script has flattened cannot be distinguished from a part; a view can (`shapes`).
    """
    parts = (batch // ranks, -(-batch // ranks))
    return any(batch in shape[:2] and shape[0] not in parts for shape in shapes)


def fingerprint(data: Any) -> int | None:
    """Return a checksum of the samples that a DataLoader, or `IteratedData`, reads, without reading any. None: it may
    be a part of them.

    A data set is compared by its attributes, so one that contains a part, or its rank, has a different checksum on each
    rank.
    """
    if data is None or isinstance(data.dataset, IterableDataset) or data.batch_size is None:
        return None
    if type(data.sampler) not in (RandomSampler, SequentialSampler) or _asks_for_rank(data.dataset):
        return None
    if getattr(data.sampler, "replacement", False):  # each rank draws samples, and need not divide them
        return None
    try:
        return zlib.crc32(_described(data.dataset, _DEPTH).encode())
    except Exception:  # attributes may be properties that fail
        logger.debug("comparing data sets", exc_info=True)
        return None


def _asks_for_rank(dataset: Any) -> bool:
    """Return whether the code of the data set, or of one inside it, contains a name such as rank or world_size."""
    inner = [value for value in getattr(dataset, "__dict__", {}).values() if hasattr(value, "__getitem__")]
    for owner in (dataset, *inner):
        for method in vars(type(owner)).values():
            code = getattr(method, "__code__", None)
            if inspect.iscode(code) and any(
                "rank" in name or "world" in name for name in (*code.co_names, *code.co_varnames)
            ):
                return True
    return False


def _described(value: Any, depth: int) -> str:
    """Describe a value such that different data has different descriptions."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)[:1000]
    if isinstance(value, torch.Tensor) or (hasattr(value, "dtype") and hasattr(value, "shape")):
        flat = value.reshape(-1)
        return f"{type(value).__name__} {tuple(value.shape)} {flat[:8].tolist()} {flat[-8:].tolist()}"
    if depth == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        some = list(value.items())[:32]
        return f"{len(value)} {[(repr(name)[:100], _described(one, depth - 1)) for name, one in some]}"
    if isinstance(value, list | tuple | range):
        ends = [*value[:4], *value[-4:]]
        return f"{len(value)} {[_described(one, depth - 1) for one in ends]}"
    attributes = getattr(value, "__dict__", {})
    length = len(value) if hasattr(value, "__len__") else ""
    return f"{type(value).__qualname__} {length} {_described(attributes, depth - 1)}"
