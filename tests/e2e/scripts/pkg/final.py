"""A module of the script that prints when it is destroyed."""

import os
import sys


class PrintsAtDeletion:
    def __init__(self):
        self.out = sys.modules["__main__"].OUT

    def __del__(self, write=os.write):
        write(self.out, b"del in a module of the script's own\n")


final_object = PrintsAtDeletion()
