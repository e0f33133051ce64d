"""unittest.main(): finds its tests in __main__ and ends with its own code."""

import os
import unittest

import torch


class Numbers(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(torch.arange(5).sum().item(), 10)

    @unittest.skip("not on this machine")
    def test_gpu(self):
        pass

    def test_rank(self):
        self.assertIn(os.environ["RANK"], "01")


if __name__ == "__main__":
    unittest.main(verbosity=2)
