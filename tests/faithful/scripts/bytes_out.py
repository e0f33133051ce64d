"""Bytes that are not text, lines without a newline, carriage returns, and many lines at once."""

import os
import sys

rank = os.environ["RANK"]
sys.stdout.buffer.write(b"\xff\xfe raw \x00 bytes\n")
os.write(1, b"straight to the descriptor\n")
print("one\rtwo\rthree")
print("\x1b[31mred\x1b[0m ä€😀")
print("x" * 70000)
for number in range(500):
    print(number, end=" " if number % 50 else "\n", flush=number % 7 == 0)
print("a\n\n\nb", file=sys.stderr)
sys.stdout.write("no end of line")
