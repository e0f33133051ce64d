"""Who can write the values that phalanx reads from the store."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore

from phalanx.contract.ranks.placement import PartialPlacement
from phalanx.contract.variables import RUN_FOLDER
from phalanx.errors import JoinError
from phalanx.forkserver import signed_store
from phalanx.forkserver.signed_store import KEY_FILE, ForgedValueError, SignedStore
from phalanx.worker.rendezvous import roll_call
from phalanx.worker.rendezvous.roll_call import Participant

KEY = b"k" * 32


@pytest.mark.parametrize("key", [KEY, b""])
def test_values_come_back_with_a_key_and_without(key: bytes, tmp_path: Path) -> None:
    for bare in (HashStore(), PrefixStore("some", HashStore()), FileStore(str(tmp_path / f"store{len(key)}"), 1)):
        store = SignedStore(bare, "a group", key)
        store.set("text", "ü")
        store.at("below").set("bytes", b"\x00\xff")
        assert store.get("text") == "ü".encode()
        assert store.at("below").get("bytes") == b"\x00\xff"
        assert store.multi_get(["text", "below/bytes"]) == ["ü".encode(), b"\x00\xff"]
        assert [store.set_first("first", value) for value in ("one", "two")] == [b"one", b"one"]
        assert [store.add("count", 2), store.add("count", 0)] == [2, 2]
        assert store.check(["text", "below/bytes"])
        store.wait(["text"], timedelta(seconds=60))
        assert bare.get("text") == "ü".encode() or key


def test_a_value_without_a_valid_mac_is_refused() -> None:
    bare = HashStore()
    ours = SignedStore(bare, "a group", KEY)
    ours.set("from 0", "100 5")
    copied = bare.get("from 0")
    for forged in (b"100 6", b"", copied + b"6", copied[:-1], bytes(64) + b"100 5"):
        bare.set("from 0", forged)
        with pytest.raises(ForgedValueError, match="from 0 in the store of this run was not set by one of its ranks"):
            ours.get("from 0")
        with pytest.raises(ForgedValueError):
            ours.multi_get(["from 0"])
    bare.set("first", "forged")
    with pytest.raises(ForgedValueError):
        ours.set_first("first", "ours")


def test_a_value_is_of_no_use_elsewhere() -> None:
    """It is not accepted under another key, nor in another group, generation or run."""
    bare = HashStore()
    SignedStore(bare, "generation 1", KEY).set("from 0", "100 5")
    bare.set("from 1", bare.get("from 0"))
    for store, key in [
        (SignedStore(bare, "generation 1", KEY), "from 1"),
        (SignedStore(bare, "generation 2", KEY), "from 0"),
        (SignedStore(bare, "generation 1", b"l" * 32), "from 0"),
    ]:
        with pytest.raises(ForgedValueError):
            store.get(key)
    assert SignedStore(bare, "generation 1", KEY).get("from 0") == b"100 5"


def test_the_key_is_the_runs_and_only_its_user_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_FOLDER, raising=False)
    assert signed_store.run_key() is None
    monkeypatch.setenv(RUN_FOLDER, str(tmp_path))
    assert signed_store.run_key() is None
    signed_store.write_key(str(tmp_path), KEY)
    signed_store.write_key(str(tmp_path), b"another")  # by the next attempt
    assert signed_store.run_key() == KEY
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_a_rank_that_reads_a_forged_presence_says_so() -> None:
    bare = HashStore()
    people = [Participant(PartialPlacement(rank=rank, world_size=2), "host", "host", 100 + rank) for rank in range(2)]
    SignedStore(bare, "", b"").set("here/1", roll_call.msgspec.msgpack.encode(people[1]))
    with pytest.raises(JoinError, match=r"rank 0 does not trust what it reads in the store: here/1 .* was not set by"):
        roll_call.call(SignedStore(bare, "", KEY), people[0], 60, place="node1 port 4000")
