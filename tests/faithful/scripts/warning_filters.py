"""Warnings: filters, once per place, captured by logging, from torch."""

import logging
import warnings

import torch

for _ in range(3):
    warnings.warn("once per place")
warnings.simplefilter("always")
for _ in range(2):
    warnings.warn("always", UserWarning)
warnings.filterwarnings("ignore", message="not this")
warnings.warn("not this one")
warnings.warn("deprecated in main", DeprecationWarning)
torch.tensor(torch.ones(2))
torch.ones(2, 3).nonzero(as_tuple=False)
print(torch.ones(2, 3).T.shape, torch.arange(6).reshape(1, 2, 3).T.shape)
with warnings.catch_warnings(record=True) as caught:
    warnings.warn("caught")
print(len(caught), [str(one.message) for one in caught])
logging.captureWarnings(True)
logging.basicConfig(format="%(name)s: %(message).40s")
warnings.warn("through logging")
warnings.simplefilter("error")
try:
    warnings.warn("raised")
except UserWarning as error:
    print("raised:", error)
