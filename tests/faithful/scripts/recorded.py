"""torch's @record around main: the error is written to a file for the launcher, and to stderr."""

import os

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    print("error file" if os.environ.get("TORCHELASTIC_ERROR_FILE") else "no error file")
    raise RuntimeError("recorded")


if __name__ == "__main__":
    main()
