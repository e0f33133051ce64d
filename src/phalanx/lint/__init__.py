"""What hangs or spoils a distributed script, found by reading it: it is never run or imported. Pure."""
