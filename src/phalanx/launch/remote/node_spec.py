"""What `run --hosts` and the nodes that it starts say to each other: a line of JSON each, over ssh's stdin and stdout.

starter                        phalanx node
  | ------- Order -------------> |   everything that it has to know; nothing of it is on a command line
  | <------ Ready | Refused ---- |   once it has checked what it can check alone; node 0 tells where it listens
  | ------- Go ----------------> |   where node 0 listens: from here on the control plane does the rest
  | ------- Signal | Fail -----> |   to node 0, where it does not run in the starter itself
  | ------- (the end) ---------> |   the connection is cut, or the starter is gone: end what runs there
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from phalanx.contract.variables import ERROR_FORMAT

MARK = b"phalanx-node "  # before an answer: login shells write what they like to stdout
LIMIT = 1 << 24  # bytes of a line: arguments and variables of a process may be megabytes

# What a rank needs from the shell of the user, and a login over ssh does not set. PATH, CUDA_VISIBLE_DEVICES and the
# like describe a machine, and stay there; for everything else there is --env.
_PREFIXES = (
    *("NCCL_", "GLOO_", "TP_", "UCX_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "PYTHON"),
)
_NAMES = (
    *("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "CUDA_MODULE_LOADING", "TOKENIZERS_PARALLELISM"),
    ERROR_FORMAT,
)
_ABOUT_A_MACHINE = ("PYTHONHOME", "PYTHONSTARTUP", "PYTHON_EXEC")

Port = Annotated[int, Meta(ge=0, le=65535)]


class SshMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", omit_defaults=True):
    pass


class NodeSpec(SshMessage, frozen=True, kw_only=True, tag="order"):
    node: int
    nodes: int
    token: str  # hexadecimal
    options: dict[str, Any]  # RunOptions, as cli/options reads and checks them
    digest: str  # of the script; empty: it is not a file
    versions: dict[str, str]
    env: dict[str, str]  # what ranks inherit from the starter's shell
    home: str  # PHALANX_HOME of the starter, for a host that has none of its own
    names: tuple[str, ...]  # of all hosts
    promised: tuple[int, ...]
    host: str | None  # of node 0
    port: Port  # the one that the user wants node 0 to listen on


class Go(SshMessage, frozen=True, kw_only=True, tag="go"):
    addresses: tuple[str, ...]
    port: Port


class Signal(SshMessage, frozen=True, kw_only=True, tag="signal"):
    number: Annotated[int, Meta(ge=1, le=64)]


class Fail(SshMessage, frozen=True, kw_only=True, tag="fail"):
    """A host that will not come."""

    host: str
    what: str
    details: tuple[str, ...] = ()
    fix: str = ""


class Ready(SshMessage, frozen=True, kw_only=True, tag="ready"):
    host: str
    pid: int
    addresses: tuple[str, ...] = ()  # of node 0
    port: Port = 0


class NodeRefused(SshMessage, frozen=True, kw_only=True, tag="refused"):
    what: str
    details: tuple[str, ...] = ()
    fix: str = ""


ToNode = NodeSpec | Go | Signal | Fail
FromNode = Ready | NodeRefused


def encode(word: SshMessage) -> bytes:
    # Not msgspec's own JSON: an argument may hold bytes that are no UTF-8, which Python keeps as lone surrogates.
    return json.dumps(msgspec.to_builtins(word, str_keys=True)).encode() + b"\n"


def to_node(line: bytes) -> ToNode:
    """Raises ValueError."""
    word: ToNode = msgspec.convert(json.loads(line), ToNode)
    return word


def from_node(line: bytes) -> FromNode:
    """Raises ValueError."""
    word: FromNode = msgspec.convert(json.loads(line), FromNode)
    return word


def chosen(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that go along."""
    return {
        name: value
        for name, value in environ.items()
        if name in _NAMES or (name.startswith(_PREFIXES) and name not in _ABOUT_A_MACHINE)
    }
