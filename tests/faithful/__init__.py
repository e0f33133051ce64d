"""Unmodified scripts under torchrun and under phalanx: the same codes, files, output and numbers.

python -m tests.faithful                     # every kind of script, every way to start a worker: `make faithful`
python -m tests.faithful --only csv_log -v   # one kind, with each difference in full
python -m tests.faithful.exits --exits 1000  # does every process end, and with the right code?
"""
