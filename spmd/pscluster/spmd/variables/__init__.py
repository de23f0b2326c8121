"""Variables of global arrays, and the layouts of a model's weights, by rules."""
