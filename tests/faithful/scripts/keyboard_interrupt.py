"""An uncaught KeyboardInterrupt."""

import signal

print("begins", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
try:
    signal.raise_signal(signal.SIGINT)
finally:
    print("interrupted")
