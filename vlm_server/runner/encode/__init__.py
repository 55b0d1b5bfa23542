"""Images and videos into features: whole, layer by layer, or tile by tile."""
