"""unittest.main() with a test that fails: code 1."""

import unittest


class Numbers(unittest.TestCase):
    def test_wrong(self):
        self.assertEqual(1 + 1, 3)


unittest.main()
