from . import model

SIZE = model.SIZE * 2
