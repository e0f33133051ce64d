"""A script that patches torch and observes imports with its own finder."""

import sys
import types


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "made_up":
            print("asked for", name)
        return None


sys.meta_path.insert(0, Finder())
sys.modules["plugin"] = types.ModuleType("plugin")

import torch

old = torch.nn.Linear.forward
torch.nn.Linear.forward = lambda self, x: old(self, x) * 0 + 1
print(torch.nn.Linear(2, 2)(torch.ones(2)).tolist(), torch.__version__)
try:
    import made_up  # noqa: F401
except ImportError as error:
    print(type(error).__name__, error)
print([type(finder).__name__ if not isinstance(finder, type) else finder.__name__ for finder in sys.meta_path])
print(len(sys.path_hooks), sorted(set(sys.builtin_module_names) & {"posix", "_io"}))
