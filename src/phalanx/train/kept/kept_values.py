"""Plain values that are kept with a training: `run.state["best"] = accuracy`.

They are saved and restored with the model, and are part of checkpoints, snapshots and handovers. As with the model,
every rank should set the same values; where ranks differ, those of rank 0 count when they are restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from phalanx.errors import CheckpointError, UsageError

_NUMBERS = (bool, int, float)
_ATOMS = (*_NUMBERS, str, bytes, type(None))
_LARGEST = 1 << 20  # bytes of a tensor: values are written as text, by rank 0 alone
_DEEPEST = 50
_TENSOR = "$kept tensor"


@dataclass(slots=True)
class _Commit:
    """The values at the last commit. Apart from `KeptValues`, whose attributes are slow to set."""

    values: dict[str, Any] = field(default_factory=dict)
    restored: frozenset[str] = frozenset()  # names of values that a default does not replace
    stepped: bool = False  # a step was committed


class KeptValues(MutableMapping[str, Any]):
    """`run.state`: a dict of plain values. It stores the values that belong to the last committed step.

    After a failure the script repeats what it did after that step: values that it had set there are reset first.
    """

    __slots__ = ("_commit", "_values")

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._commit = _Commit()

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise KeyError(f'run.state has no "{name}"; it has: {", ".join(self._values) or "nothing"}') from None

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise UsageError(f"run.state[{name!r}]: names are strings", fix=f'run.state["{name}"] = …')
        self._values[name] = checked(value, name)

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    if not TYPE_CHECKING:  # values are items, and the attributes are few

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f'run.state has no attribute {name!r}: run.state["{name}"]', name=name, obj=self)

        def __setattr__(self, name: str, value: Any) -> None:
            if not name.startswith("_"):
                raise AttributeError(f'run.state.{name} is not kept: run.state["{name}"] = …', name=name, obj=self)
            object.__setattr__(self, name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"run.state: {self._values!r}"

    def give(self, values: Mapping[str, Any]) -> None:
        """Set the values of `run.keep`. Before the loop these are defaults, which do not replace restored values."""
        self.update({name: value for name, value in values.items() if name not in self._commit.restored})

    def commit(self, *, stepped: bool = False) -> None:
        """Store the current values: the code that has set them is not repeated after a failure. `stepped`: a step is
        committed, and the script may set more for it until it requests the next batch.
        """
        last = self._commit
        last.stepped = stepped
        last.restored = frozenset()  # the loop has begun
        if self._values or last.values:
            last.values = {name: copied(value, name) for name, value in self._values.items()}

    def commit_after_step(self) -> None:
        """Store the values when the next batch is requested, if the step of the current one is committed."""
        if self._commit.stepped:
            self.commit()

    @property
    def committed(self) -> CommittedValues:
        """The values of the last committed step, for another rank."""
        return CommittedValues(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the values, for a checkpoint."""
        return packed(self._values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore values. One that was not saved keeps its current value, which is the script's default."""
        self._values.update({str(name): _unpacked(value) for name, value in state.items()})
        self.commit()
        self._commit.restored = frozenset(str(name) for name in state)

    def replace(self, state: Mapping[str, Any]) -> None:
        """Restore values, and drop all others."""
        self._values.clear()
        self.load_state_dict(state)


class CommittedValues:
    """The values of the last committed step at the time of the call: a prepared step may be committed late."""

    def __init__(self, values: KeptValues) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        """Return the values."""
        return packed(self._values._commit.values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: committed values do not change."""


def is_value(thing: object) -> bool:
    """Return whether `run.keep` would treat this as a value, not as an object with a state."""
    return isinstance(thing, (*_ATOMS, list, tuple, dict, torch.Tensor)) or _is_numpy_scalar(thing)


def checked(value: Any, path: str) -> Any:
    """Return a value that can be kept, or raise. Containers stay the same objects, so that a script can change them."""
    if isinstance(value, torch.Tensor) or _is_numpy_scalar(value):
        return copied(value, path)
    copied(value, path)
    return value


def copied(value: Any, path: str, depth: int = 0) -> Any:
    """Return a copy that shares nothing with the value. Raises if a part of it cannot be kept."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return _detached(value, path)
    if depth > _DEEPEST:
        raise UsageError(f"{path} is nested more than {_DEEPEST} deep", fix="a value must not contain itself")
    if type(value) in (list, tuple):
        items = (
            item if type(item) in _ATOMS else copied(item, f"{path}[{place}]", depth + 1)
            for place, item in enumerate(value)
        )
        return type(value)(items)
    if type(value) is dict:
        for key in value:
            if type(key) not in _ATOMS:
                raise UsageError(f"{path} has the key {key!r}, a {type(key).__name__}", fix="use strings or numbers")
        return {key: copied(item, f"{path}[{key!r}]", depth + 1) for key, item in value.items()}
    if _is_numpy_scalar(value):
        return value.item()
    raise refusal(value, path)


def refusal(value: object, path: str) -> UsageError:
    """Return the error for a value of a type that cannot be kept."""
    if isinstance(value, type):
        return UsageError(f"{path} is the class {value.__name__}, not an object", fix=f"{path}={value.__name__}(…)")
    details = ["expected a number, a string, a tensor, None, or a list or dict of them"]
    details += ["or an object with state_dict() and load_state_dict(): run.keep(model, optimizer)"]
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    other = "give its class both methods, or keep a number or a string in its place"
    fix = {
        "numpy.ndarray": f"run.state[{path!r}] = torch.from_numpy({path}), or {path}.tolist()",
        "torch.utils.data.dataloader.DataLoader": "data = run.loader(data), which can be kept",
    }.get(kind, "data = run.loader(dataset), and run.keep(data)" if isinstance(value, Dataset) else other)
    article = "an" if kind[:1].lower() in "aeiou" else "a"
    return UsageError(f"{path} is {article} {kind}, which cannot be kept", details=details, fix=fix)


def _is_numpy_scalar(value: object) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 and hasattr(value, "item")


def _detached(value: torch.Tensor, path: str) -> torch.Tensor:
    if value.layout is not torch.strided or value.is_meta or value.is_quantized or hasattr(value, "full_tensor"):
        raise UsageError(f"{path} is a tensor that cannot be kept as a value", fix=f"{path}.to_dense(), or a number")
    if value.nbytes > _LARGEST:
        raise UsageError(
            f"{path} is a tensor of {value.nbytes:,} bytes: values are small, at most {_LARGEST:,} bytes",
            fix=f'model.register_buffer("{path}", …), which is kept with the model',
        )
    return value.detach().clone()


# -- as JSON. Tensors are stored as bytes here, not as tensors of the state: ranks share the work of copying those, by
# name, and a rank might have a value that another rank does not have.


def packed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without tensors."""
    return {name: _packed(value, name) for name, value in values.items()}


def _packed(value: Any, path: str) -> Any:
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        flat = _detached(value, path).cpu().contiguous().reshape(-1)
        body = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), body]}
    value = copied(value, path)
    if isinstance(value, dict):
        return {key: _packed(item, f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_packed(item, f"{path}[{place}]") for place, item in enumerate(value))
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return _tensor(value[_TENSOR])
        return {key: _unpacked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_unpacked(item) for item in value)
    return value


def _tensor(parts: Any) -> torch.Tensor:
    from phalanx.train.checkpoint.format.tensorfile import dtype_of

    try:
        name, shape, body = parts
        dtype = dtype_of(name)
        flat = torch.frombuffer(bytearray(body), dtype=dtype) if body else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"a kept tensor cannot be read: {error}") from error
