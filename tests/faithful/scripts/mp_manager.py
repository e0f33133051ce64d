"""A manager's dictionary and shared memory, of which the script never unlinks one block."""

import multiprocessing
import os
from multiprocessing import shared_memory

rank = os.environ["RANK"]


def fill(values, name):
    block = shared_memory.SharedMemory(name)
    block.buf[:4] = bytes([1, 2, 3, 4])
    block.close()
    values["filled by"] = multiprocessing.current_process().name


if __name__ == "__main__":
    with multiprocessing.Manager() as manager:
        values = manager.dict(rank=rank)
        block = shared_memory.SharedMemory(create=True, size=16)
        process = multiprocessing.Process(target=fill, args=(values, block.name))
        process.start()
        process.join()
        print(dict(values), bytes(block.buf[:4]), process.exitcode)
        block.close()
        block.unlink()
    numbers = shared_memory.ShareableList([1, 2.5, "three"])
    print(list(numbers))
    numbers.shm.close()
    numbers.shm.unlink()
