"""What is wrong: evidence from all ranks -> Verdict. Pure."""
