"""Vision towers that replace mlx-vlm's: patches, positions and attention; tilings of families."""
