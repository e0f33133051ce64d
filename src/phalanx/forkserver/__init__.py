"""The fork server: imports torch once, does not touch CUDA, then forks one worker per rank.

    agent ──socket── fork server ──fork── worker 0, worker 1, …

A cold fork server is the very interpreter that was asked for, `python -u script.py ARGS`, paused by a site hook just
before it runs its main module. It imports what is slow, and forks. A child returns from the hook and the interpreter
continues: Python itself runs the script, with no frame of phalanx on the stack.

Everything in this folder uses the standard library and relative imports only: it is loaded by path into whatever
interpreter runs the script, which need not have phalanx installed.
"""
