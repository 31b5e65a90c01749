"""The pickle engine: walk, edit and check pickles without running them."""
