"""The command line: options from the config dataclasses, and one module per command."""
