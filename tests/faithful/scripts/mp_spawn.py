"""multiprocessing with spawn: the children import this file again."""

import multiprocessing
import os

print("imported as", __name__, "in rank", os.environ["RANK"])


def child(queue, number):
    queue.put((number, __name__, os.environ["RANK"], multiprocessing.current_process().name))


def cube(number):
    return number**3


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, 7))
    process.start()
    print(queue.get())
    process.join()
    with context.Pool(1) as pool:
        print(pool.map(cube, range(5)))
    print(process.exitcode)
