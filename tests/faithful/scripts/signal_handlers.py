"""Timers, alarms and user signals; which signals are ignored and blocked at the start."""

import os
import signal

seen = []


def note(number, frame):
    seen.append(signal.Signals(number).name)


print({name: str(signal.getsignal(getattr(signal, name))) for name in ("SIGINT", "SIGTERM", "SIGPIPE", "SIGCHLD")})
print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
for name in ("SIGUSR1", "SIGUSR2", "SIGALRM", "SIGHUP"):
    signal.signal(getattr(signal, name), note)
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR2)
os.kill(os.getpid(), signal.SIGHUP)
signal.setitimer(signal.ITIMER_REAL, 0.01)
while "SIGALRM" not in seen:
    signal.pause()
print(seen)
