"""weakref.finalize, with and without atexit, and callbacks of weak references."""

import os
import weakref


class Model:
    def __init__(self, name):
        self.name = name


def say(*words):
    with open(f"calls-{os.environ['RANK']}.txt", "a") as file:
        print(*words, file=file)
    print(*words)


kept, dropped, silent = Model("kept"), Model("dropped"), Model("silent")
weakref.finalize(kept, say, "finalize kept")
weakref.finalize(dropped, say, "finalize dropped")
weakref.finalize(silent, say, "never called").atexit = False
reference = weakref.ref(dropped, lambda ref: say("callback", ref() is None))
cache = weakref.WeakValueDictionary(kept=kept, dropped=dropped)
del dropped
say(sorted(cache))
