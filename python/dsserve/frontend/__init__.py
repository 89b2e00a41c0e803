"""Between HTTP and the engine: submission, text of token streams, usage."""
