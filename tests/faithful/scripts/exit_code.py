"""sys.exit with a number, inside a function, through a finally."""

import os
import sys


def main():
    try:
        print("leaves")
        sys.exit(3)
    finally:
        with open("finally.txt", "w") as file:
            file.write(os.environ["RANK"])
        print("finally")


main()
