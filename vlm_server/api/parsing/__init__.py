"""From a body to a request for the engine, in processes that can be killed."""
