"""The supervisor of one node: zygote, processes, output, signals, the end."""
