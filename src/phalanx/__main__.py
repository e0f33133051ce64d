"""`python -m phalanx`, the same as the `phalanx` command."""

import sys

try:
    from phalanx.cli.main import main
except KeyboardInterrupt:
    if sys.argv[1:2] == ["run"]:
        sys.stderr.write("phalanx: stopped by Ctrl-C\n")
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(main())
