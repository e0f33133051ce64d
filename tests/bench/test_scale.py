"""`phalanx bench scale`: how it evaluates measurements, and one small real run."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from benchmarks.scale import frames
from benchmarks.scale.benchmark import main, remarks, targets
from benchmarks.scale.measurement import ScaleSample, Second
from benchmarks.scale.node import SimulatedNode
from phalanx.control import messages, tls
from phalanx.errors import OptionError
from tests.control.parties import TOKEN, arrival
from tests.kit.cli import phalanx
from tests.kit.placements import placement


def sample(
    *memory: int,
    cores: float = 0.5,
    regroups: tuple[float, ...] = (0.5, 1.0),
    descriptors: int = 0,  # opened per second
    **more: object,
) -> ScaleSample:
    seconds = tuple(
        Second(float(at), cores, size << 20, at != 3, 100 + at * descriptors) for at, size in enumerate(memory)
    )
    return ScaleSample(4096, 32768, seconds=seconds, regroups=regroups, **more)  # type: ignore[arg-type]


def met(one: ScaleSample) -> list[bool | None]:
    return [target.met for target in targets(one)]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (sample(*[500] * 40), [True, True, True, True]),
        (sample(*[500] * 40, cores=1.2), [False, True, True, True]),
        (sample(*[500] * 40, 1100), [True, False, True, True]),
        (sample(*[500] * 40, regroups=(0.5, 3.1)), [True, True, False, True]),
        (sample(*range(300, 500, 5)), [True, True, True, False]),
        (sample(*[500] * 40, descriptors=1), [True, True, True, False]),
        (sample(500, 500, regroups=()), [True, True, None, None]),
        (ScaleSample(4096, 32768, failure="the leader ended"), [None] * 4),
    ],
)
def test_the_targets(one: ScaleSample, expected: list[bool | None]) -> None:
    assert met(one) == expected


def test_a_starved_simulator_is_reported() -> None:
    assert remarks(sample(500)) == []
    assert "late" in remarks(sample(500, late=2.5))[0]
    assert "dropped 1" in remarks(sample(500, lost=("node 3: gone",)))[0]


def test_frames_are_what_a_leader_reads() -> None:
    """Also if several frames arrive in pieces."""
    long = messages.NoteMessage(text="x" * 40_000)
    sent = [messages.Pong(ping=1.0, time=2.0), messages.Log(rank=3, stream=1, data=b"y" * 200), long]
    unmasked = bytearray()
    for message in sent:
        frame = bytearray(frames.frame(message))
        head = {126: 4, 127: 10}.get(frame[1] & 0x7F, 2)
        frame[1] &= 0x7F  # a server does not mask frames
        unmasked += frame[:head] + frame[head + 4 :]
    data, found = bytearray(), []
    for at in range(0, len(unmasked), 999):
        data += unmasked[at : at + 999]
        found += [messages.from_member.decode(content) for content in frames.parse(data)]
    assert found == sent
    assert not data


@pytest.mark.parametrize("argv", [["--nodes", "1"], ["--nodes", "many"], ["--ranks-per-node", "0"], ["--seconds", "1"]])
def test_invalid_options_are_refused(argv: list[str]) -> None:
    with pytest.raises(OptionError):
        main(argv, {})


@pytest.mark.extended
def test_a_real_leader_of_64_nodes(tmp_path: Path) -> None:
    """The kit checks that no process and no file is left."""
    file = tmp_path / "scale.json"
    done = phalanx(
        "bench", "scale", "--nodes", "64", "--ranks-per-node", "2", "--seconds", "6", "--json", str(file), timeout=300
    )
    assert "One leader" in done.out, done.out + done.err
    assert "64 nodes: new ranks on all nodes" in done.out
    (found,) = json.loads(file.read_text())["samples"]
    assert not found["failure"]
    assert not found["lost"]
    assert (found["nodes"], found["ranks"]) == (64, 128)
    assert found["cores"] > 0
    assert min(second["memory"] for second in found["seconds"]) > 1 << 20
    assert min(second["descriptors"] for second in found["seconds"]) > 62  # one connection per node
    assert len(found["regroups"]) == 1
    assert found["regroups"][0] > 0
    assert found["pages"]["fault"]
    assert found["pages"]["verdict"]
    assert not [name for name in os.listdir(tmp_path) if name != file.name]


def test_a_simulated_node_sends_telemetry_as_a_real_one() -> None:
    """Once per period, at its own time slot, for the time at which all nodes have sampled."""
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as leader:
        node = SimulatedNode(arrival(1, slots=2), tls.client_context(TOKEN), leader.getsockname())
        node.send = sent.append  # type: ignore[method-assign]
        placements = tuple(placement(rank, 8192, node_rank=2048, node_count=4096) for rank in (4096, 4097))
        node._place = messages.StartRanks(placements=placements, topology="2*4096", store_port=1)
        late = [node.report(1_795_000_000 + at / 4, 100_123, stalled=False) for at in range(32)]
        node.close()
    content = bytearray(sent[1])
    size = int.from_bytes(content[2:4], "big")  # a long frame with an all-zero mask
    frame = messages.from_member.decode(bytes(content[8 : 8 + size]))
    assert isinstance(frame, messages.RpcFrame)
    samples = json.loads(frame.content)["samples"]
    assert len(sent) == 2
    assert [at for at, seconds in enumerate(late) if seconds > 0] == []  # its time slots are at 1.5 and 5.5 s
    assert samples[:2] == [17_950_000_040, 4.0]
    assert [len(rank[2]) for rank in samples[3]] == [40, 40]
