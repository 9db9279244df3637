"""Examples that run: `quickstart.py`, one file, and `transports`, the demo that is also the acceptance test."""
