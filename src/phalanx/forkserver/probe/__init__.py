"""What a worker shows of itself, whatever it runs: a page in shared memory, and answers when it is asked.

Standard library only, and torch where the script has it. `probe.begin` starts a thread of its own that nobody sees:
it looks at the main thread ten times a second, publishes where that is, and answers the agent. While Python's lock
is held it cannot, which the agent sees by the age of the page; the stacks come by a signal then.
"""
