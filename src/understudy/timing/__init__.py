"""Step times on GPUs: model architectures, GPU data sheets, presets, and timing models built from them."""
