"""What a worker reports about itself: a status slot in shared memory, and answers to requests.

Uses the standard library only, and torch if the script imports it. `probe.begin` starts a thread that Python does not
list. It samples the main thread ten times per second, publishes its position, and answers the agent. It cannot do so
while another thread holds the GIL: the agent detects that from the age of the slot, and requests stacks with a signal.
"""
