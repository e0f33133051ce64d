"""What a worker reports about itself: a status slot in shared memory, and answers to requests.

Standard library only, and torch if the script has it. `probe.begin` starts a thread that Python does not list. It
samples the main thread ten times a second, publishes where it is, and answers the agent. While the GIL is held it
cannot: the agent sees that by the age of the slot, and requests stacks by a signal.
"""
