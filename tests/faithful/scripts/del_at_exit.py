"""Destructors of globals, of a cycle, of locals, and of objects that a global holds."""

import os


class Resource:
    def __init__(self, name, holds=None):
        self.name = name
        self.holds = holds

    def __del__(self, write=os.write):
        write(1, f"del {self.name}\n".encode())


first = Resource("first", Resource("held by first"))
second = Resource("second")
cycle = Resource("cycle")
cycle.holds = cycle
cache = {"last": Resource("in a dictionary")}


def work():
    local = Resource("local")
    return local.name


print(work())
