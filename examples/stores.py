"""phalanx run -g 4 examples/stores.py: keys and values that ranks share: TCPStore, FileStore, HashStore, PrefixStore"""

import os
import tempfile
import threading
from datetime import timedelta

import torch.distributed as dist

# The store by which the ranks would form a group. Here it is all that is needed: there is no group.
meeting, rank, world = next(iter(dist.rendezvous("env://")))


def try_out(store: dist.Store, rank: int, world: int) -> int:
    """What every store can do, done by `world` ranks at once."""
    if rank == 0:
        store.set("colour", "red")
    store.wait(["colour"], timedelta(seconds=30))  # until another rank sets it
    assert store.get("colour") == b"red"  # waits as well

    here = store.add("here", 1)  # atomic: each rank gets another number, 1, 2, 3 or 4
    assert 1 <= here <= world
    if here == world:
        store.set("all here", "yes")
    store.wait(["all here"])
    assert store.add("here", 0) == world

    # One wins: the value is set only where it is what was expected, here: nothing yet.
    winner = int(store.compare_set("winner", "", str(rank)))
    assert int(store.get("winner")) == winner
    assert store.compare_set("winner", "nobody", str(rank)) == str(winner).encode()

    assert store.check(["colour"])
    assert not store.check(["no such key"])
    return winner


# Over the network: one process serves, on a port that is free; the others learn it from the meeting store.
if rank == 0:
    tcp = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    meeting.set("port", str(tcp.port))
    meeting.set("file", tempfile.mkdtemp(prefix="stores-") + "/store")
else:
    tcp = dist.TCPStore(os.environ["MASTER_ADDR"], int(meeting.get("port")), is_master=False)
by_tcp = try_out(tcp, rank, world)

# Two who use one store keep out of each other's way with a prefix.
by_prefix = try_out(dist.PrefixStore("second", tcp), rank, world)
tcp.multi_set([f"a{rank}", f"b{rank}"], ["1", "2"])
assert tcp.multi_get([f"a{rank}", f"b{rank}"]) == [b"1", b"2"]
assert tcp.delete_key(f"a{rank}")
assert not tcp.check([f"a{rank}"])

# In a file that all can lock and write. The last to close it removes it.
path = meeting.get("file").decode()
file = dist.FileStore(path, world)
by_file = try_out(file, rank, world)

# In memory, for threads of one process.
memory = dist.HashStore()
won: list[int] = []
threads = [threading.Thread(target=lambda r=r: won.append(try_out(memory, r, 3))) for r in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(set(won)) == 1
try:
    memory.wait(["no such key"], timedelta(milliseconds=10))
    timed_out = False
except RuntimeError:
    timed_out = True
assert timed_out

print(f"rank {rank} of {world}: won by TCP {by_tcp}, prefix {by_prefix}, file {by_file}; 3 threads agree")

# The rank with the server exits last: the others still use the store.
del file
if meeting.add("done", 1) == world:
    meeting.set("all done", "yes")
if rank == 0:
    meeting.wait(["all done"])
    os.rmdir(os.path.dirname(path))
