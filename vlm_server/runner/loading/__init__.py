"""From a checkpoint's files to a `LoadedModel`."""
