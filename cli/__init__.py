"""The command line: `sidings`."""
