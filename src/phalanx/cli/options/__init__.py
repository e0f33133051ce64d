"""`phalanx run`'s command line: torchrun's options and ours, as one table, read into one value.

table (what there is) -> scan (words to texts) -> read (texts to values) -> runoptions (values to what they mean)
"""

from phalanx.cli.options.runoptions import RunOptions, parse_chaos, parse_plan, parse_run
from phalanx.cli.options.scan import HelpRequested
from phalanx.cli.options.values import Streams

__all__ = ["HelpRequested", "RunOptions", "Streams", "parse_chaos", "parse_plan", "parse_run"]
