"""Proofs and sealed frames: what is forged, repeated, left out or turned round is noticed."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.control import channel
from phalanx.control.channel import CODE_SIZE, LEADER, MEMBER, Channel, ForgedFrameError, Nonces, prove, proven

KEY = b"k" * 32
NONCES = Nonces(b"l" * 32, b"m" * 32)


def pair(nonces: Nonces = NONCES, key: bytes = KEY) -> tuple[Channel, Channel]:
    return Channel(key, nonces, leads=True), Channel(key, nonces, leads=False)


def test_nonces_are_large_and_new() -> None:
    drawn = [channel.nonce() for _ in range(1000)]
    assert {len(nonce) for nonce in drawn} == {32}
    assert len(set(drawn)) == 1000


@pytest.mark.parametrize(
    ("key", "who", "nonces", "words"),
    [
        (b"o" * 32, MEMBER, NONCES, b"words"),
        (b"", MEMBER, NONCES, b"words"),
        (KEY, LEADER, NONCES, b"words"),
        (KEY, MEMBER, Nonces(b"x" * 32, NONCES.member), b"words"),
        (KEY, MEMBER, Nonces(NONCES.leader, b"x" * 32), b"words"),
        (KEY, MEMBER, Nonces(NONCES.member, NONCES.leader), b"words"),
        (KEY, MEMBER, NONCES, b"word"),
        (KEY, MEMBER, NONCES, b""),
    ],
)
def test_a_proof_is_of_one_thing(key: bytes, who: bytes, nonces: Nonces, words: bytes) -> None:
    proof = prove(KEY, MEMBER, NONCES, b"words")
    assert len(proof) == 32
    assert proven(proof, KEY, MEMBER, NONCES, b"words")
    assert not proven(proof, key, who, nonces, words)


def test_every_part_of_a_proof_has_a_fixed_length() -> None:
    # Else the end of one part could be taken for the beginning of the next.
    assert len({len(who) for who in (MEMBER, LEADER, b"phalanx onward", b"phalanx upward")}) == 1


@pytest.mark.parametrize("proof", [b"", b"x", b"x" * 31, b"x" * 32])
def test_what_is_no_proof(proof: bytes) -> None:
    assert not proven(proof, KEY, MEMBER, NONCES, b"words")


def test_codes_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    leader, member = pair()
    assert proven(prove(KEY, MEMBER, NONCES, b""), KEY, MEMBER, NONCES, b"")
    member.open(leader.seal(b"content"))
    assert [len(one) for one, _ in compared] == [32, CODE_SIZE]


@given(st.lists(st.binary(max_size=100), max_size=5), st.lists(st.binary(max_size=100), max_size=5))
def test_what_is_sealed_is_opened(down: list[bytes], up: list[bytes]) -> None:
    leader, member = pair()
    assert [member.open(leader.seal(content)) for content in down] == down
    assert [leader.open(member.seal(content)) for content in up] == up


@given(st.binary(max_size=40), st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_a_changed_byte_is_noticed(content: bytes, place: int, change: int) -> None:
    leader, member = pair()
    frame = bytearray(leader.seal(content))
    frame[place % len(frame)] ^= change
    with pytest.raises(ForgedFrameError):
        member.open(bytes(frame))


@given(st.binary(max_size=80))
def test_nobody_guesses_a_frame(frame: bytes) -> None:
    with pytest.raises(ForgedFrameError):
        pair()[0].open(frame)


def test_a_frame_repeated_left_out_or_out_of_turn_is_noticed() -> None:
    leader, member = pair()
    first, second = leader.seal(b"a"), leader.seal(b"b")
    with pytest.raises(ForgedFrameError):
        pair()[1].open(second)  # without the first
    member.open(first)
    with pytest.raises(ForgedFrameError):
        member.open(first)


def test_a_frame_of_another_place_is_noticed() -> None:
    leader, member = pair()
    with pytest.raises(ForgedFrameError):
        leader.open(leader.seal(b"mine"))  # sent back to where it came from
    other, _ = pair(Nonces(channel.nonce(), NONCES.member))
    with pytest.raises(ForgedFrameError):
        member.open(other.seal(b"of an earlier connection"))
    stranger, _ = pair(key=b"o" * 32)
    with pytest.raises(ForgedFrameError):
        pair()[1].open(stranger.seal(b"with another token"))
