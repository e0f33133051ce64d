"""What a worker that can regroup and its supervisor say to each other: one message a packet.

A plain script never calls. One that runs `phalanx.main` calls as soon as it is there, hears where it stands, and from
then on is told when somebody has died and the group forms anew.
"""

from __future__ import annotations

import msgspec

LARGEST = 1 << 16


class Here(msgspec.Struct, frozen=True, tag="here"):
    """A worker calls. Who it is, the kernel says."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """It is alive, and has committed so many steps."""

    step: int


class Going(msgspec.Struct, frozen=True, tag="going"):
    """The first step of this generation is committed: its group has formed."""

    generation: int
    step: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Its training has come to its end: it will not regroup any more."""


class World(msgspec.Struct, frozen=True, kw_only=True, tag="world"):
    """Where a worker stands from now on. A higher generation than its own: leave the group, and join this one."""

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    topology: str
    address: str  # of the store
    port: int
    why: str = ""


FromWorker = Here | Beat | Going | Done
_encoder = msgspec.json.Encoder()
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_world: msgspec.json.Decoder[World] = msgspec.json.Decoder(World)


def encode(message: FromWorker | World) -> bytes:
    return _encoder.encode(message)


def from_worker(packet: bytes) -> FromWorker:
    return _from_worker.decode(packet)


def from_supervisor(packet: bytes) -> World:
    return _world.decode(packet)
