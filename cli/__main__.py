"""``python -m sidings.cli``: the same as ``sidings``."""

from . import main

main()
