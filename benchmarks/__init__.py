"""Measurements of the control plane and of the served path; `python -m benchmarks --list` names them."""
