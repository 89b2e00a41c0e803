"""The engine process: step loop, inbox, outbox, control, and its supervisor."""
