"""OpenAI's endpoints: chat completions, completions and models."""
