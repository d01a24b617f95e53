"""Ends a process with its stdin: a pipe from whoever started it, closed by the kernel however that one ends.

For a program that does not look at its stdin by itself, ``python -m MODULE ARGUMENT …`` becomes::

    python -m tahq_netem.runtimes.stdin_watch MODULE ARGUMENT …
"""

import os
import runpy
import sys
import threading


def leave_with_stdin() -> None:
    """End this process when whoever started it has gone: its stdin then ends."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="stdin-watch", daemon=True).start()


def main() -> None:
    """Be the module that the command line names, until it or stdin ends."""
    leave_with_stdin()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
