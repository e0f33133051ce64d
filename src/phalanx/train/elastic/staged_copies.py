"""Copies between the memory of a GPU and a file in memory.

Mapping a file of 400 MB takes longer than all copies: each of its 100,000 pages is mapped separately. So a few threads
read and write the file, with a buffer between it and the GPU. The buffers are not page-locked: that would wait until
the driver has freed the memory of the dead rank.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from phalanx.errors import JoinError

BUFFER = 4 << 20  # bytes, of each thread
_THREADS = 4

Piece = tuple[torch.Tensor, int]  # bytes, and their position in the file


def write(fd: int, tensors: Sequence[Piece]) -> None:
    """Write each tensor at its position in the file."""

    def copy(buffer: torch.Tensor, piece: torch.Tensor, place: int) -> None:
        buffer.copy_(piece)
        view = memory(buffer)
        while view:
            count = os.pwrite(fd, view, place)
            view, place = view[count:], place + count

    _copy_all([(tensor.detach().contiguous(), place) for tensor, place in tensors], copy)


def read(fd: int, targets: Sequence[Piece]) -> None:
    """Fill each target from its position in the file."""

    def copy(buffer: torch.Tensor, piece: torch.Tensor, place: int) -> None:
        view = memory(buffer)
        while view:
            count = os.preadv(fd, [view], place)
            if not count:
                raise JoinError("the state that was handed over ends in the middle of a tensor")
            view, place = view[count:], place + count
        piece.copy_(buffer)

    with torch.no_grad():
        filled = [(target, _contiguous(target.detach()), place) for target, place in targets]
        _copy_all([(near, place) for _, near, place in filled], copy)
        for target, near, _ in filled:
            if near.data_ptr() != target.data_ptr():
                target.copy_(near)


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor of any type on the CPU. The tensor must outlive them."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


def _contiguous(target: torch.Tensor) -> torch.Tensor:
    return target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)


def _copy_all(tensors: Sequence[Piece], copy: Callable[[torch.Tensor, torch.Tensor, int], None]) -> None:
    """Call `copy` with a buffer for all pieces of the tensors, in a few threads."""
    pieces = [*_pieces(tensors)]
    gpu = next((tensor.device for tensor, _ in tensors if tensor.is_cuda), None)
    rest, taking = iter(pieces), threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad(), torch.cuda.device(gpu if gpu is not None else -1):  # -1: none
                buffer = torch.empty(BUFFER, dtype=torch.uint8)
                while not errors:
                    with taking:
                        piece, place = next(rest, (None, 0))
                    if piece is None:
                        return
                    copy(buffer[: len(piece)], piece, place)
        except BaseException as error:  # raised below
            errors.append(error)

    # Daemons, unlike the threads of an executor: a copy that never ends must not keep a process alive.
    threads = [threading.Thread(target=run, name="phalanx-copy", daemon=True) for _ in pieces[:_THREADS]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _pieces(tensors: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the bytes of contiguous tensors in pieces that fit into a buffer."""
    for tensor, place in tensors:
        if tensor.numel():
            for number, piece in enumerate(tensor.view(-1).view(torch.uint8).split(BUFFER)):
                yield piece, place + number * BUFFER
