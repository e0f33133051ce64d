"""logging: handlers that buffer until shutdown, a queue with a listener, rotating files."""

import logging
import logging.handlers
import os
import queue

rank = os.environ["RANK"]
target = logging.FileHandler(f"memory-{rank}.log")
memory = logging.handlers.MemoryHandler(1000, flushLevel=logging.CRITICAL, target=target)
lines = queue.Queue()
listener = logging.handlers.QueueListener(lines, logging.FileHandler(f"queue-{rank}.log", delay=True))
rotating = logging.handlers.RotatingFileHandler(f"rotating-{rank}.log", maxBytes=200, backupCount=2)

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", handlers=[memory, rotating])
logger = logging.getLogger("train")
logger.addHandler(logging.handlers.QueueHandler(lines))
logger.addHandler(logging.StreamHandler())
listener.start()


def train():
    for step in range(10):
        logger.info("step %d of rank %s", step, rank)


train()
listener.stop()
logging.getLogger("other").warning("the last one")
