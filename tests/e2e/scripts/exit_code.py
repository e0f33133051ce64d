"""exit_code.py HOW [, HOW …]: the way in which a script ends. With several, each rank and each attempt uses its own."""

import os
import signal
import sys
import threading

print("written before the end")
sys.stdout.write("a line without its end")

ends: list[list[str]] = [[]]
for word in sys.argv[1:]:
    if word == ",":
        ends.append([])
    else:
        ends[-1].append(word)

match ends[sum(int(os.environ.get(name, "0")) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))]:
    case ["normal"]:
        pass
    case ["code", number]:
        sys.exit(int(number))
    case ["builtin", number]:
        exit(int(number))  # noqa: PLR1722
    case ["text"]:
        sys.exit("what went wrong: é")
    case ["none"]:
        sys.exit(None)
    case ["at once", number]:
        os._exit(int(number))
    case ["signal", name]:
        os.kill(os.getpid(), signal.Signals[name])
        signal.pause()
    case ["interrupt"]:
        raise KeyboardInterrupt
    case ["thread"]:
        # An exception in a thread is printed, and the script still exits with 0.
        thread = threading.Thread(target=lambda: 1 / 0, name="worker")
        thread.start()
        thread.join()
    case ["warning"]:
        import warnings

        warnings.warn("this is old", FutureWarning, stacklevel=1)
    case ["syntax"]:
        exec("x = = 1\n")
    case ["group"]:
        raise ExceptionGroup("two at once", [ValueError(1), TypeError(2)])
    case _:
        sys.exit(f"exit_code.py: what is {sys.argv[1:]}?")
