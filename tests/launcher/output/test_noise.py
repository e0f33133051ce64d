"""Lines that torch and NCCL wrote when a rank died under four NCCL ranks (torch 2.11, NCCL 2.28.9)."""

from __future__ import annotations

import pytest

from phalanx.launcher.output.console.noise import Noise

DUMP = b"""\
[rank1]:[E1116 10:00:09.692247262 ProcessGroupNCCL.cpp:612] [Rank 1] Collective WorkNCCL(SeqNum=115, OpType=ALLREDUCE, \
NumelIn=1049600, NumelOut=1049600, Timeout(ms)=300000) raised the following async exception: NCCL error: remote \
process exited or there was a network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer localhost<44993>
Exception raised from checkForNCCLErrorsInternal at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2770 \
(most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::__cxx11::basic_string<char>) + 0x9d (0x7fe0db97305d in libc10.so)
frame #1: c10d::ProcessGroupNCCL::Watchdog::runLoop() + 0xa84 (0x7fe027307294 in libtorch_cuda.so)
frame #7: <unknown function> + 0x129ecc (0x7fe0dd529ecc in /lib/x86_64-linux-gnu/libc.so.6)

[rank1]:[E1116 10:00:09.693709419 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank 1]  failure detected \
by watchdog at work sequence id: 115 PG status: last enqueued work: 124, last completed work: 114
[rank0]:[E1116 10:01:38.311060380 ProcessGroupNCCL.cpp:733] Stack trace of the failed collective:
#0 _pre_forward from /site-packages/torch/nn/parallel/distributed.py:1584
#11 <module> from /home/user/train.py:126

[rank1]:[E1116 10:00:09.693971333 ProcessGroupNCCL.cpp:2636] [PG ID 0 PG GUID 0(default_pg) Rank 1] First PG on this \
rank to signal dumping.
"""
P2P = (
    b"[rank0]:[W1116 10:00:10.293786093 ProcessGroupNCCL.cpp:4051] Warning: [PG ID 1 PG GUID 0(default_pg) Rank 0] "
    b"An unbatched P2P op (send/recv) was called on this ProcessGroup with size 0.\n"
)


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_dumps_of_libraries_are_left_out_and_output_of_the_script_is_kept(pieces: int) -> None:
    noise = Noise()
    lines = (b"epoch 1\n" + DUMP + b"loss 0.3\n" + P2P + b"\nframe #3 of the film\nLast error: 0.2\n").splitlines(True)
    shown = b"".join(noise.without(b"".join(lines[i : i + pieces])) for i in range(0, len(lines), pieces))
    assert shown == b"epoch 1\nloss 0.3\n\nframe #3 of the film\nLast error: 0.2\n"


def test_a_line_of_the_script_in_the_middle_of_a_dump_is_shown() -> None:
    head, rest = DUMP.split(b"frame #1", 1)
    assert Noise().without(head + b"loss 0.3\n") == b"loss 0.3\n"
    assert Noise().without(b"frame #1" + rest.split(b"\n\n", 1)[0] + b"\n").startswith(b"frame #1")


def test_warnings_about_something_else_are_shown() -> None:
    line = b"[rank0]:[W1116 10:00:10.29 ProcessGroupNCCL.cpp:4051] Warning: using GPU 0 as device used here\n"
    assert Noise().without(line) == line


SPLIT = (
    b"[rank0]:[W1116 12:58:46.671616610 ProcessGroupGloo.cpp:749] Warning: Tried to pass options to "
    b"ProcessGroupGloo::split that are not ProcessGroupGloo::Options.Falling back to default options.\n"
)
STORE = (
    b"[W1116 12:58:50.653188666 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=5): Connection reset\n"
    b"Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:682 (most recent call first):\n"
    b"frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f3609d7305d in libc10.so)\n"
    b"<omitting python frames>\n"
    b"frame #19: <unknown function> + 0x2724a (0x7f6eac84524a in /lib/x86_64-linux-gnu/libc.so.6)\n"
    b"\n"
)


CONNECTING = b"[W1119 05:33:14.13 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host 127.0.0.1:4"
LOST = CONNECTING + b" - retrying (try=0, delay=413ms): Failed to recv, got 0 bytes. Connection was likely closed.\n"
WRONG = CONNECTING + b" - retrying (try=0, delay=413ms): Connection refused\n"


READS = STORE.splitlines(keepends=True)[0]
WAITS = READS.replace(b"recvValue", b"recvValueWithTimeout")


@pytest.mark.parametrize("first", [READS, WAITS, LOST], ids=["reads", "waits", "connects"])
def test_a_warning_with_a_stack_is_left_out_whole(first: bytes) -> None:
    rest = STORE.partition(b"\n")[2]
    assert Noise().without(b"one\n" + first + rest + b"two\n") == b"one\ntwo\n"


def test_a_store_that_cannot_be_reached_is_shown() -> None:
    assert Noise().without(WRONG) == WRONG


def test_an_empty_line_behind_a_warning_is_the_scripts() -> None:
    assert Noise().without(SPLIT + b"\nthree\n") == b"\nthree\n"
