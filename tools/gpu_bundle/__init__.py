"""Packs what a GPU machine with torch but no network needs to check and serve the model (`make gpu-bundle`)."""
