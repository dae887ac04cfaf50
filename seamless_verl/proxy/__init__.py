"""Edge of the data plane: an OpenAI-compatible HTTP server that records every token it passes on."""
