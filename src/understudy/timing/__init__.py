"""How long a step takes on a GPU: shapes of models, presets of GPUs, and what they come to."""
