"""The HTTP server: application, endpoints and process control."""
