"""The fork server: imports torch once, touches no CUDA, then forks a worker a rank.

    agent ──socket── fork server ──fork── worker 0, worker 1, …

Cold, the fork server is the very interpreter that was asked for, `python -u script.py ARGS`, paused by a site hook
just before it would run its main module. It imports what is slow, and forks. A child returns from the hook, and
the interpreter goes on: the script is run by Python itself, with nothing of ours on the stack.

Everything in this folder uses the standard library alone and relative imports alone: it is loaded by path into
whatever interpreter runs the script, which need not have phalanx installed.
"""
