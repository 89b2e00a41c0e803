"""Wire structs between the API process and the engine process."""
