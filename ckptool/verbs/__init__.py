"""One file a verb: what it does, with typed results. Nothing here prints."""
