"""multiprocessing with fork: processes, a pool, a queue and a lock."""

import multiprocessing
import os

rank = int(os.environ["RANK"])
table = {"before": "the fork"}


def child(number, queue, lock, total):
    with lock:
        total.value += number
    queue.put((number, table["before"], multiprocessing.current_process().name))


def cube(number):
    return number**3


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue, lock, total = context.Queue(), context.Lock(), context.Value("i", 0)
    children = [context.Process(target=child, args=(n, queue, lock, total)) for n in range(3)]
    for process in children:
        process.start()
    print(sorted(queue.get() for _ in children))
    for process in children:
        process.join()
    print(total.value, [process.exitcode for process in children])
    with context.Pool(2) as pool:
        print(pool.map(cube, range(10)))
    print(multiprocessing.get_start_method(), multiprocessing.parent_process())
