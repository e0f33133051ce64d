"""Commands and pipelines: children write to the same output as the script, and their codes are returned."""

import os
import subprocess
import sys

subprocess.run(["sh", "-c", "echo from a child; echo and its stderr >&2"], check=True)
os.system("echo from os.system")
first = subprocess.Popen(["printf", "b\\na\\nc\\n"], stdout=subprocess.PIPE)
second = subprocess.run(["sort"], stdin=first.stdout, capture_output=True, text=True)
print(second.stdout.split(), first.wait())
print(subprocess.run([sys.executable, "-c", "import os, sys; print(os.environ['RANK']); sys.exit(4)"]).returncode)
print(subprocess.run(["sh", "-c", "kill -9 $$"]).returncode)
with open(f"/proc/{os.getpid()}/status") as status:
    print([line.split()[0] for line in status if line.startswith("SigIgn")])
