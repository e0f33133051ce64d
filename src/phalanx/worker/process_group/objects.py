"""Plain objects and tensors as bytes and back. Never pickle: data from another process must not be code."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx.errors import UsageError

if TYPE_CHECKING:
    import torch

TENSOR = 1
TUPLE = 2
PLAIN = "None, bool, int, float, str, bytes, list, tuple, dict and tensors"


def encode(obj: Any) -> bytes:
    """Return the object as bytes; raise UsageError if it cannot be sent."""
    try:
        return msgspec.msgpack.encode(_plain(obj, "the object"))
    except OverflowError as error:
        raise UsageError(f"a number is too large to be sent: {error}", fix="send it as a text: str(number)") from None
    except RecursionError:
        raise UsageError("the object contains itself, or is nested too deeply to be sent") from None


def decode(data: bytes | memoryview, device: torch.device | None = None) -> Any:
    """Return the object. `device`: for tensors that were on an accelerator. Raises ValueError if it is not one."""

    def extended(code: int, body: memoryview) -> Any:
        if code == TUPLE:
            return tuple(msgspec.msgpack.decode(body, ext_hook=extended))
        if code != TENSOR:
            raise ValueError(f"an unknown kind of object: {code}")
        return _tensor(body, device)

    try:
        return msgspec.msgpack.decode(data, ext_hook=extended)
    except (TypeError, RuntimeError, RecursionError, struct.error) as error:
        raise ValueError(f"what was received is not an object: {error}") from None


def _plain(obj: Any, where: str) -> Any:
    kind = type(obj)
    if obj is None or kind in (bool, int, float, str, bytes):
        return obj
    if kind in (list, tuple):
        items = [_plain(item, f"{where}[{place}]") for place, item in enumerate(obj)]
        return items if kind is list else msgspec.msgpack.Ext(TUPLE, msgspec.msgpack.encode(items))
    if isinstance(obj, dict):  # includes a module's state_dict
        for key in obj:
            if type(key) not in (str, int, bool, float, bytes):
                raise UsageError(
                    f"a key of {where} is a {type(key).__name__}, which is not sent", details=[_expected()]
                )
        return {key: _plain(value, f"{where}[{key!r}]") for key, value in obj.items()}
    import torch

    if isinstance(obj, torch.Tensor):
        return _ext(obj, where)
    raise UsageError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which is not sent between processes",
        details=[_expected()],
        fix="send its parts: a dict, obj.state_dict(), float(x), x.tolist()",
    )


def _expected() -> str:
    return f"expected {PLAIN}: plain data, because nothing that comes from another process is unpickled"


def _ext(tensor: torch.Tensor, where: str) -> msgspec.msgpack.Ext:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UsageError(f"{where} is a sparse or quantized tensor, which is not sent", fix="send tensor.to_dense()")
    data = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    head = msgspec.msgpack.encode(
        [str(data.dtype).removeprefix("torch."), list(data.shape), tensor.device.type != "cpu"]
    )
    # A single element is contiguous with any stride, but could not be viewed as bytes.
    flat = data.view(-1).as_strided((data.numel(),), (1,))
    body = flat.view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return msgspec.msgpack.Ext(TENSOR, struct.pack("<I", len(head)) + head + body)


def _tensor(body: memoryview, device: torch.device | None) -> torch.Tensor:
    import torch

    size = struct.unpack_from("<I", body)[0]
    name, shape, accelerated = msgspec.msgpack.decode(body[4 : 4 + size], type=tuple[str, list[int], bool])
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"an unknown type of tensor: {name}")
    raw = bytearray(body[4 + size :])
    if not raw and 0 not in shape:
        raise ValueError(f"a tensor of shape {shape} without data")
    if raw:
        tensor = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    return tensor.to(device) if accelerated and device is not None else tensor
