"""Local modules that have the names of installed ones."""

import importlib.util
import sys

import yaml

import torch

print(yaml.WHO, yaml.__file__, importlib.util.find_spec("yaml").origin)
print([name for name in ("yaml", "lightning", "transformers", "pandas") if name in sys.modules], torch.ones(1))
