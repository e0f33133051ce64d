"""Messages between `run --hosts` and the nodes that it starts: one line of JSON each, over ssh's stdin and stdout.

starter                            phalanx node
  | ------- NodeSpec --------------> |   all settings; none of them is on a command line
  | <------ Ready | NodeRefused ---- |   after its own checks; node 0 reports where it listens
  | ------- Go --------------------> |   where node 0 listens: the control plane does the rest
  | ------- Signal | Fail ---------> |   to node 0, if it does not run in the starter itself
  | ------- (end of input) --------> |   the connection or the starter is gone: end what runs there
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from phalanx.contract.variables import ERROR_FORMAT

MARK = b"phalanx-node "  # before an answer: login shells may write to stdout too
LIMIT = 1 << 24  # bytes of a line: arguments and variables may be megabytes

# Variables of the user's shell that ranks need and a login over ssh does not set. PATH, CUDA_VISIBLE_DEVICES and the
# like describe a host, and are not copied; for everything else there is --env.
_PREFIXES = (
    *("NCCL_", "GLOO_", "TP_", "UCX_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "PYTHON"),
)
_NAMES = (
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "TOKENIZERS_PARALLELISM"),
    ERROR_FORMAT,
)
_OF_HOST = ("PYTHONHOME", "PYTHONSTARTUP", "PYTHON_EXEC")

Port = Annotated[int, Meta(ge=0, le=65535)]


class SshMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", omit_defaults=True):
    """Base of all messages."""


class NodeSpec(SshMessage, frozen=True, kw_only=True, tag="order"):
    """Everything that a node needs to know to take part."""

    node: int
    nodes: int
    token: str  # hexadecimal
    options: dict[str, Any]  # RunOptions, as cli/options reads and checks them
    digest: str  # of the script; empty: it is not a file
    versions: dict[str, str]
    env: dict[str, str]  # what ranks inherit from the starter's shell
    home: str  # PHALANX_HOME of the starter, for a host without one
    names: tuple[str, ...]  # of all hosts
    promised: tuple[int, ...]
    host: str | None  # of node 0
    port: Port  # on which the user wants node 0 to listen


class Go(SshMessage, frozen=True, kw_only=True, tag="go"):
    """Where node 0 listens."""

    addresses: tuple[str, ...]
    port: Port


class Signal(SshMessage, frozen=True, kw_only=True, tag="signal"):
    """A signal to handle."""

    number: Annotated[int, Meta(ge=1, le=64)]


class Fail(SshMessage, frozen=True, kw_only=True, tag="fail"):
    """A host that cannot take part."""

    host: str
    what: str
    details: tuple[str, ...] = ()
    fix: str = ""


class Ready(SshMessage, frozen=True, kw_only=True, tag="ready"):
    """The node can take part."""

    host: str
    pid: int
    addresses: tuple[str, ...] = ()  # of node 0
    port: Port = 0


class NodeRefused(SshMessage, frozen=True, kw_only=True, tag="refused"):
    """The node cannot take part."""

    what: str
    details: tuple[str, ...] = ()
    fix: str = ""


ToNode = NodeSpec | Go | Signal | Fail
FromNode = Ready | NodeRefused


def encode(message: SshMessage) -> bytes:
    """Encode a message as one line."""
    # Not msgspec's JSON: an argument may contain bytes that are not UTF-8, which Python keeps as lone surrogates.
    return json.dumps(msgspec.to_builtins(message, str_keys=True)).encode() + b"\n"


def to_node(line: bytes) -> ToNode:
    """Decode a message to a node. Raises ValueError."""
    message: ToNode = _decode(line, ToNode)
    return message


def from_node(line: bytes) -> FromNode:
    """Decode a message from a node. Raises ValueError."""
    message: FromNode = _decode(line, FromNode)
    return message


def _decode(line: bytes, kind: Any) -> Any:
    try:
        return msgspec.convert(json.loads(line), kind)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def chosen(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are copied to the hosts."""
    return {
        name: value
        for name, value in environ.items()
        if name in _NAMES or (name.startswith(_PREFIXES) and name not in _OF_HOST)
    }
