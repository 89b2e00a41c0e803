"""Chat bodies to prompt ids and generated ids to chat deltas, around deepseek-recipe."""
