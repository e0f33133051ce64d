"""Finds what is wrong: evidence from all ranks -> Verdict. Pure."""
