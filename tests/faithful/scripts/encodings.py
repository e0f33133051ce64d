"""Locale and encodings, as in the C locale and as the script changes them."""

import locale
import os
import sys

print(locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False), sys.getfilesystemencoding())
print(sys.stdout.encoding, sys.stdout.errors, sys.stderr.encoding, sys.stderr.errors, sys.flags.utf8_mode)
print(ascii(sys.argv[1:]), ascii(os.environ.get("PLACE")))
try:
    print("ä€😀")
except UnicodeEncodeError as error:
    print("cannot:", error.encoding, error.start)
with open(f"text-{os.environ['RANK']}.txt", "w") as file:
    print(file.encoding, file=file)
sys.stdout.reconfigure(encoding="utf-8")
print("now ä€😀")
