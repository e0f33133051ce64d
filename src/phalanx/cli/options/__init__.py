"""The command line of `phalanx run`, `plan` and `chaos`: torchrun's options and phalanx's own.

table.py declares the options; scan.py finds them in the command line, read.py parses their values, checks.py compares
them, and run_options.py puts them into groups.
"""

from phalanx.cli.options.run_options import RunOptions, parse_chaos, parse_plan, parse_run
from phalanx.cli.options.scan import HelpRequested

__all__ = ["HelpRequested", "RunOptions", "parse_chaos", "parse_plan", "parse_run"]
