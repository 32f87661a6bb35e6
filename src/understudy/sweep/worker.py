"""A worker process of a sweep: receives candidates from the driver and sends back their outcomes.

Run by the driver as `python -m understudy.sweep.worker CONNECTION MEMORY`, with the numbers of two inherited
descriptors. It ends when the driver closes the connection or is killed.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from understudy.sweep.candidate import evaluate


def main() -> None:
    """Evaluate candidates until the connection ends."""
    connection = Connection(int(sys.argv[1]))
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        workload = connection.recv().load(int(sys.argv[2]))
        while True:
            candidate, key = connection.recv()
            connection.send(evaluate(workload, candidate, key))


if __name__ == "__main__":
    main()
