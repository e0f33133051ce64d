"""One optimizer step: backward, accumulation, scaling, clipping, update and commit."""
