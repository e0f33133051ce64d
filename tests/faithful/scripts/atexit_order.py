"""atexit functions from several places. One fails, and one registers another."""

import atexit
import os
import sys


def say(text):
    print(text)
    with open(f"exit-{os.environ['RANK']}.txt", "a") as file:
        file.write(text + "\n")


def late():
    say("late")
    atexit.register(say, "registered at exit")


def fails():
    raise ValueError("in atexit")


atexit.register(say, "first in, last out")
atexit.register(fails)
atexit.register(late)
atexit.register(say, "taken back")
atexit.unregister(print)
atexit.register(sys.stdout.flush)
say("main ends")
