"""multiprocessing with a fork server."""

import multiprocessing
import os


def child(connection):
    connection.send((os.environ["LOCAL_RANK"], __name__))
    connection.close()


def fail():
    raise SystemExit(5)


if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=child, args=(theirs,))
    process.start()
    print(ours.recv())
    process.join()
    failing = multiprocessing.Process(target=fail)
    failing.start()
    failing.join()
    print(process.exitcode, failing.exitcode)
