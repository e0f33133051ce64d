"""os._exit: no finally, no atexit, nothing flushed."""

import atexit
import os

log = open("log.txt", "w")
atexit.register(print, "never")


def main():
    log.write("lost\n")
    print("leaves")
    try:
        os._exit(7)
    finally:
        print("never")


main()
