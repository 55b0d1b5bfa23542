"""Request parsing: bodies to requests for the engine, in processes that can be killed."""
