"""The soak test (`scripts/soak`): everything that clients do, for minutes, watching memory."""
