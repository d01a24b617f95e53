"""``python -m vm``."""

from .run import main

if __name__ == "__main__":
    raise SystemExit(main())
