"""An exception with a cause and notes."""


def load(path):
    try:
        return open(path)
    except OSError as error:
        error.add_note("is the dataset mounted?")
        raise RuntimeError("cannot train") from error


class Trainer:
    def fit(self):
        load("/nowhere/data.bin")


print("begins")
Trainer().fit()
