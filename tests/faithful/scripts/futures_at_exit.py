"""Pools of concurrent.futures with work left at exit: it is done before the interpreter ends."""

import concurrent.futures
import os
import threading

rank = os.environ["RANK"]
main_ends = threading.Event()


def write(number):
    main_ends.wait()
    with open(f"future-{rank}-{number}.txt", "w") as file:
        file.write(f"{number * number}\n")
    return number


def square(number):
    return number * number


if __name__ == "__main__":
    processes = concurrent.futures.ProcessPoolExecutor(2)
    print(list(processes.map(square, range(10))))
    threads = concurrent.futures.ThreadPoolExecutor(2)
    pending = [threads.submit(write, number) for number in range(6)]
    print(sum(future.done() for future in pending))
    main_ends.set()
