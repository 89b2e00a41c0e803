"""Speculative decoding on the host: how many drafts a step verifies, and calibration of the confidences."""
