"""The part of an engine process that runs the model."""
